"""The global norm of divided gradients, and whether they are finite.

Each rank looks at the share that is its own alone, so that every element counts once, tied
weights count once and padding, which is zero, not at all. Squares are summed in fp64: the
norm, rounded to fp32, is the same at every partition and for every division into units.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from zerostage.collectives import World, piece_size
from zerostage.flat import Flat


def _own(flats: Iterable[Flat]) -> Iterator[torch.Tensor]:
    """This rank's own gradients, flat by flat."""
    for flat in flats:
        if flat.trainable and flat.reduced:
            flat.settled_grad()
            yield flat.own_grad


def _pieces(flats: Iterable[Flat]) -> Iterator[torch.Tensor]:
    """The same, in pieces."""
    for own in _own(flats):
        yield from own.split(piece_size(own.device))


def grad_norm(flats: Iterable[Flat], world: World, norm_type: float = 2.0) -> float:
    """The 2-norm or infinity-norm over all ranks, in fp64; every rank computes the same value."""
    if norm_type == 2.0:
        squares = [piece.to(torch.float64, copy=True).square_().sum() for piece in _pieces(flats)]
        own = float(torch.stack(squares).sum()) if squares else 0.0
        return math.sqrt(math.fsum(world.collect(own, "the gradient norm")))
    if norm_type == math.inf:
        largest = [piece.abs().max().double() for piece in _pieces(flats)]
        own = float(torch.stack(largest).max()) if largest else 0.0
        everyone = world.collect(own, "the gradient norm")
        return math.nan if any(map(math.isnan, everyone)) else max(everyone)
    raise ValueError(f"norm_type is {norm_type!r}; it must be 2.0 or infinity")


def scale_gradients(flats: Iterable[Flat], factor: float) -> None:
    """Multiply the kept gradients, in fp32 and rounded once."""
    for flat in flats:
        if flat.trainable and flat.reduced:
            gradient = flat.settled_grad()
            factor32 = torch.tensor(factor, dtype=torch.float32)
            for piece in gradient.split(piece_size(flat.device)):
                wide = torch.promote_types(piece.dtype, torch.float32)
                piece.copy_(piece.to(wide).mul_(factor32.to(piece.device)))


def own_finite(flats: Iterable[Flat]) -> bool:
    """Whether the gradients of this rank's own share are all finite."""
    bounds = [torch.stack(torch.aminmax(own)) for own in _own(flats) if own.numel()]
    return not bounds or bool(torch.isfinite(torch.cat(bounds)).all())


def not_finite(flats: Iterable[Flat]) -> list[tuple[str, str]]:
    """(parameter name, 'NaN' or 'Inf') of what is not finite within this rank's own share."""
    found = []
    for flat in flats:
        if not (flat.trainable and flat.reduced):
            continue
        first = flat.bounds[4][0]
        for index, start, stop in flat.layout.segments(*flat.bounds[4]):
            values = flat.own_grad[start - first : stop - first]
            if not bool(torch.isfinite(values).all()):
                kind = "NaN" if bool(torch.isnan(values).any()) else "Inf"
                found.append((flat.layout.slots[index].name, kind))
    return found
