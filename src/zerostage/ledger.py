"""The account of every byte: memory by term and traffic by collective, expected beside measured.

Expected figures are computed from parameter shapes, the partition and the padding of
`layout.py`. Measured ones are read from the live tensors' storages and from the counter in
the collectives. The two never share a number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from zerostage.collectives import World, piece_size
from zerostage.partition import Partition
from zerostage.unit import Unit, gradients_bound

#: Terms that every rank holds between backward and step.
TERMS = ("weights", "gradients", "master", "exp_avg", "exp_avg_sq")


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    seen: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        seen[storage._cdata] = storage
    return list(seen.values())


@dataclass
class Ledger:
    """Bytes on this rank by term.

    `expected`: from shapes and partition, at rest with gradients present and optimizer state
    made. `measured`: the live storages now. `peak`: 'gathered' and 'in_flight' are the most
    that these two held since the start, 'engine' is at rest plus these, 'bound' what the
    design allows without activations (see `peak_bound`); 'allocated' is CUDA's own account.
    'average' is what the model's `EMA`s keep, 'set aside' the trained weights within `EMA.applied`.
    """

    expected: dict[str, int]
    measured: dict[str, int]
    peak: dict[str, int]

    def __str__(self) -> str:
        rows = [f"{'bytes per rank':<18}{'expected':>16}{'measured':>16}"]
        for term in dict.fromkeys((*self.expected, *self.measured)):
            rows.append(f"{term:<18}{self.expected.get(term, 0):>16,}{self.measured.get(term, 0):>16,}")
        return "\n".join(rows)


@dataclass
class Traffic:
    """Bytes sent by this rank and calls, by collective, since the last `reset`.

    'all_gather' carries weights (and at stage 0 reduced gradients), 'reduce_scatter' gradients.
    'agreement' is the small exchange of each step, 'broadcast' the initial values.
    """

    world: World
    units: list[Unit] = field(repr=False)

    @property
    def bytes(self) -> dict[str, int]:
        return dict(self.world.meter.bytes)

    @property
    def calls(self) -> dict[str, int]:
        return dict(self.world.meter.calls)

    def reset(self) -> None:
        self.world.meter.reset()

    def __str__(self) -> str:
        rows = [f"{'sent by this rank':<18}{'bytes':>16}{'calls':>10}"]
        rows += [f"{name:<18}{sent:>16,}{self.calls[name]:>10,}" for name, sent in self.bytes.items()]
        return "\n".join(rows)

    def expected(self, micro_batches: int = 1) -> dict[str, int]:
        """Bytes that one step of `micro_batches` forwards and backwards, each synchronised, must send.

        For stages 0 to 3 the sum is (n-1)/n times 2, 2, 2 and 3 model sizes at one micro-batch.
        """
        total: Counter[str] = Counter({"all_gather": 0, "reduce_scatter": 0})
        for flat in (flat for unit in self.units for flat in unit.flats):
            gradient = flat.grad_dtype.itemsize if flat.trainable else 0
            sizes = (flat.layout.numel, flat.dtype.itemsize, gradient)
            total.update(self.world.partition.traffic(self.world.size, *sizes, micro_batches))
        return dict(total)


def expected_bytes(units: Iterable[Unit], partition: Partition, states: Iterable[str], averages: int = 0) -> dict[str, int]:
    """Bytes at rest by term, from the layouts: the whole flat divided by the term's degree."""
    total: Counter[str] = Counter(dict.fromkeys((*TERMS[:3], *states), 0))
    for flat in (flat for unit in units for flat in unit.flats):
        numel = flat.layout.numel
        total["weights"] += numel // partition.weights * flat.dtype.itemsize
        if flat.trainable:
            total["gradients"] += numel // partition.gradients * flat.grad_dtype.itemsize
            if flat.has_master:
                total["master"] += numel // partition.optimizer * flat.master_dtype.itemsize
            for state in states:
                total[state] += numel // partition.optimizer * flat.master_dtype.itemsize
            if averages:
                total["average"] += averages * numel // partition.optimizer * max(4, flat.master_dtype.itemsize)
    return dict(total)


def peak_bound(units: list[Unit], world: World, prefetch: int) -> int:
    """The most bytes that gathered weights and gradients in flight may take, besides what is at rest.

    Resident units, 1 + prefetch of the largest other one; gradients (`gradients_bound`); and
    fp32 pieces of constant size, one for each level of the sum over ranks and one more.
    """
    partition = world.partition
    weights = 0
    if partition.weights > 1:
        others = [unit.nbytes for unit in units if not unit.resident]
        weights = sum(unit.nbytes for unit in units if unit.resident) + (1 + prefetch) * max(others, default=0)
    scratch = (1 + world.size.bit_length()) * piece_size(world.device) * 4
    return weights + gradients_bound(units, partition) + scratch


def measure(storages: dict[str, list[torch.Tensor]]) -> dict[str, int]:
    """Bytes by term; a storage that several terms view counts for the first of them."""
    seen: set[int] = set()
    result: dict[str, int] = {}
    for term, tensors in storages.items():
        fresh = {s._cdata: s.nbytes() for s in _storages(tensors) if s._cdata not in seen}
        seen |= fresh.keys()
        result[term] = sum(fresh.values())
    return result


def ledger(
    units: list[Unit],
    world: World,
    prefetch: int,
    storages: dict[str, list[torch.Tensor]],
    states: list[str],
    averages: int,
) -> Ledger:
    """The account of one engine; see `Ledger`."""
    expected = expected_bytes(units, world.partition, states, averages)
    measured = measure(storages)
    at_rest = sum(size for term, size in measured.items() if term not in ("gathered", "in_flight", "buffers"))
    peak: dict[str, Any] = {
        "gathered": world.gathered.peak,
        "in_flight": world.in_flight.peak,
        "engine": at_rest + world.gathered.peak + world.in_flight.peak,
        "bound": sum(expected.values()) + peak_bound(units, world, prefetch),
    }
    if world.device.type == "cuda":
        peak["allocated"] = torch.cuda.max_memory_allocated(world.device)
    expected["buffers"] = sum(b.numel() * b.element_size() for b in storages["buffers"])
    return Ledger(expected, measured, peak)
