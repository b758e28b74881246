"""What an engine holds beside the activations, and when: weights at rest and gathered, gradients, optimizer state.

`Buffers` is what every engine has in common; zerostage's own are in `zerostage.py`, torch's in `engines.py`. `walk.py`
calls the methods in the order of a step.
"""

from __future__ import annotations

from zerostage.partition import Partition
from zerostage.planning.memory.track import Track
from zerostage.planning.model.architecture import Architecture, Unit
from zerostage.planning.run import ITEMSIZE, MOMENTS, Run


class Buffers:
    """The memory of one rank under one engine. Methods are called as a step goes on; each changes `track`."""

    #: How the optimizer's step goes by default: 'foreach' makes one temporary of a moment's size (torch's
    #: _multi_tensor_adamw: the square root of exp_avg_sq), 'fused' none.
    kernel = "foreach"
    #: Stages that it has; None among them: hybrids.
    stages: tuple[int | None, ...] = (0, 1, 2, 3, None)
    #: Whether kept gradients go only with the next forward.
    gradients_outlive_zero_grad = False
    #: Gathered units whose memory another stream may still use after it is freed.
    pending_units = 0

    def __init__(self, architecture: Architecture, run: Run, partition: Partition, ranks: int, track: Track) -> None:
        self.architecture, self.run, self.partition, self.ranks, self.track = architecture, run, partition, ranks, track
        self.c = ITEMSIZE[run.weights]
        self.has_master = run.master not in ("none", run.weights)
        self.master = ITEMSIZE[run.master] if self.has_master else self.c
        self.g = ITEMSIZE[run.gradients] if run.gradients else self.gradient_itemsize()
        self.moment = ITEMSIZE[run.moments] if run.moments else self.master
        self.units = self.divide()
        self.reduces = True  # whether this backward's gradients are reduced (not within no_sync)
        self.kept: dict[str, int] = {}  # bytes of gradients that are kept, by unit
        self.arrived: dict[str, int] = {}  # bytes of gradients as autograd has made them, by unit
        self.of = {weight.name: unit for unit in self.units for weight in unit.weights}

    # What differs between engines

    def divide(self) -> tuple[Unit, ...]:
        """What is gathered and reduced as one."""
        return self.architecture.units

    def gradient_itemsize(self) -> int:
        """Bytes of a kept gradient's element where the run does not say."""
        return self.c

    def padded(self, unit: Unit, trainable: bool) -> int:
        """Elements of a unit's trainable or frozen weights as they are laid out, on one tensor-parallel rank."""
        return sum(weight.numel for weight in unit.weights if weight.trainable is trainable) // self.run.tensor

    def buffers(self) -> int:
        """Communication buffers of a fixed size."""
        return 0

    # At rest

    def sizes(self) -> dict[str, int]:
        """Bytes at rest by term; gradients as they are between backward and the end of the step."""
        trained = sum(self.padded(unit, True) for unit in self.units)
        stored = sum(self.stored(unit) for unit in self.units)
        p, offload = self.partition, self.run.offload
        on_card = 0 if offload != "none" else 1
        states = MOMENTS[self.run.optimizer]
        found = {
            "weights": 0 if offload == "optimizer+weights" else stored // p.weights,
            "gradients": trained * self.g // p.gradients,
            "master": on_card * trained * self.master // p.optimizer if self.has_master else 0,
            "exp_avg": on_card * trained * self.moment // p.optimizer if states else 0,
            "exp_avg_sq": on_card * trained * self.moment // p.optimizer if states == 2 else 0,
            "buffers": self.buffers(),
        }
        if self.run.optimizer == "adafactor":  # a row and a column of each matrix
            rows = sum(sum(w.shape) if len(w.shape) > 1 else w.numel for w in self.architecture.weights if w.trainable)
            found["exp_avg_sq"] = on_card * 4 * rows // p.optimizer
        return found

    def stored(self, unit: Unit) -> int:
        """Bytes of a unit's whole weights as they are kept: trained ones in the compute dtype, packed ones packed."""
        packed = [w for w in unit.weights if w.bits is not None]
        bytes_ = sum(round(w.numel * w.bits / 8) for w in packed)
        return bytes_ + (self.padded(unit, True) + self.padded(unit, False) - sum(w.numel for w in packed)) * self.c

    def whole(self, unit: Unit) -> int:
        """Bytes of a unit when it is gathered."""
        return self.stored(unit)

    def gradient(self, unit: Unit) -> int:
        """Bytes of a unit's whole gradients."""
        return self.padded(unit, True) * self.g

    def pending(self) -> int:
        """Bytes that the allocator counts as active after they are freed, at most."""
        return self.pending_units * max((self.whole(unit) for unit in self.units if not unit.resident), default=0)

    def start(self) -> None:
        """What is there before a step."""
        for term, size in self.sizes().items():
            if term != "gradients":
                self.track.change(term, size)

    # A step

    def need(self, unit: Unit, following: list[Unit]) -> None:
        """A forward or backward comes to `unit`; `following` come next."""

    def leave(self, unit: Unit, last: bool) -> None:
        """A forward is done with `unit`. last: no other part of this forward uses it."""

    def end_forward(self) -> None: ...

    def arrive(self, unit: Unit, elements: int) -> None:
        """Backward has made the gradient of `elements` weights of `unit`, in the compute dtype."""

    def reduce(self, unit: Unit, following: list[Unit]) -> None:
        """Backward is done with `unit`."""

    def end_backward(self) -> None: ...

    def step(self) -> None:
        """The optimizer's step, and zero_grad after it."""
        sizes = self.sizes()
        temporary = sizes["exp_avg_sq"] if (self.run.optimizer_kernel or self.kernel) == "foreach" and self.run.optimizer == "adamw" else 0
        self.track.change("optimizer_temporaries", temporary)
        self.track.change("optimizer_temporaries", -temporary)

    def keep(self, unit: Unit, size: int) -> None:
        """Gradients of `unit` are kept from now on; the next micro-batch's are added to them."""
        self.track.change("gradients", size - self.kept.get(unit.name, 0))
        self.kept[unit.name] = size

    def add(self, unit: Unit, size: int) -> None:
        """A gradient of `unit` has come, which stays until the unit is reduced."""
        self.track.change("reduce", size)
        self.arrived[unit.name] = self.arrived.get(unit.name, 0) + size

    def complete(self, unit: Unit) -> None:
        """All gradients of `unit` are there, also those that no tape has (of biases and positions)."""
        self.track.change("reduce", self.padded(unit, True) * self.c - self.arrived.pop(unit.name, 0))

    def zero_grad(self) -> None:
        self.track.change("gradients", -self.track.now["gradients"])
        self.kept.clear()
