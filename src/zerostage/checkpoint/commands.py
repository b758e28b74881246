"""`zerostage export` and `zerostage inspect`. torch is imported only when one of them runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from zerostage.mistakes import InputError

#: Exit codes of `inspect`: the checkpoint (or each of a folder) is whole, or it is not.
WHOLE, DAMAGED = 0, 1
_MOST_FILES = 12


def _existing(path: str) -> Path:
    if not Path(path).exists():
        raise InputError(f"there is no checkpoint at {path}")
    return Path(path)


def _said(error: Exception) -> InputError:
    """A library's error in one line. A KeyError would put its text into quotes."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return InputError(" ".join(text.split()) or type(error).__name__)


@click.command()
@click.argument("ckpt", metavar="CKPT")
@click.argument("out", metavar="OUT")
@click.option("--dtype", metavar="bf16|fp16|fp32", help="of the weights in the files [their own when the training began]")
@click.option("--trainable-only", is_flag=True, help="only what was trained, under the model's own names")
@click.option("--adapter", is_flag=True, help="only the PEFT adapter, as PeftModel.from_pretrained reads it")
@click.option("--max-shard-size", default="5GB", show_default=True, metavar="SIZE", help="most in a file (GB = 1e9 bytes)")
@click.option("--assets", metavar="FOLDER", help="where config.json and the tokenizer are [in the checkpoint]")
def export(
    ckpt: str, out: str, dtype: str | None, trainable_only: bool, adapter: bool, max_shard_size: str, assets: str | None
) -> None:
    """Write the weights of a checkpoint as Hugging Face safetensors.

    CKPT: a checkpoint of zerostage, DeepSpeed ZeRO or torch.distributed.checkpoint, or a folder of
    zerostage's (the newest whole one). OUT: a new folder for from_pretrained. One process, offline,
    no GPU; memory for one tensor.
    """
    path = _existing(ckpt)
    from zerostage.checkpoint import exporting

    options = {"trainable_only": trainable_only, "adapter": adapter, "max_shard_size": max_shard_size, "assets": assets}
    try:
        report = exporting.export(path, out, dtype=dtype, **options)
    except (OSError, ValueError, KeyError) as error:
        raise _said(error) from None
    click.echo(exporting.describe(report))
    click.echo("files: " + _few(report["files"]))


@click.command()
@click.argument("ckpt", metavar="CKPT")
@click.option("--names", is_flag=True, help="also every parameter: shape, terms and their dtypes")
@click.option("--fast", is_flag=True, help="compare the sizes of the files, not their checksums")
@click.option("--json", "as_json", is_flag=True, help="whole bytes as JSON instead of a table")
def inspect(ckpt: str, names: bool, fast: bool, as_json: bool) -> None:
    """Say what is in a checkpoint and whether it is whole.

    CKPT: a checkpoint of zerostage, DeepSpeed ZeRO or torch.distributed.checkpoint, or a folder of
    zerostage's: then a table of them, newest first. Exit code 0: whole; 1: damaged; 2: no checkpoint.
    """
    path = _existing(ckpt)
    from zerostage.checkpoint import folder, inspecting

    try:
        several = path.is_dir() and not folder.is_checkpoint(path) and bool(folder.newest_first(path))
        if several and names:
            raise InputError(f"{path} holds several checkpoints: --names is for one of them")
        found: Any = inspecting.overview(path, fast) if several else inspecting.inspect(path, fast, names)
    except (OSError, ValueError, KeyError) as error:
        raise _said(error) from None
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif several:
        _show_table(found)
    else:
        _show(found)
    sys.exit(DAMAGED if any(one["problems"] for one in (found if several else [found])) else WHOLE)


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= _MOST_FILES else f"{', '.join(names[:3])} ... {names[-1]} ({len(names):,} files)"


def _size(count: int) -> str:
    unit, size = _unit(count)
    return f"{count:,} bytes ({count / size:,.3f} {unit})"


def _unit(count: int) -> tuple[str, float]:
    return ("GB", 1e9) if count >= 1e9 else ("MB", 1e6)


