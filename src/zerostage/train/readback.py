"""Whether a checkpoint that was just written has what this rank holds, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from zerostage.checkpoint import folder
from zerostage.checkpoint.source import MASTER, WEIGHTS, Piece
from zerostage.checkpoint.stored import StoredSource


def compare(path: Path, engine: Any) -> list[str]:
    """What is wrong with the checkpoint at `path`, as far as this rank sees: [] where nothing is.

    Checksums are shared out among the ranks. Then this rank reads its parts of the weights, the
    masters and the optimizer's states, one parameter at a time, and compares them with its own.
    """
    if problems := folder.check(path, (engine.world.rank, engine.world.size)):
        return problems
    source = StoredSource(path)
    for flat in engine.flats:
        for index, first, last in flat.layout.segments(*flat.bounds[1]):
            base = flat.bounds[1][0]
            problems += _differing(source, flat, index, WEIGHTS, first, last, flat.shard[first - base : last - base])
        if not flat.trainable or engine.driver is None:
            continue
        for segment in engine.driver.segments[flat]:
            terms = {MASTER: segment.master.detach()} if flat.has_master else {}
            for term, held in (terms | engine.driver.state_of(segment)).items():
                if isinstance(held, torch.Tensor) and held.dim():
                    problems += _differing(source, flat, segment.index, term, segment.start, segment.stop, held)
    return problems


def _differing(source: StoredSource, flat: Any, index: int, term: str, first: int, last: int, held: torch.Tensor) -> list[str]:
    """Compare elements [first, last) of a flat, padding apart, which lie within parameter `index`."""
    slot = flat.layout.slots[index]
    last = min(last, slot.start + slot.numel)
    if first >= last:
        return []
    out = torch.empty(last - first, dtype=held.dtype)
    source.read(term, [Piece(slot.name, first - slot.start, last - slot.start, out)])
    same = torch.equal(out.view(torch.uint8), held[: last - first].cpu().contiguous().view(torch.uint8))
    return [] if same else [f"'{slot.name}' ({term}) differs in {source.path}"]
