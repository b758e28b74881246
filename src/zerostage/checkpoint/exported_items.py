"""Which tensors an export has, under which names, and from which of a checkpoint's terms their values come."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from zerostage.checkpoint import adapter_names, exported_folder, tensor_file
from zerostage.checkpoint.source import MASTER, WEIGHTS, Piece, Source, Stored
from zerostage.checkpoint.tensor_file import Item, Part
from zerostage.mistakes import some

log = logging.getLogger("zerostage")


def items(source: Source, wanted: torch.dtype | None, trainable_only: bool) -> list[Item]:
    """What there is to write, under its own names. `origin`: its name and term, or name and buffer."""
    items = []
    for name in source.names:
        if name not in source.parameters:
            raise KeyError(f"{source.what} names the parameter '{name}', but has no values of it")
        stored = source.parameters[name]
        if stored.trainable or not trainable_only:
            dtype = _cast(stored.source, wanted)
            items.append(Item(name, stored.shape, dtype, (name, _term(name, stored, dtype))))
    if not trainable_only:
        buffers = source.buffers()
        for name in buffers:
            if name not in source.parameters:
                buffer = buffers[name]
                items.append(Item(name, tuple(buffer.shape), _cast(buffer.dtype, wanted), (name, buffer)))
    return items


def _cast(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own


def _term(name: str, stored: Stored, dtype: torch.dtype) -> str:
    weights = stored.terms.get(WEIGHTS)
    if MASTER in stored.terms and (weights is None or _loses(weights, dtype)):
        return MASTER
    if weights is None:
        raise KeyError(f"the checkpoint has no values of the parameter '{name}': neither weights nor a master copy")
    return WEIGHTS


def _loses(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether `wanted` holds values that `stored` does not."""
    if stored == wanted or not (stored.is_floating_point and wanted.is_floating_point):
        return False
    has, needs = torch.finfo(stored), torch.finfo(wanted)
    return needs.eps < has.eps or needs.max > has.max


def trained_names(source: Source) -> set[str]:
    """The first names of the parameters that were trained."""
    return {name for name in source.names if source.parameters[name].trainable}


def renamed(items: list[Item], names: dict[str, str]) -> list[Item]:
    """The items that `names` has, under the names that it gives; where two get the same, the first."""
    found: dict[str, Item] = {}
    for item in items:
        if item.name in names:
            found.setdefault(names[item.name], item._replace(name=names[item.name]))
    return list(found.values())


def without_copies(source: Source, items: list[Item], config: dict[str, Any] | None) -> list[Item]:
    """Without a head that equals the embedding, where the config says that they are one and the checkpoint does not know it."""
    pair = exported_folder.said_to_be_one(config, {item.name: item.shape for item in items})
    embedding = next((item for item in items if item.name in pair and not item.name.endswith("lm_head.weight")), None)
    head = next((item for item in items if item.name in pair and item.name.endswith("lm_head.weight")), None)
    if embedding is None or head is None:
        return items
    if _equal(source, embedding, head):
        return [item for item in items if item is not head]
    log.warning(
        f"config.json says tie_word_embeddings, but '{embedding.name}' and '{head.name}' have different values: "
        "both are written. Set it to false there, or a loader may tie them again"
    )
    return items


def _equal(source: Source, one: Item, other: Item) -> bool:
    """Whether two tensors of a shape have the same values; a window of each is held."""
    if one.dtype != other.dtype:
        return False
    for start in range(0, one.elements, tensor_file.LEAST):
        stop = min(start + tensor_file.LEAST, one.elements)
        pair = [Part(item, start, stop, torch.empty(stop - start, dtype=item.dtype)) for item in (one, other)]
        read(source, pair)
        if not torch.equal(pair[0].out, pair[1].out):
            return False
    return True


def warn_of_lost(source: Source, names: adapter_names.PeftNames) -> None:
    """A trained weight of the base model is not in the adapter, which therefore does not fit the model it began with."""
    kept, trained = set().union(*names.adapters.values()), trained_names(source)
    lost = [name for name in names.base if name in trained and name not in kept]
    if lost:
        log.warning(
            f"{len(lost):,} trained parameters are the base model's and in no adapter ({some(lost)}): "
            "use the adapter with the base model of this export, not with the original"
        )


def read(source: Source, parts: Sequence[Part]) -> None:
    """Fill parts of items from the checkpoint."""
    pieces: dict[str, list[Piece]] = {}
    for item, start, stop, out in parts:
        name, origin = item.origin
        if isinstance(origin, torch.Tensor):
            out.copy_(origin.reshape(-1)[start:stop])
        else:
            pieces.setdefault(origin, []).append(Piece(name, start, stop, out))
    for term, some_pieces in pieces.items():
        source.read(term, some_pieces)
    for item, start, _, out in parts:
        if item.dtype == torch.float16 and out.isinf().any():
            where = f"'{item.name}' (from element {start:,} on)"
            log.warning(f"{where} has values that fp16 cannot hold (above 65,504): they are infinite in the export")
