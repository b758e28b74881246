"""`zerostage plan`: options, and what is printed or written."""

from __future__ import annotations

import sys
import typing
from pathlib import Path
from typing import Any

import click

from zerostage.mistakes import InputError
from zerostage.planning.run import ALSO, Run

#: Exit codes: the asked setting fits (or none was asked for, and something does), or it does not.
FITS, DOES_NOT_FIT = 0, 3


class Whole(click.ParamType):
    """A whole number, also as 1e9."""

    name = "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        try:
            return int(value) if float(value) == int(float(value)) and "e" not in str(value).lower() else int(float(value))
        except (ValueError, OverflowError):
            raise InputError(f"{param.opts[0]} is {value!r}: give a whole number") from None


class PlanCommand(click.Command):
    """A command with one option per field of Run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        hints = typing.get_type_hints(Run)
        for name, field in Run.model_fields.items():
            kinds = [kind for kind in (typing.get_args(hints[name]) or (hints[name],)) if kind is not type(None)]
            choices = [value for kind in kinds for value in typing.get_args(kind)] or [kind for kind in kinds if isinstance(kind, str)]
            flag = "--" + name.replace("_", "-")
            flags = [flag, *("--" + other.replace("_", "-") for other, field_name in ALSO.items() if field_name == name), name]
            shown = f"{field.description} [{field.default}]" if field.default is not None else str(field.description)
            if field.annotation is bool or bool in kinds:
                self.params.append(click.Option([f"{flag}/--no-{flag[2:]}"], default=None, help=shown.replace("[False]", "[no]")))
            elif choices:
                self.params.append(click.Option(flags, metavar="|".join(choices), help=shown))
            else:
                self.params.append(click.Option(flags, type=Whole(), metavar="N", help=shown))


@click.command(cls=PlanCommand)
@click.argument("model", required=False)
@click.option("--params", metavar="N", help="only a number of parameters instead of a model: 70.6e9, 7B or 135M")
@click.option("--gpu", metavar="NAME", help="card: h100, a100-40, l40s, 4090, ...")
@click.option("--nodes", type=int, metavar="N", help="how many nodes there are; without it the smallest number is looked for")
@click.option("--gpus-per-node", type=int, metavar="N", help="cards in a node [8]")
@click.option("--network", metavar="RATE", help="what one node sends: 400GB/s, 3.2Tb/s, 8x400Gb, EFA, 100GbE, ...")
@click.option("--here", is_flag=True, help="the cards in this machine")
@click.option("--calibration", metavar="FILE", help="what `zerostage calibrate` measured")
@click.option("--from", "source", metavar="FILE", help="DeepSpeed JSON, accelerate or FSDP YAML, or torchtitan TOML that is in use")
@click.option("--stage", type=int, metavar="0..3", help="ask for one stage, on --ranks or all GPUs, or the fewest that it fits on: exit code 3 if it does not")
@click.option("--ranks", metavar="N,N", help="numbers of data-parallel ranks")
@click.option("--tokens", metavar="N", help="tokens of the whole training, for its cost: 1e9, 500M")
@click.option("--simulate", is_flag=True, help="run the engine itself on fake tensors instead of the closed form (any model)")
@click.option("--json", "as_json", is_flag=True, help="whole bytes as JSON instead of tables")
@click.option("--html", metavar="FILE", help="write one self-contained page as well")
@click.option("--accuracy", is_flag=True, help="print the predictions beside published measurements (or those in the file MODEL)")
def plan(model: str | None, params: str | None, ranks: str | None, tokens: str | None, as_json: bool, html: str | None,
         accuracy: bool, **asked: Any) -> None:  # fmt: skip
    """Say what every ZeRO stage takes of each rank, what fits, which to use on how many GPUs, and how long a step takes.

    MODEL: a name (llama-3.1-70b, Qwen/Qwen3-8B, ...), a Hugging Face config.json or folder, a hub id, or module:function
    that builds an nn.Module.
    """
    from rich.console import Console

    console = Console(highlight=False)
    if accuracy:
        from zerostage.planning.published import accuracy as published

        published.show(console, *([model] if model else []))
        return
    from zerostage.planning import answer, report

    if model is None and params is None and asked["source"] is None:
        raise InputError("give a model (a name, config.json, folder or module:function), or --params with a number of parameters")
    found = answer.plan(
        model,
        params=params,
        ranks=_ranks(ranks) if ranks else None,
        tokens=tokens,
        **{name: value for name, value in asked.items() if value is not None},
    )
    if html:
        from zerostage.planning.page import page

        page.write(Path(html), found)
        click.echo(f"wrote {html}", err=True)
    if as_json:
        click.echo(found.model_dump_json(indent=2))
    else:
        report.show(console, found)
    sys.exit(DOES_NOT_FIT if answer.fits(found) is False else FITS)


def _ranks(text: str) -> list[int]:
    parts = text.replace(" ", "").split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"--ranks is {text!r}: give whole numbers of 1 or more with commas between, such as 8,16,32")
    return [int(part) for part in parts]
