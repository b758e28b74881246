"""The folder of an export: what else belongs in it beside the weights, and how it gets to its place."""

from __future__ import annotations

import fnmatch
import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerostage.checkpoint import folder
from zerostage.mistakes import some

log = logging.getLogger("zerostage")

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
#: The folder, in a PEFT model's export, of its adapter.
ADAPTER = "adapter"
_COPIED = [
    CONFIG, "generation_config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "additional_chat_templates", "*.model", "*.tiktoken", "preprocessor_config.json", "processor_config.json",
]  # fmt: skip
#: A config may name Python files of its own.
_CODE = "*.py"
_WRITTEN = ["*model*.safetensors", "*model.safetensors.index.json", ADAPTER_CONFIG, _CODE]


def check_place(out: Path, assets: Path | None) -> None:
    """Raise ValueError unless `out` is new, empty, or holds an earlier export and nothing else."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: give a folder for the export")
    found = sorted(entry.name for entry in out.iterdir()) if out.is_dir() else []
    if not found:
        return
    if assets is not None and out == Path(os.path.realpath(assets)):
        raise ValueError(f"{out} is the folder that the config is taken from: give another folder for the export")
    if not any(re.fullmatch(r"(adapter_)?model.*\.safetensors", name) for name in found):
        raise ValueError(f"{out} is not empty and holds no earlier export: give a new folder")
    adapters = {file.parent.name for file in out.glob("*/adapter_model.safetensors")}
    others = [name for name in found if not _matches(name, [*_COPIED, *_WRITTEN]) and name not in adapters]
    if others:
        raise ValueError(f"{out} holds an earlier export and also {some(others)}: move that away, or give a new folder")


def publish(partial: Path, out: Path) -> None:
    """Rename the written folder `partial` to `out`; an earlier export there is deleted only after that."""
    for inner in [partial, *(entry for entry in partial.rglob("*") if entry.is_dir())]:
        folder.sync(inner)
    earlier = None
    if out.exists() and any(out.iterdir()):
        earlier = out.with_name(f".{out.name}.earlier-{os.getpid()}")
        out.rename(earlier)
    try:
        partial.rename(out)
    except OSError:
        if earlier is not None:
            earlier.rename(out)
        raise
    folder.sync(out.parent)
    if earlier is not None:
        shutil.rmtree(earlier, ignore_errors=True)


def read_config(assets: Path | None) -> dict[str, Any] | None:
    """The model's config; None where there is none. Raises ValueError where it cannot be read."""
    if assets is None or not (assets / CONFIG).is_file():
        return None
    try:
        config = json.loads((assets / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
    except ValueError as error:
        raise ValueError(f"{assets / CONFIG} cannot be read: {error}") from None
    return config


def said_to_be_one(config: dict[str, Any] | None, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Of the tensors with these names and shapes, those that the config says are one weight: embedding and head."""
    config = config or {}
    text = config.get("text_config") or config
    if not config.get("tie_word_embeddings", text.get("tie_word_embeddings")):
        return []
    rows = text.get("vocab_size")
    # Embeddings lie outside the numbered layers.
    large = [name for name, shape in shapes.items() if len(shape) == 2 and shape[0] == rows and not re.search(r"\.\d+\.", name)]
    return [name for name in large if shapes[name] == shapes[large[0]]]


def add_config(assets: Path | None, place: Path, config: dict[str, Any] | None, dtype: str) -> list[str]:
    """Write `config`, in which `dtype` is named, and copy the tokenizer to the weights in `place`; returns the names."""
    if config is None:
        where = f"{assets} has no" if assets is not None else "there is no"
        log.warning(f"{where} config.json, which from_pretrained needs: give its folder with --assets (assets=)")
        return _copy(assets, place, _COPIED)
    files = _copy(assets, place, [*_COPIED, *([_CODE] if "auto_map" in config else [])])
    _set_dtype(config, dtype)
    folder.write(place / CONFIG, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())
    return files


def add_adapter_config(assets: Path | None, place: Path) -> list[str]:
    """Copy what an adapter in `place` needs; returns the names."""
    files = _copy(assets, place, [ADAPTER_CONFIG])
    if not files:
        log.warning("there is no adapter_config.json, which peft needs: give its folder with --assets (assets=)")
    return files


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _copy(assets: Path | None, place: Path, patterns: Sequence[str]) -> list[str]:
    names = []
    for entry in sorted(assets.iterdir()) if assets is not None and assets.is_dir() else []:
        if not _matches(entry.name, patterns):
            continue
        if entry.is_dir():
            shutil.copytree(entry, place / entry.name)
            files = [file for file in (place / entry.name).rglob("*") if file.is_file()]
        else:
            files = [place / entry.name]
            shutil.copyfile(entry, files[0])
        for file in files:
            folder.sync(file)
            names.append(file.relative_to(place).as_posix())
    return names


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Also in the configs of a model's parts, where they name one."""
    config["dtype"] = dtype
    parts = [config]
    while parts:
        part = parts.pop()
        for key, value in part.items():
            if key in ("dtype", "torch_dtype") and value is not None:
                part[key] = dtype
            elif isinstance(value, dict) and key.endswith("_config") and key != "quantization_config":
                parts.append(value)
