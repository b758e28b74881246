"""Ranks with different numbers of batches: stop together, or join the others with empty ones."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zerostage.autograd import not_compiled
from zerostage.engine import require

log = logging.getLogger("zerostage")


def together(model: nn.Module, batches: Iterable[Any], uneven: str = "stop") -> Iterator[Any]:
    """This rank's batches, in step with the other ranks'. Every rank must iterate to the end.

    uneven="stop": ends on all ranks as soon as one has no batch left. What the others still
        had is dropped; rank 0 logs how many batches of which rank.
    uneven="join": ends when no rank has a batch left. A rank that has run out is given None
        meanwhile and calls `take_part(model)` in place of its forward and backward.

    Costs one all-reduce of 8 bytes per rank and batch. Raises ValueError for another `uneven`.
    """
    if uneven not in ("stop", "join"):
        raise ValueError(f"uneven is {uneven!r}; it must be 'stop' or 'join'")
    world = require(model).world
    own, count = iter(batches), 0
    nothing = object()
    while True:
        batch = next(own, nothing)
        have = world.collect(float(batch is not nothing), "the next batch (zerostage.together)")
        if not any(have) or uneven == "stop" and not all(have):
            break
        count += 1
        yield None if batch is nothing else batch
    if any(have):
        left = len(batches) - count if hasattr(batches, "__len__") else int(batch is not nothing)
        at_least = not hasattr(batches, "__len__")
        everyone = world.collect_objects((left, at_least), "the batches left (zerostage.together)")
        dropped = [f"{n}{' or more' if more else ''} of rank {rank}" for rank, (n, more) in enumerate(everyone) if n]
        if world.rank == 0:
            short = [rank for rank, has in enumerate(have) if not has]
            log.warning(f"stopped after {count} batches on every rank: ranks {short} have no more; dropped: {', '.join(dropped)}")


@not_compiled
def take_part(model: nn.Module, backward: bool = True) -> None:
    """Do this rank's share of the collectives of one forward and backward of the other ranks, without a batch.

    Adds nothing to the gradients; they are still averaged over all ranks, so that a mean
    over fewer needs the loss scaled by ranks / ranks with a batch. With `no_sync` it belongs within it, as the
    others' backward does. backward=False: the others run a forward only, as in evaluation. A
    forward of a model whose weights are whole takes no collectives, so nothing happens. Before a first step
    has shown in which order weights are needed, all of them are gathered at a time.
    """
    with torch.no_grad():
        require(model).schedule.take_part(model, backward)