def _stage(one: dict[str, Any]) -> str:
    """'3', or the partition of a hybrid."""
    if one.get("stage") is not None:
        return str(one["stage"])
    return str(tuple(one["partition"])) if one.get("partition") else ""


def _show_table(found: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    unit, size = _unit(max(one["bytes"] for one in found))
    table = Table()
    table.add_column("checkpoint", overflow="fold")
    for heading in ("step", "stage", "ranks", "saved (UTC)", unit, "whole"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        saved = str(one.get("saved_at", "")).removesuffix("+00:00").replace("T", " ")
        cells = [str(one.get("step", "")), _stage(one), str(one.get("ranks", "")), saved, f"{one['bytes'] / size:,.3f}"]
        table.add_row(Path(one["path"]).name, *cells, "yes" if not one["problems"] else "damaged")
    Console(highlight=False).print(table)
    for one in found:
        for problem in one["problems"]:
            click.echo(problem)
    click.echo(f"{unit} = {'1e9' if unit == 'GB' else '1e6'} bytes; checked: {found[0]['checked']} of all files")


def _show(one: dict[str, Any]) -> None:
    lines = [f"{one['path']}: {one['what'] or 'a checkpoint'}"]

    def add(heading: str, value: Any) -> None:
        if value not in (None, "", [], {}):
            lines.append(f"{heading + ':':<14}{value:,}" if isinstance(value, int) else f"{heading + ':':<14}{value}")

    partition = one.get("partition")
    add("stage", _stage(one))
    add("ranks", one.get("ranks"))
    if partition:
        add("partition", "optimizer over {}, gradients over {}, weights over {} ranks".format(*partition))
    add("step", one.get("step"))
    add("saved", one.get("saved_at"))
    add("written by", ", ".join(f"{name} {one[name]}" for name in ("zerostage", "torch") if one.get(name)))
    add("optimizer", one.get("optimizer"))
    for number, group in enumerate(one.get("groups") or []):
        settings = ", ".join(f"{key}={value}" for key, value in group.items() if key != "parameters" and value is not None)
        add(f"  group {number}", f"{group['parameters']:,} parameters: {settings}")
    if one.get("parameters") is not None:
        tensors = f" in {one['tensors']:,} tensors" if one.get("tensors") is not None else ""
        add("parameters", f"{one['parameters']:,}{tensors}, {one.get('trainable', 0):,} trainable")
    add("buffers", one.get("buffers") or None)
    for term, kinds in (one.get("precision") or {}).items():
        several = [f"{dtype} ({count:,} elements)" for dtype, count in kinds.items()]
        dtypes = ", ".join(several if len(kinds) > 1 else kinds)
        add(f"  {term}", f"{dtypes}, {_size((one.get('bytes_by_term') or {}).get(term, 0))}")
    files = one.get("files") or {}
    add("files", f"{len(files):,}, {_size(one['bytes'])}" if files else None)
    largest = sorted(files, key=lambda name: (-files[name], name))[:_MOST_FILES]
    lines += [f"  {files[name]:>16,} bytes  {name}" for name in largest]
    if len(files) > len(largest):
        rest = sum(files.values()) - sum(files[name] for name in largest)
        lines.append(f"  {rest:>16,} bytes  {len(files) - len(largest):,} smaller files")
    extra = one.get("extra")
    add("extra", ", ".join(extra) if isinstance(extra, list) else extra)
    add("assets", ", ".join(one.get("assets") or []))
    for parameter in one.get("names") or []:
        lines.append(_line(parameter))
    if one["problems"]:
        lines += [f"damaged: {problem}" for problem in one["problems"]]
    elif one["checked"] is None:
        lines.append("whole as far as names and sizes tell: this kind has no checksums")
    else:
        lines.append(f"whole: the {one['checked']} of all files are right")
    click.echo("\n".join(lines))


def _line(parameter: dict[str, Any]) -> str:
    terms = ", ".join(f"{term} {dtype}" for term, dtype in parameter["terms"].items())
    marks = ("" if parameter["trainable"] else "; frozen") + "".join(f"; also {name}" for name in parameter["also"])
    return f"  {parameter['name']} {parameter['shape']}: {terms} (from {parameter['source']}){marks}"
