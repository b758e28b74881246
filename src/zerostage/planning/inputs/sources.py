"""Read a configuration that is already in use: `zerostage plan --from FILE`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from zerostage.mistakes import InputError, closest
from zerostage.planning.inputs import from_accelerate, from_deepspeed, from_torchtitan
from zerostage.planning.inputs.given import Draft, Given

#: What a file of each kind is known by: one of these keys at its top, tried in this order.
MARKS = {
    "accelerate configuration": ("distributed_type", "compute_environment"),
    "Trainer arguments": ("fsdp", "fsdp_config", "per_device_train_batch_size", "deepspeed"),
    "DeepSpeed JSON": ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "bf16", "fp16"),
    "torchtitan TOML": ("parallelism", "activation_checkpoint", "training"),
}


def read(path: str | Path, ranks: int | None = None) -> Given:
    """What the file at `path` states: a DeepSpeed JSON, accelerate YAML, torchtitan TOML or Trainer JSON, known by its keys.

    `ranks` is the number of ranks where the caller knows it; batch sizes are checked against it. Raises InputError, in
    one line, for a file that is not there or cannot be parsed (with its line), of no known kind, or that contradicts
    itself.
    """
    path = Path(path)
    table = load(path)
    kind = _kind(path, table)
    draft = Draft(str(path), kind)
    beside = partial(_beside, path)
    if kind == "accelerate configuration":
        from_accelerate.fill(draft, table, beside, ranks)
    elif kind == "Trainer arguments":
        if not any(mark in table for mark in MARKS[kind]):  # a file of what stands under fsdp_config
            table = {"fsdp_config": table}
        from_accelerate.fill_trainer(draft, table, beside, ranks)
    elif kind == "DeepSpeed JSON":
        from_deepspeed.fill(draft, table, ranks=ranks)
    else:
        from_torchtitan.fill(draft, table)
    return draft.finish()


def load(path: Path) -> dict[str, Any]:
    """The table in a JSON, TOML or YAML file, by its suffix (others are read as YAML, which JSON nearly is)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}") from None
    parse = {".json": _json, ".toml": _toml}.get(path.suffix.lower(), _yaml)
    table = parse(path, text)
    if not isinstance(table, dict):
        raise InputError(f"{path} holds {'nothing' if table is None else 'no table of keys and values'}")
    return {str(key): value for key, value in table.items()}


def _beside(path: Path, name: str) -> dict[str, Any]:
    """The table in the file that the one at `path` calls `name`."""
    file = path.parent / name
    # programs take such a path from where they are started; a file that travels with the other is found beside it
    return load(file if file.exists() or not Path(name).exists() else Path(name))


def _kind(path: Path, table: dict[str, Any]) -> str:
    for kind, marks in MARKS.items():
        present = [mark for mark in marks if mark in table]
        if kind == "Trainer arguments" and any(isinstance(table.get(key), bool) for key in ("bf16", "fp16")):
            return kind  # DeepSpeed's own are tables
        if present and (kind != "torchtitan TOML" or any(isinstance(table[mark], dict) for mark in present)):
            return kind
    if any(key.startswith("fsdp_") for key in table):
        return "Trainer arguments"
    looked = "; ".join(f"{kind}: {', '.join(marks)}" for kind, marks in MARKS.items())
    all_marks = [mark for marks in MARKS.values() for mark in marks]
    near = next((f" (it has {key}{hint})" for key in table if (hint := closest(key, all_marks))), "")
    raise InputError(f"{path} is no configuration known here{near}; looked for one of these keys: {looked}")


def _json(path: Path, text: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(items)
        if len(table) < len(items):
            names = [name for name, _ in items]
            raise InputError(f"{path} gives {next(name for name in names if names.count(name) > 1)} twice in one table")
        return table

    try:
        return json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise InputError(f"{path} is nested too deeply") from None


def _toml(path: Path, text: str) -> Any:
    try:
        import tomllib
    except ModuleNotFoundError:
        import tomli as tomllib
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not TOML: {error}") from None


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise InputError(f"{path} is YAML, for which PyYAML is needed: pip install 'zerostage[plan]'") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise InputError(f"{path} is not YAML: {where}{problem}") from None
