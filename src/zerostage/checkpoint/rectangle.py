"""A rectangular part of a tensor of any number of dimensions against an interval of the flattened tensor.

`shape` is the whole tensor's; a rectangle has `offsets` in it and `sizes`, one for each dimension.
"""

from __future__ import annotations

import math

import torch

Sizes = tuple[int, ...]


def overlap(offsets: Sizes, sizes: Sizes, shape: Sizes, start: int, stop: int) -> int:
    """How many elements of the rectangle have a flattened index in [start, stop)."""
    return _below(offsets, sizes, shape, stop) - _below(offsets, sizes, shape, start)


def _below(offsets: Sizes, sizes: Sizes, shape: Sizes, stop: int) -> int:
    """How many elements of the rectangle have a flattened index below `stop`."""
    if stop >= math.prod(shape):
        return math.prod(sizes)
    count = 0
    for dim in range(len(shape)):
        index, stop = divmod(stop, math.prod(shape[dim + 1 :]))
        inside = index - offsets[dim]
        count += min(max(inside, 0), sizes[dim]) * math.prod(sizes[dim + 1 :])
        if not 0 <= inside < sizes[dim]:
            break
    return count


def rows(offsets: Sizes, sizes: Sizes, shape: Sizes, start: int, stop: int) -> tuple[int, int]:
    """Which of the rectangle's rows (indices in its first dimension) can have elements in [start, stop), which is not empty."""
    row = math.prod(shape[1:])
    return max(start // row - offsets[0], 0), min((stop - 1) // row + 1 - offsets[0], sizes[0])


def copy(out: torch.Tensor, start: int, stop: int, values: torch.Tensor, offsets: Sizes, shape: Sizes) -> None:
    """Copy what the rectangle `values` at `offsets` has of the flattened interval [start, stop), which `out` holds.

    The interval's whole rows are one strided copy; the broken rows at its two ends are intervals of a
    tensor with one dimension less.
    """
    if start >= stop:
        return
    if not shape:
        out.view(()).copy_(values)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # rows [first, last) are whole
    low, high = max(first, offsets[0]), min(last, offsets[0] + values.shape[0])
    if low < high:
        target = out[first * row - start : last * row - start].view(last - first, *shape[1:])[low - first : high - first]
        for dim in range(1, len(shape)):
            target = target.narrow(dim, offsets[dim], values.shape[dim])
        target.copy_(values[low - offsets[0] : high - offsets[0]])
    for index in {start // row, (stop - 1) // row}:
        inside = index - offsets[0]
        if not first <= index < last and 0 <= inside < values.shape[0]:
            begin, end = max(start, index * row), min(stop, (index + 1) * row)
            copy(out[begin - start : end - start], begin - index * row, end - index * row, values[inside], offsets[1:], shape[1:])
