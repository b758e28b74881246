"""Parameters laid end to end in a flat buffer, aligned, and cut into equal slices.

Arithmetic only. Every parameter starts at a multiple of `ALIGN` elements and the buffer's
length is a multiple of `ranks * ALIGN`, whatever the partition. So slices fall on the same
elements at every stage, and every piece that a vectorised kernel sees is a whole number of
vectors: no element is handled by a scalar tail at one stage and by a vector at another,
which may round differently.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Elements. 64 fp32 values are four AVX-512 vectors, 64 bf16 values two.
ALIGN = 64


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def padded(counts: Iterable[int], ranks: int) -> int:
    """Elements of a buffer for parameters of `counts` elements each."""
    return round_up(sum(round_up(count, ALIGN) for count in counts), ALIGN * ranks)


@dataclass(frozen=True)
class Slot:
    """The place of one parameter: elements [start, start + numel) are its values, up to `stop` is padding."""

    names: tuple[str, ...]  # more than one where modules share the parameter
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Layout:
    """The slots of one flat buffer, in order, and its length `numel` in elements."""

    def __init__(self, entries: Sequence[tuple[tuple[str, ...], Sequence[int]]], ranks: int) -> None:
        ends, position = [], 0
        for _, shape in entries:
            position += round_up(math.prod(shape), ALIGN)
            ends.append(position)
        self.numel = padded((math.prod(shape) for _, shape in entries), ranks)
        if ends:
            ends[-1] = self.numel  # the tail's padding belongs to the last slot, so that slots cover everything
        starts = [0, *ends[:-1]]
        self.slots = [
            Slot(tuple(names), tuple(shape), start, stop)
            for (names, shape), start, stop in zip(entries, starts, ends)
        ]

    @property
    def values(self) -> int:
        """Elements that belong to parameters, without the padding."""
        return sum(slot.numel for slot in self.slots)

    def padding(self) -> list[tuple[int, int]]:
        """[start, stop) of each piece of padding."""
        return [(s.start + s.numel, s.stop) for s in self.slots if s.start + s.numel < s.stop]

    def segments(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(slot index, first, last) of each slot's part of [start, stop), padding included, empty parts left out."""
        parts = ((i, max(start, slot.start), min(stop, slot.stop)) for i, slot in enumerate(self.slots))
        return [(i, first, last) for i, first, last in parts if first < last]
