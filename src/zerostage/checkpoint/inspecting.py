"""What is in a checkpoint, or in a folder of them, as plain values for JSON and print."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from zerostage.checkpoint import folder
from zerostage.checkpoint.source import Source
from zerostage.checkpoint.stored import StoredSource


def inspect(path: Path, fast: bool = False, names: bool = False) -> dict[str, Any]:
    """Everything that can be told of the checkpoint `path`; bytes are whole numbers. What is not known is None.

    fast: compare names and sizes of the files, not their checksums. names: also every parameter.
    'problems' has a line for each file that is not whole. Raises ValueError where `path` is no checkpoint.
    """
    own = folder.is_checkpoint(path)
    found: dict[str, Any] = {"path": str(path), "what": None, "problems": []}
    if own:
        found["problems"] = folder.check_sizes(path) if fast else folder.check(path)
        found["checked"] = "sizes" if fast else "checksums"
        try:
            found |= _described(folder.manifest(path))
        except OSError:
            pass  # it is among the problems
    else:
        found["checked"] = None
        found["files"] = _files(path)
    found["bytes"] = sum(found.get("files", {}).values())
    if found["problems"]:
        return found
    try:
        source = _open(path, own)
    except OSError as error:
        found["problems"] = [str(error)]
        return found
    contents = _contents(source, names)
    return found | {key: value for key, value in contents.items() if found.get(key) is None}


def overview(path: Path, fast: bool = False) -> list[dict[str, Any]]:
    """The checkpoints of this library in the folder `path`, newest first: what their manifests and checksums tell."""
    found = []
    for one in folder.newest_first(path):
        problems = folder.check_sizes(one) if fast else folder.check(one)
        entry: dict[str, Any] = {"path": str(one), "problems": problems, "checked": "sizes" if fast else "checksums"}
        try:
            entry |= _described(folder.manifest(one))
        except OSError:
            pass
        found.append(entry | {"bytes": sum(entry.get("files", {}).values())})
    return found


def _open(path: Path, own: bool) -> Source:
    if own:
        return StoredSource(path)
    from zerostage.checkpoint.opening import open_source

    return open_source(path)


def _described(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest's entries, of whichever version: the ones that it lacks are left out."""
    found = {key: value for key, value in manifest.items() if key not in ("terms", "saved_at")}
    if isinstance(manifest.get("saved_at"), (int, float)):
        found["saved_at"] = datetime.fromtimestamp(manifest["saved_at"], timezone.utc).isoformat(timespec="seconds")
    found["bytes_by_term"] = manifest.get("terms")
    return found


def _files(path: Path) -> dict[str, int]:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix() if file != path else path.name: file.stat().st_size for file in files}


def _contents(source: Source, names: bool) -> dict[str, Any]:
    of = [source.parameters[name] for name in source.names]
    terms: dict[str, dict[str, int]] = {}
    sizes: dict[str, int] = {}
    for stored in of:
        for term, dtype in stored.terms.items():
            count = math.prod(stored.shape)
            kinds = terms.setdefault(term, {})
            kinds[_name(dtype)] = kinds.get(_name(dtype), 0) + count
            sizes[term] = sizes.get(term, 0) + count * dtype.itemsize
    extra = source.extra()
    found = {
        "what": source.what,
        "stage": getattr(source, "stage", None),
        "ranks": getattr(source, "ranks", None),
        "partition": None,
        "step": max((int(s.scalars["step"]) for s in of if "step" in s.scalars), default=None),
        "saved_at": None,
        "optimizer": source.optimizer,
        "groups": _groups(source),
        "parameters": sum(math.prod(stored.shape) for stored in of),
        "trainable": sum(math.prod(stored.shape) for stored in of if stored.trainable),
        "tensors": len(of),
        "buffers": sum(name not in source.parameters for name in source.buffers()),
        "precision": terms,  # elements by dtype, of each term
        "bytes_by_term": sizes,
        "extra": sorted(map(str, extra)) if isinstance(extra, dict) else type(extra).__name__ if extra is not None else None,
        "assets": sorted(file.name for file in source.assets.iterdir()) if getattr(source, "assets", None) else [],
    }
    if names:
        found["names"] = [_parameter(source, name) for name in source.names]
    return found


def _groups(source: Source) -> list[dict[str, Any]] | None:
    """Settings of each parameter group, with the number of its parameters in the place of their names."""
    if source.groups is None:
        return None
    groups = []
    for group in source.groups:
        settings = {key: _plain(value) for key, value in group.items() if key != "names"}
        groups.append({"parameters": len(group["names"]), **settings})
    return groups


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _parameter(source: Source, name: str) -> dict[str, Any]:
    stored = source.parameters[name]
    return {
        "name": name,
        "also": [other for other, same in source.parameters.items() if same is stored and other != name],
        "shape": list(stored.shape),
        "source": _name(stored.source),
        "trainable": stored.trainable,
        "terms": {term: _name(dtype) for term, dtype in stored.terms.items()},
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
