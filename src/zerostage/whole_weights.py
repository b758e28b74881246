"""Whole weights of a sharded model in a safetensors file, as Hugging Face and `load_weights` read it."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from zerostage.engine import Engine, full_state_dict, require

log = logging.getLogger("zerostage")


def save_weights(model: nn.Module, path: str | Path, *, trainable_only: bool = False) -> dict[str, Any]:
    """Write whole weights and persistent buffers as one safetensors file. Every rank must call it; rank 0 writes.

    path: a file that ends in .safetensors, or a folder, made if need be, for its
        model.safetensors. Written beside its place and renamed, so that it is never half there.
    trainable_only: the parameters that require gradients now (a LoRA's adapters) and nothing else.

    Each weight has the dtype of the model's; one that modules share is there once, under its
    first name. `load_weights` reads a whole file back at any stage and number of ranks.
    Rank 0 holds all that is written in CPU memory. Within `EMA.applied` it is the averages.

    Returns {"path": the file's, "tensors": how many, "bytes": theirs, without the header}
    on all ranks. Raises OSError on all ranks where rank 0 could not write.
    """
    engine = require(model)
    if trainable_only and not any(parameter.requires_grad for parameter in engine.model.parameters()):
        raise ValueError("save_weights(trainable_only=True): no parameter of the model requires gradients")
    file = Path(path)
    if file.suffix != ".safetensors":
        file = file / "model.safetensors"
    state = full_state_dict(model, trainable_only=trainable_only)
    problem, outcome = None, None
    if engine.world.rank == 0:
        for slot in (slot for flat in engine.flats for slot in flat.layout.slots):
            for name in slot.names[1:]:
                state.pop(name, None)
        _warn_of_two(engine, state)
        try:
            outcome = _write(state, file)
        except Exception as error:
            problem, outcome = error, f"rank 0 could not write {file}: {type(error).__name__}: {error}"
    outcome = engine.world.collect_objects(outcome, "save_weights")[0]
    if isinstance(outcome, str):
        raise OSError(f"save_weights: {outcome}") from problem
    if engine.world.rank == 0:
        log.info(f"wrote {outcome['tensors']:,} tensors, {outcome['bytes']:,} bytes, to {outcome['path']}")
    return outcome


def _write(state: dict[str, torch.Tensor], file: Path) -> dict[str, Any]:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial-{os.getpid()}")
    try:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, partial, metadata={"format": "pt"})
        with safe_open(partial, framework="pt") as written:  # raises where bytes are missing
            count = len(written.keys())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return {"path": str(file), "tensors": count, "bytes": sum(tensor.nbytes for tensor in state.values())}


def _warn_of_two(engine: Engine, state: dict[str, torch.Tensor]) -> None:
    """The config says that embedding and head are one weight, but they are two: both are kept, and loaders must know."""
    for module in engine.model.modules():
        if not getattr(getattr(module, "config", None), "tie_word_embeddings", False):
            continue
        if not hasattr(module, "get_output_embeddings") or module.get_output_embeddings() is None:
            continue
        pair = [getattr(m, "weight", None) for m in (module.get_input_embeddings(), module.get_output_embeddings())]
        names = [p._flat.layout.slots[p._index].name for p in pair if hasattr(p, "_flat")]
        if len(set(names)) == 2 and state.keys() >= set(names):
            warnings.warn(
                f"the model's config says tie_word_embeddings=True, but '{names[0]}' and '{names[1]}' are two parameters: "
                "both are written. Set model.config.tie_word_embeddings = False, or a loader may tie them again",
                stacklevel=3,
            )
            return
