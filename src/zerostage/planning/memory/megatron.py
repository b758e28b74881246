"""Megatron-LM: what a rank holds, and when.

Sources, in megatron/core: distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py, optimizer/optimizer.py;
bytes per parameter: docs, "Distributed Optimizer" (bf16 weights and fp32 gradients: 18 without it, 6 + 12/d with it).
"""

from __future__ import annotations

from zerostage.planning.memory.buffers import Buffers
from zerostage.planning.model.architecture import Unit
from zerostage.planning.run import ITEMSIZE


class Megatron(Buffers):
    """Stage 1: the distributed optimizer, which divides masters and moments; stage 0: every rank has them whole.

    Gradients are one buffer, fp32 where the run does not say, that is made once, set to zero and never freed. Matrix
    products of linear layers add into it (gradient_accumulation_fusion), so that they have no gradient of their own.
    """

    kernel = "fused"
    stages = (0, 1)
    gradients_outlive_zero_grad = True

    def gradient_itemsize(self) -> int:
        return ITEMSIZE["fp32"]

    def start(self) -> None:
        super().start()
        self.track.change("gradients", self.sizes()["gradients"])

    def arrive(self, unit: Unit, elements: int) -> None:
        if unit.name not in self.architecture.block_names:  # embedding: made, then added
            self.track.change("reduce", elements * self.c)
            self.track.change("reduce", -elements * self.c)

    def step(self) -> None:
        """The masters' gradients are views of the buffer, or copies where the dtypes differ."""
        trained = sum(self.padded(unit, True) for unit in self.units)
        copy = trained * self.master // self.partition.optimizer if self.g != self.master and self.has_master else 0
        self.track.change("optimizer_temporaries", copy)
        super().step()
        self.track.change("optimizer_temporaries", -copy)

    def zero_grad(self) -> None:
        """The buffer stays."""
