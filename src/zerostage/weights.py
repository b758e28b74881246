"""Weights from safetensors into a sharded model, each rank reading only its own slices."""

from __future__ import annotations

import difflib
import json
import logging
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from zerostage.division import own_name
from zerostage.engine import Engine, engine_of
from zerostage.flat import Flat
from zerostage.layout import Slot

log = logging.getLogger("zerostage")


class Files:
    """The tensors of a folder's safetensors files by name, read a slice at a time."""

    def __init__(self, path: Path) -> None:
        self._open: dict[Path, Any] = {}
        self._where: dict[str, Path] = {}
        single, index = path / "model.safetensors", path / "model.safetensors.index.json"
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        if single.is_file():  # as in Hugging Face: an index beside it belongs to other, older files
            files = [single]
        elif index.is_file():
            files = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        if not files:
            raise FileNotFoundError(f"{path} has no .safetensors file; export or convert the model to safetensors first")
        for file in files:
            if not file.is_file():
                raise FileNotFoundError(f"{file} is named in {index.name} but is not there")
            self._open[file] = safe_open(file, framework="pt")
            self._where |= dict.fromkeys(self._open[file].keys(), file)

    @property
    def names(self) -> list[str]:
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open[self._where[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return self._open[self._where[name]].get_slice(name)[:0].dtype if self.shape(name) else self.elements(name, 0, 1).dtype

    def elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor, in the file's dtype; reads only the rows that hold them."""
        part = self._open[self._where[name]].get_slice(name)
        shape = part.get_shape()
        if not shape:
            return self._open[self._where[name]].get_tensor(name).reshape(1)[start:stop]
        row = math.prod(shape[1:]) or 1
        first, last = start // row, -(-stop // row)
        return part[first:last].flatten()[start - first * row : stop - first * row]


def load_weights(model: nn.Module, path: str | Path, *, strict: bool = True) -> list[str]:
    """Read a sharded model's weights and buffers from a Hugging Face folder or one safetensors file.

    Each rank reads the elements of its own weight slices, so that a model larger than one
    rank's memory loads at stage 3. Masters take the file's values unrounded. Buffers that
    the files lack (rotary tables) are computed by the model's own initialisation where they
    are still on the meta device. Every rank must call it.

    strict: raise when the files have tensors that the model does not have.
    Returns the names in the files that were not used. Raises KeyError for a weight that the
    files lack and ValueError for one of another shape, naming it; then no rank has changed.
    """
    engine = engine_of(model)
    if engine is None:
        raise ValueError("this model is not sharded: call zerostage.shard(model, optimizer) first, then load_weights")
    engine.schedule.refuse_averaged("load_weights")
    problem: Exception | None = None
    plan: list[tuple[Flat, int, str]] = []
    unused: list[str] = []
    try:
        files = Files(Path(path))
        plan, unused = _match(engine, files, strict)
    except Exception as error:
        problem = error
    for rank, text in enumerate(engine.world.collect_objects(str(problem) if problem else None, "load_weights")):
        if text is not None:
            raise problem or RuntimeError(f"load_weights failed on rank {rank}: {text}")
    with torch.no_grad():
        for flat, index, name in plan:
            _read(flat, index, name, files)
        _fill_buffers(engine, files)
        for unit in engine.units:
            for flat in unit.flats:
                flat.note_versions()
    engine.loaded(name for flat in engine.flats for slot in flat.layout.slots for name in slot.names)
    return unused


def _match(engine: Engine, files: Files, strict: bool) -> tuple[list[tuple[Flat, int, str]], list[str]]:
    """Which tensor of the files each parameter takes, checked for presence and shape."""
    available = set(files.names)
    plan, used = [], set()
    for flat in engine.flats:
        for index, slot in enumerate(flat.layout.slots):
            found = [name for name in slot.names if name in available]
            if not found:
                near = difflib.get_close_matches(slot.name, available, 1)
                hint = f"; the closest name there is '{near[0]}'" if near else ""
                raise KeyError(f"the weight '{slot.name}' is not in the files{hint}")
            for name in found:
                if files.shape(name) != slot.shape:
                    raise ValueError(f"'{name}' has shape {files.shape(name)} in the files, {slot.shape} in the model")
            _check_ties(files, slot, found)
            plan.append((flat, index, found[0]))
            used.update(found)
    buffers = {own_name(path) for path, _ in engine.model.named_buffers(remove_duplicate=False)}
    unused = sorted(available - used - buffers)
    if unused and strict:
        raise KeyError(
            f"the files have {len(unused)} tensors that the model does not have, '{unused[0]}' first; "
            "check that the model was built from the same config, or pass strict=False"
        )
    return plan, unused


def _check_ties(files: Files, slot: Slot, found: list[str]) -> None:
    """The model shares one weight under several names: values that differ in the files cannot both be kept."""
    for other in found[1:]:
        row = math.prod(slot.shape[1:]) or 1
        step = max(row, 1 << 22)
        for start in range(0, slot.numel, step):
            stop = min(start + step, slot.numel)
            if not torch.equal(files.elements(found[0], start, stop), files.elements(other, start, stop)):
                raise ValueError(
                    f"the model ties '{found[0]}' and '{other}' (its config says tie_word_embeddings or the like) but the "
                    "files hold different values for them: set the tie off in the config, or remove one of the two"
                )


def _read(flat: Flat, index: int, name: str, files: Files) -> None:
    slot = flat.layout.slots[index]
    flat.sources[index] = files.dtype(name)
    for level, target in ((1, flat.shard), (3, flat.master)):
        if level == 3 and not flat.has_master:
            continue
        base, end = flat.bounds[level]
        start, stop = max(slot.start, base), min(slot.start + slot.numel, end)
        if start < stop:
            values = files.elements(name, start - slot.start, stop - slot.start)
            target[start - base : stop - base].copy_(values)


def _fill_buffers(engine: Engine, files: Files) -> None:
    available = set(files.names)
    for path, module in engine.model.named_modules():
        prefix = own_name(path)
        on_meta = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        for name, buffer in on_meta.items():
            module._buffers[name] = torch.empty_like(buffer, device=engine.world.device)
        for name, buffer in module._buffers.items():
            full = f"{prefix}.{name}" if prefix else name
            if buffer is not None and full in available:
                values = files.elements(full, 0, buffer.numel()).view(buffer.shape)
                buffer.copy_(values)
                on_meta.pop(name, None)
        if on_meta:
            compute_buffers(engine.model, prefix, module, sorted(on_meta))
    for path, buffer in engine.model.named_buffers():
        engine.world.broadcast(buffer.data, f"the buffer {own_name(path)}")


def compute_buffers(model: nn.Module, prefix: str, module: nn.Module, names: list[str]) -> None:
    """Have the module, or the model's initialisation, compute buffers that were on the meta device."""
    own_parameters = any(p is not None for p in module._parameters.values())
    root = next((m for m in model.modules() if hasattr(m, "_init_weights")), None)
    if hasattr(module, "reset_parameters") and not own_parameters:
        module.reset_parameters()
    elif root is not None and not own_parameters:
        for name in names:
            module._buffers[name].fill_(math.nan if module._buffers[name].is_floating_point() else 0)
        root._init_weights(module)
        if any(bool(torch.isnan(module._buffers[n]).any()) for n in names if module._buffers[n].is_floating_point()):
            raise RuntimeError(_cannot_compute(prefix, names))
    else:
        raise RuntimeError(_cannot_compute(prefix, names))


def _cannot_compute(prefix: str, names: list[str]) -> str:
    return (
        f"the buffer '{prefix}.{names[0]}' was built on the meta device, is not in the files, and nothing computes it: "
        "give its module a reset_parameters() that does, or build the buffers on a real device"
    )
