"""`zerostage audit`: which stage a run is in, told from its memory by someone outside it."""

from __future__ import annotations

import sys
from typing import Any, get_args

import click

from zerostage.mistakes import InputError
from zerostage.planning.command import PlanCommand
from zerostage.used import parse
from zerostage.verdict import Kind

#: Exit codes: the configured stage is among the explanations (or none was named), or it is not.
AGREES, DIFFERS = 0, 4


@click.command(cls=PlanCommand)
@click.argument("name", required=False, metavar="[MODEL]")
@click.option("--model", metavar="MODEL", help="the same as MODEL")
@click.option("--params", metavar="N", help="only a number of parameters instead of a model: 70.6e9, 7B or 135M")
@click.option("--ranks", type=click.IntRange(min=1), metavar="N", help="data-parallel ranks of the run [as many as readings]")
@click.option("--used", metavar="SIZE,...", help="memory of a rank, or of each: 157GB (1e9 bytes), 146GiB (2^30), MiB, or bytes")
@click.option("--gpu", is_flag=True, help="read the processes on the cards of this machine, as nvidia-smi shows them")
@click.option(
    "--reading", "kind", metavar="|".join(get_args(Kind)),
    help="what --used is of: nvidia-smi, or torch.cuda's memory_reserved, max_memory_allocated (peak), or memory_allocated "
    "between steps [any of them]",
)  # fmt: skip
@click.option("--stage", type=int, metavar="0..3", help="the configured stage: exit code 4 if it does not explain the reading")
@click.option("--gpus-per-node", type=click.IntRange(min=1), metavar="N", help="for the hybrids [8]")
@click.option("--json", "as_json", is_flag=True, help="whole bytes as JSON instead of a table")
def audit(
    name: str | None, model: str | None, params: str | None, ranks: int | None, used: str | None, gpu: bool, kind: str | None,
    stage: int | None, gpus_per_node: int | None, as_json: bool, **run: Any,
) -> None:  # fmt: skip
    """Say which ZeRO stages explain the memory of a run, read from outside it, and which are impossible.

    MODEL: as for `zerostage plan`. Inside a run, zerostage.audit(model, optimizer) measures the stage itself.
    """
    if name is not None and model is not None:
        raise InputError(f"the model is given twice: {name} and --model {model}")
    model = name if model is None else model
    if model is None and params is None:
        raise InputError("give a model (a name, config.json, folder or module:function), or --params with a number of parameters")
    if (used is None) != gpu:
        missing = "give --used with the memory of a rank, such as 157GB, or --gpu"
        raise InputError("give either --used SIZE or --gpu, not both" if gpu else missing)
    if gpu and kind not in (None, "nvidia-smi"):
        raise InputError(f"--gpu reads what nvidia-smi shows, not {kind}: leave --reading out, or give --used")
    from zerostage import readings

    notes: list[str] = []
    if gpu:
        from zerostage import used_here

        sizes, notes = used_here.read()
    else:
        sizes = parse(used)
    if ranks is None and len(sizes) == 1 and not gpu:
        raise InputError("give --ranks with the number of data-parallel ranks of the run")
    found = readings.explain(
        sizes, model, params=params, ranks=ranks or len(sizes), kind=kind or ("nvidia-smi" if gpu else "any"), stage=stage,
        gpus_per_node=gpus_per_node or 8, **{name: value for name, value in run.items() if value is not None},
    )  # fmt: skip
    found.assumed += [*notes, *([f"{len(sizes)} ranks, one a reading"] if ranks is None else [])]
    if gpus_per_node:
        found.assumed = [text for text in found.assumed if "for the hybrids" not in text]
    if as_json:
        click.echo(found.model_dump_json(indent=2))
    else:
        from zerostage import reading_report

        reading_report.show(found)
    sys.exit(DIFFERS if found.agrees is False else AGREES)
