"""Whole weights of a checkpoint as Hugging Face safetensors: offline, in one process, one tensor at a time."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from zerostage.checkpoint import adapter_names, exported_folder, exported_items, folder, tensor_file
from zerostage.checkpoint.damage import DamagedError
from zerostage.checkpoint.exported_folder import ADAPTER
from zerostage.checkpoint.source import Source
from zerostage.checkpoint.stored import StoredSource
from zerostage.checkpoint.tensor_file import Item
from zerostage.mistakes import closest

log = logging.getLogger("zerostage")

_SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def export(
    path: str | Path | Source, out_dir: str | Path, *, dtype: torch.dtype | str | None = None, trainable_only: bool = False,
    adapter: bool = False, max_shard_size: int | str = "5GB", assets: str | Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write a checkpoint's weights and persistent buffers into `out_dir` as `from_pretrained` reads them.

    path: a checkpoint of any kind that `load` reads, or a folder of checkpoints: then the
        newest whole one. (Or a Source.)
    out_dir: a new or empty folder, or one that holds an earlier export and nothing else, which
        is replaced. Written beside its place, read again, and renamed: it is whole or not there.
    dtype: of the floating tensors: a torch.dtype, 'bf16', 'fp16' or 'fp32'; None: each
        weight's own when the training began. Wider values than the weights come from the master.
    trainable_only: the parameters that were trained, under the model's own names, and nothing else.
    adapter: a PEFT model's adapters, as `PeftModel.from_pretrained` reads them. Without it, a
        PEFT model is written as its base model, with the adapters in the folder 'adapter' in it.
    max_shard_size: most bytes of tensors in a file, such as 5GB (1e9), 2GiB (2^30), or whole
        bytes; a larger tensor has a file of its own.
    assets: a folder with config.json and the tokenizer's files, which are copied; None: the
        checkpoint's own.

    A weight that modules share is written once, under its first name. Held in memory: one
    tensor, and the buffers. Needs neither a process group nor a GPU.

    Returns {'path', 'files', 'tensors', 'bytes' (of the tensors), 'dtypes': {dtype: how many}},
    and for a PEFT model's base model 'adapter': the same of its adapter.

    Raises ValueError for arguments that cannot be used, KeyError for a parameter that the
    checkpoint lacks, OSError where it is damaged or `out_dir` cannot be written.
    """
    if adapter and trainable_only:
        raise ValueError("adapter and trainable_only are two kinds of export: give one of them")
    wanted, limit = _dtype(dtype), _bytes(max_shard_size)
    source = path if isinstance(path, Source) else _open(Path(path).absolute())
    own = getattr(source, "assets", None)
    given = Path(assets) if assets is not None else Path(own) if own else None
    if assets is not None and not given.is_dir():
        raise ValueError(f"assets: {given} is not a folder: give one with config.json and the tokenizer's files")
    out = Path(os.path.realpath(out_dir))
    exported_folder.check_place(out, given)
    config = None if trainable_only or adapter else exported_folder.read_config(given)
    items, names = exported_items.items(source, wanted, trainable_only), None
    if not trainable_only:
        trained = exported_items.trained_names(source)
        names = adapter_names.split([item.name for item in items], source.parameters, trained)
    if adapter and names is None:
        raise ValueError(f"{source.what} has no PEFT adapter: none of its {len(source.names):,} parameters is one")
    # (folder, what to write, most bytes of a file, config's folder); an adapter is one file
    sets: list[tuple[str, list[Item], int | None, Path | None]] = []
    if not adapter:
        base = exported_items.renamed(items, names.base) if names else items
        sets.append(("", exported_items.without_copies(source, base, config), limit, given))
    if names is not None:
        exported_items.warn_of_lost(source, names)
        for one, keys in names.adapters.items():
            inner, group = names.folder(one), exported_items.renamed(items, keys)
            sets.append((os.path.join("" if adapter else ADAPTER, inner), group, None, given and given / inner))
    if not sets[0][1]:
        raise ValueError(f"nothing to export: {source.what} has no {'trainable parameter' if trainable_only else 'weight'}")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder.clean(out.parent)
    _check_room(out, sum(item.bytes for _, group, *_ in sets for item in group))
    partial = folder.beside(out, "partial")
    try:
        reports = [_write(source, partial, *one, config, trainable_only) for one in sets]
        exported_folder.publish(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    report = {"path": str(out), **(_joined(reports) if adapter else reports[0])}
    if names is not None and not adapter:
        report["adapter"] = _joined(reports[1:])
    log.info(describe(report))
    return report


def describe(report: dict[str, Any]) -> str:
    """The line that is printed of an export's report."""
    kinds = ", ".join(f"{count:,} of {dtype}" for dtype, count in report["dtypes"].items())
    line = f"wrote {report['tensors']:,} tensors ({kinds}), {report['bytes']:,} bytes, to {report['path']}"
    if "adapter" in report:
        inner = report["adapter"]
        line += f": the base model; its adapter, {inner['tensors']:,} tensors, {inner['bytes']:,} bytes, is in {ADAPTER}/"
    return line


def _open(path: Path) -> Source:
    """A checkpoint that is whole: of zerostage's own every checksum is compared first."""
    problem = None
    for candidate in folder.candidates(path):
        problems = folder.check(candidate)
        if not problems:
            return StoredSource(candidate)
        problem = problem or problems[0]
        if candidate != path:
            log.warning(f"passed over the checkpoint {candidate}: {problems[0]}")
    if problem is not None:
        whole = folder.latest(path.parent) if folder.is_checkpoint(path) else None
        raise DamagedError(problem + (f". {whole} is whole: export that" if whole else ""))
    from zerostage.checkpoint.opening import open_source

    return open_source(path)


def _dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    if given is None or (isinstance(given, torch.dtype) and given in tensor_file.DTYPES and given.is_floating_point):
        return given
    found = _SHORT.get(given, getattr(torch, given, None)) if isinstance(given, str) else None
    if found in _SHORT.values():
        return found
    raise ValueError(f"dtype is {given!r}: give one of {', '.join(_SHORT)}" + closest(str(given), _SHORT))


def _bytes(given: int | str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", str(given).strip())
    factor = _UNITS.get(match[2].lower()) if match else None
    value = int(float(match[1]) * factor) if match and factor else 0
    if value < 1:
        raise ValueError(f"max_shard_size is {given!r}: give for example 5GB (1e9 bytes), 2GiB (2^30), 500MB or whole bytes")
    return value


def _check_room(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise OSError(f"the export needs {needed / 1e9:,.3f} GB and the disk of {out} has {free / 1e9:,.3f} GB free: make room")


def _write(
    source: Source, root: Path, inner: str, items: list[Item], limit: int | None, assets: Path | None,
    config: dict[str, Any] | None, trainable_only: bool,
) -> dict[str, Any]:  # fmt: skip
    """Write one set of items into the folder `inner` of `root`, with what belongs beside it. Returns its report."""
    place = root / inner
    place.mkdir(parents=True, exist_ok=True)
    shards = _shards(items, limit) if limit is not None else [items]
    files = ["adapter_model.safetensors" if limit is None else "model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards):
        tensor_file.write(place / file, shard, lambda parts: exported_items.read(source, parts))
        tensor_file.check(place / file, shard)
    size = sum(item.bytes for item in items)
    if len(shards) > 1:
        parameters = sum(item.elements for item in items if not isinstance(item.origin[1], torch.Tensor))
        index = {
            "metadata": {"total_parameters": parameters, "total_size": size},
            "weight_map": {item.name: file for file, shard in zip(files, shards) for item in shard},
        }
        files.append("model.safetensors.index.json")
        folder.write(place / files[-1], (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
    if limit is None:
        files += exported_folder.add_adapter_config(assets, place)
    elif not trainable_only:
        elements = Counter[str]()
        for item in items:
            elements[_short(item.dtype)] += item.elements * item.dtype.is_floating_point
        dtype = elements.most_common(1)[0][0]
        files += exported_folder.add_config(assets, place, config, dtype)
    dtypes = Counter(_short(item.dtype) for item in items)
    return {"files": [os.path.join(inner, file) for file in files], "tensors": len(items), "bytes": size, "dtypes": dict(dtypes)}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shards(items: list[Item], limit: int) -> list[list[Item]]:
    """In the order given, as many into a file as fit; what is larger than a file has its own. As transformers does."""
    alone: list[list[Item]] = []
    current: list[Item] = []
    used = 0
    for item in items:
        if item.bytes > limit:
            alone.append([item])
            continue
        if used + item.bytes > limit:
            alone.append(current)
            current, used = [], 0
        current.append(item)
        used += item.bytes
    return [*alone, current] if current else alone


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The reports of several adapters in one."""
    dtypes = sum((Counter(part["dtypes"]) for part in parts), Counter[str]())
    tensors, size = (sum(part[key] for part in parts) for key in ("tensors", "bytes"))
    files = [file for part in parts for file in part["files"]]
    return {"files": files, "tensors": tensors, "bytes": size, "dtypes": dict(dtypes)}
