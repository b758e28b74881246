"""A ZeRO stage is three degrees: which term of the training state is divided by how much.

Everything that is called a stage elsewhere is a preset here. The engine asks a
`Partition` how long each term's slice is and which ranks hold the rest of it; the planner
evaluates the same object. Arithmetic only: no torch, no processes.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Bytes per parameter of mixed-precision Adam: bf16 weights and gradients, fp32 master
#: weights and two fp32 moments (Rajbhandari et al., "ZeRO: Memory Optimizations Toward
#: Training Trillion Parameter Models", 2020, section 3.1).
WEIGHTS, GRADIENTS, OPTIMIZER = 2, 2, 12

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Partition:
    """The number of ranks over which each term is divided.

    `optimizer` divides master weights and moments, `gradients` the gradients, `weights`
    the low-precision weights. 1 means that every rank holds the whole term. Each degree
    must divide the one before it and `optimizer` must divide the number of ranks, so that
    a rank's optimizer slice lies inside its gradient slice, and that inside its weight slice.
    """

    optimizer: int
    gradients: int
    weights: int

    def __post_init__(self) -> None:
        for name in ("optimizer", "gradients", "weights"):
            degree = getattr(self, name)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ValueError(f"Partition.{name} is {degree!r}; it must be a whole number of ranks, 1 or more")
        if self.gradients % self.weights or self.optimizer % self.gradients:
            raise ValueError(
                f"{self}: weights must divide gradients and gradients must divide optimizer, "
                "so that each slice lies inside the next larger one"
            )

    @classmethod
    def from_stage(cls, stage: int, ranks: int) -> Partition:
        """The partition that ZeRO stage `stage` (0 to 3) means on `ranks` ranks."""
        if stage not in STAGES or isinstance(stage, bool):
            raise ValueError(f"stage is {stage!r}; it must be 0, 1, 2 or 3 (or give a partition)")
        return cls(*(ranks if stage >= first else 1 for first in (1, 2, 3)))

    @classmethod
    def hybrid(cls, ranks_per_node: int) -> Partition:
        """Everything divided within a node and replicated across nodes (FSDP's HYBRID_SHARD)."""
        return cls(ranks_per_node, ranks_per_node, ranks_per_node)

    @classmethod
    def node_local_weights(cls, ranks: int, ranks_per_node: int) -> Partition:
        """Optimizer and gradients divided over all ranks, weights gathered only within a node."""
        return cls(ranks, ranks, ranks_per_node)

    def check(self, ranks: int) -> Partition:
        """Return self, or raise ValueError when this partition does not fit `ranks` ranks."""
        if ranks % self.optimizer:
            raise ValueError(f"{self} does not fit {ranks} ranks: optimizer={self.optimizer} must divide {ranks}")
        return self

    def stage(self, ranks: int) -> int | None:
        """The stage that this partition is on `ranks` ranks, or None for a hybrid.

        On one rank all stages are the same partition; it counts as stage 0.
        """
        for stage in STAGES:
            if self == Partition.from_stage(stage, ranks):
                return stage
        return None

    def levels(self, ranks: int) -> tuple[int, int, int, int]:
        """How many ranks each level joins, innermost first: weights, gradients, optimizer, replicas.

        Their product is `ranks`. Rank r has one digit a level (see `digits`), the innermost
        counting fastest, so that the ranks of a level-0 group are neighbours (one node).
        """
        self.check(ranks)
        w, g, o = self.weights, self.gradients, self.optimizer
        return (w, g // w, o // g, ranks // o)

    def digits(self, rank: int, ranks: int) -> tuple[int, int, int, int]:
        """The place of `rank` within its group at each level."""
        digits = []
        for radix in self.levels(ranks):
            rank, digit = divmod(rank, radix)
            digits.append(digit)
        return tuple(digits)

    def interval(self, level: int, rank: int, ranks: int, numel: int) -> tuple[int, int]:
        """[start, stop) of the slice of `numel` elements that `rank` holds after `level` divisions.

        level 0 is the whole, 1 the weight slice, 2 the gradient slice, 3 the optimizer
        slice, 4 the share that is this rank's alone. `numel` must be a multiple of `ranks`.
        """
        start = 0
        for radix, digit in list(zip(self.levels(ranks), self.digits(rank, ranks)))[:level]:
            numel //= radix
            start += digit * numel
        return start, start + numel

    def bytes(self, parameters: float) -> dict[str, float]:
        """Bytes per rank by term for mixed-precision Adam, `parameters` parameters, no padding.

        weights 2/w, gradients 2/g, optimizer 12/o bytes per parameter.
        """
        return {
            "weights": WEIGHTS * parameters / self.weights,
            "gradients": GRADIENTS * parameters / self.gradients,
            "optimizer": OPTIMIZER * parameters / self.optimizer,
        }

    def bytes_per_parameter(self) -> float:
        """Bytes per parameter and rank: 16 at stage 0, 4 + 12/n, 2 + 14/n and 16/n at 1, 2 and 3."""
        return sum(self.bytes(1).values())

    def traffic(
        self, ranks: int, elements: int, itemsize: int, gradient_itemsize: int, micro_batches: int = 1, reductions: int | None = None
    ) -> dict[str, int]:
        """Bytes that a rank sends in a step for `elements` weights that lie together.

        A collective over k ranks that turns parts of S/k bytes into S bytes, or back, sends (k-1)/k S per rank.
        Gradients that a level has already summed travel on in fp32. gradient_itemsize: 0 for frozen weights.
        reductions: how often gradients are reduced in the step, each micro-batch where None.
        """
        levels = self.levels(ranks)
        gathered = 2 * micro_batches * elements * itemsize * (levels[0] - 1) // levels[0]  # for forward and for backward
        reduced = 0
        if gradient_itemsize:
            times = micro_batches if reductions is None else reductions
            part, size = elements, gradient_itemsize
            for radix in levels:
                if radix > 1:
                    reduced += times * part * size * (radix - 1) // radix
                    size = max(4, size)
                part //= radix
            gathered += times * (elements // self.optimizer) * gradient_itemsize * (levels[3] - 1) // levels[3]
            for level, degree in ((1, self.weights), (2, self.gradients)):  # updated weights
                gathered += elements // degree * itemsize * (levels[level] - 1) // levels[level]
        return {"all_gather": gathered, "reduce_scatter": reduced}
