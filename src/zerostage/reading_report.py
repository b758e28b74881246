"""A reading and what explains it, in print. GB = 1e9 bytes, GiB = 2^30 bytes."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from zerostage.planning.schema import PASSING, STATE
from zerostage.readings import Reading
from zerostage.verdict import GIB, ROUGHLY, Candidate


def show(reading: Reading, console: Console | None = None) -> None:
    """Print the reading, every stage beside it, the terms of those that explain it, and what would tell them apart."""
    console = console or Console(highlight=False)
    largest = max(reading.judged.bytes, *(one.state for one in reading.candidates))
    unit, size = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)
    model, run, bytes_ = reading.model, reading.run, reading.judged.bytes
    name = "" if model["family"] == "parameters" else f"{model['name']}: "
    what = "" if reading.kind == "any" else f" ({reading.kind})"
    ranks = f"{reading.ranks} rank{'s' * (reading.ranks > 1)}"
    console.print(f"{name}{model['parameters']:,} parameters on {ranks}, {run['engine']}", markup=False)
    units = f"{unit} = {'1e9' if unit == 'GB' else '1e6'} bytes, GiB = 2^30"
    console.print(f"read: {_number(bytes_, size)} {unit} a rank{what} = {bytes_ / GIB:,.2f} GiB; {units}", markup=False)
    if reading.method != "training state only":
        each = f"{run['accumulation']} x {run['micro_batch']} sequences of {run['sequence']} tokens"
        console.print(f"a step: {each} a rank", markup=False)
    table = Table(title=f"{unit} per rank", title_justify="left")
    for heading in ("", "training\nstate", "left of the\nreading", "expected\nbeside it", ""):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for one in reading.candidates:
        mark = "bold" if one in reading.explanations else None
        cells = (_number(one.state, size), _number(one.left, size), _span(one, size), one.verdict)
        table.add_row(_heading(one), *cells, style=mark)
    console.print(table)
    for one in reading.candidates:
        console.print(f"- {one.layout}: {one.verdict}: {one.reason}", markup=False)
    if reading.explanations:
        console.print(_terms(reading.explanations, unit, size, reading.method))
    for note in reading.notes:
        console.print(note, markup=False)
    if reading.assumed:
        console.print("Assumed: " + "; ".join(reading.assumed) + ".", markup=False)


def _span(one: Candidate, size: float) -> str:
    """What is expected beside the training state: of the settings of checkpointing, the nearest to the reading."""
    if one.verdict == "impossible":
        return ""
    name, (low, high) = min(one.expected.items(), key=lambda item: max(item[1][0] - one.left, one.left - item[1][1], 0))
    if name == ROUGHLY:
        return f"up to about {_number(high, size)}"
    return f"{_number(low, size)} to {_number(high, size)}" + (f"\n(checkpointing {name})" if len(one.expected) > 1 else "")


def _terms(found: list[Candidate], unit: str, size: float, method: str) -> Table:
    """The planned bytes of the explanations by term, each at its most: no moment has all of them."""
    table = Table(title=f"{unit} per rank by term, each at its most", title_justify="left")
    table.add_column("", no_wrap=True)
    for one in found:
        table.add_column(_heading(one), justify="right", no_wrap=True)
    known = STATE if method == "training state only" else (*STATE, *PASSING)
    shown = [term for term in known if any(getattr(one.bytes, term) for one in found)]
    for term in shown:
        cells = (_number(getattr(one.bytes, term), size) for one in found)
        table.add_row(term.replace("optimizer_", "step "), *cells, end_section=term == shown[-1])
    if method != "training state only":
        table.add_row("peak of a step", *(_number(one.peak_allocated or 0, size) for one in found))
    return table


def _heading(one: Candidate) -> str:
    return one.layout.replace(", weights within", ",\nweights in")


def _number(value: float, size: float) -> str:
    return f"{value / size:,.1f}"
