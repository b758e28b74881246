"""Which stage, or which hybrid partition, sends what was sent in a step.

Compared are elements, not bytes, by what is done with them: all-reduced, gathered, reduced. So an
engine that sends fp32 has its stage, and the width of what it sends is a difference to name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zerostage.mistakes import some
from zerostage.partition import STAGES, Partition
from zerostage.sends import Sent
from zerostage.storages import Holdings, Parameter

GATHERS = ("all-gather", "broadcast")
REDUCTIONS = ("reduce-scatter", "reduce")
#: Share of a model size within which what was sent equals what a stage sends: the padding of other engines.
_ALIKE = 0.03
_MOST_MICRO_BATCHES = 64


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def textbook(n: int, parameters: dict[str, Parameter]) -> dict[int, float]:
    """Stage -> model sizes that a step of one micro-batch sends: 2, 2, 2 and 3 (fewer with frozen weights, 0 on one rank)."""
    frozen, trainable = (sum(p.numel for p in parameters.values() if p.trainable is kind) for kind in (False, True))
    size = (frozen + trainable) * (n - 1) / n
    if not size:
        return dict.fromkeys(STAGES, 0.0)
    return {stage: sum(_pattern(Partition.from_stage(stage, n), n, frozen, trainable)) / size for stage in STAGES}


def _pattern(
    partition: Partition, n: int, frozen: int, trainable: int, width: int = 4, batches: int = 1, reductions: int = 1
) -> tuple[float, float]:
    """Elements that a rank sends in gathers and in reductions, in a step of so many micro-batches and reductions.

    width: bytes of a gradient; `Partition.traffic` has narrow ones widen after a first level.
    """
    sent = Counter(partition.traffic(n, frozen, width, 0, batches))
    sent.update(partition.traffic(n, trainable, width, width, batches, reductions))
    return sent["all_gather"] / width, sent["reduce_scatter"] / width


def _candidates(n: int) -> Iterator[tuple[int | None, Partition, int, int]]:
    """Stage (None: a hybrid), partition, micro-batches and reductions, the plainest first."""
    stages = [(stage, Partition.from_stage(stage, n)) for stage in STAGES]
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    hybrids = [Partition(o, g, w) for o in divisors for g in divisors for w in divisors if o % g == g % w == 0]
    yield from ((stage, partition, 1, 1) for stage, partition in stages)
    yield from ((None, partition, 1, 1) for partition in hybrids if partition.stage(n) is None)
    for times in range(2, _MOST_MICRO_BATCHES + 1):
        yield from ((stage, partition, times, reductions) for reductions in (times, 1) for stage, partition in stages)


@dataclass(frozen=True)
class _Elements:
    """Elements that a rank sent, and the model that they are compared with."""

    all_reduced: float
    gathered: float
    reduced: float
    n: int
    frozen: int
    trainable: int
    widths: set[int]  #: bytes of a gradient, of which `Partition.traffic` depends for hybrids
    kept: int = 0  #: elements of units that stay whole from forward until the end of backward

    @property
    def share(self) -> float:
        """Elements that a rank sends where all of them pass one collective."""
        return (self.frozen + self.trainable) * (self.n - 1) / self.n

    def matches(self) -> Iterator[tuple[int | None, Partition, int, bool]]:
        """Stage, partition, micro-batches, and whether units that stay whole had to be gathered only once."""
        for kept in dict.fromkeys((0, self.kept)):
            for stage, partition, batches, reductions in _candidates(self.n):
                w, replicas = partition.weights, partition.levels(self.n)[3]
                apart = reductions * self.trainable / partition.optimizer * (replicas - 1) / replicas
                for width in self.widths:
                    g, r = _pattern(partition, self.n, self.frozen, self.trainable, width, batches, reductions)
                    g -= batches * kept * (w - 1) / w
                    # A sum over replicas is an all-reduce, or the same in two.
                    for wanted in ((0.0, g, r), (2 * apart, g - apart, r - apart)):
                        sent = self.all_reduced, self.gathered, self.reduced
                        if all(abs(a - b) <= _ALIKE * self.share for a, b in zip(sent, wanted)):
                            yield stage, partition, batches, bool(kept)


def compare(
    calls: list[Sent], held: Holdings, parameters: dict[str, Parameter], n: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], list[str]]:
    """The stages that send what `calls` did on n ranks, and in what it differs from them. See `TrafficAudit.stages`."""
    if n == 1:
        return (0,), []
    kept = {name: size for name, (size, degree) in held.units.items() if degree == 1}
    frozen, trainable = (sum(p.whole for p in parameters.values() if p.trainable is kind) for kind in (False, True))
    all_reduced, gathered, reduced = (
        sum(call.bytes / call.dtype.itemsize for call in calls if call.collective in kinds)
        for kinds in (("all-reduce",), GATHERS, REDUCTIONS)
    )
    widths = {4, *(call.dtype.itemsize for call in calls if call.collective in REDUCTIONS)}
    sent = _Elements(all_reduced, gathered, reduced, n, frozen, trainable, widths, sum(kept.values()))
    found, told = _found(sent, list(kept))
    if not found and not told and all_reduced:
        halved = _Elements(0.0, gathered, reduced + all_reduced / 2, n, frozen, trainable, widths, sum(kept.values()))
        found, told = _found(halved, list(kept))
        found = tuple(stage for stage in found if stage)
        if found:
            size = all_reduced / sent.share
            text = f"{size:.2f} model sizes of elements, where a reduce-scatter sends {size / 2:.2f}"
            told.insert(0, f"Gradients are all-reduced: {text}.")
    if not found and not told:
        parts = {"all-reduced": all_reduced / 2, "gathered or broadcast": gathered, "reduced": reduced}
        said = ", ".join(f"{kind} {elements / sent.share:.2f} times" for kind, elements in parts.items() if elements)
        told = [f"No stage sends this: the model's elements are {said or 'neither gathered nor reduced'}."]
    return found, told + _widths(calls, dtype)


def _found(sent: _Elements, units: list[str]) -> tuple[tuple[int, ...], list[str]]:
    """The stages of the plainest match, and what it takes besides; neither where there is none."""
    matches = list(sent.matches())
    if not matches:
        return (), []
    stage, _, batches, kept = matches[0]
    alike = [match for match in matches if match[2:] == (batches, kept) and (match[0] is None) == (stage is None)]
    told = []
    if stage is None:
        told.append(f"A hybrid's traffic: that of {' or '.join(dict.fromkeys(str(partition) for _, partition, *_ in alike))}.")
    if batches > 1:
        told.append(f"It is that of {batches} micro-batches.")
    if kept:
        share = sent.kept / (sent.frozen + sent.trainable)
        told.append(f"{share:.1%} of the weights ({some(units)}) stay whole from forward until backward: gathered once, not twice.")
    return tuple(dict.fromkeys(match[0] for match in alike if match[0] is not None)), told


def _widths(calls: list[Sent], dtype: torch.dtype) -> list[str]:
    """Where elements travel in another width than that of a model size."""
    pairs = dict.fromkeys((call.collective, call.dtype) for call in calls if call.bytes)
    return [
        f"{kind} carries {dtype_name(found)}, {found.itemsize / dtype.itemsize:g} times the bytes of {dtype_name(dtype)} "
        "an element."
        for kind, found in pairs
        if found.itemsize != dtype.itemsize
    ]
