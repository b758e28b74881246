"""The plan in print. GB = 1e9 bytes; what nvidia-smi will show is in GiB = 2^30 bytes, as that tool counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.console import Console
from rich.table import Table

from zerostage.planning.schema import Plan, Row

TERMS = {
    "weights": "weights", "gradients": "gradi-\nents", "master": "master", "exp_avg": "exp_\navg", "exp_avg_sq": "exp_\navg_sq",
    "buffers": "buf-\nfers", "gathered": "gath-\nered", "reduce": "reduce", "activations": "activa-\ntions", "logits": "logits",
    "optimizer_temporaries": "step\ntemps",
}  # fmt: skip
_STATE = ("weights", "gradients", "master", "exp_avg", "exp_avg_sq", "buffers")


def show(console: Console, plan: Plan) -> None:
    """Print the answer: the decision, memory by stage and ranks, one number of ranks in full, time, and what was assumed."""
    _head(console, plan)
    decided = plan.recommendation
    if decided is not None:
        _decision(console, plan)
    known = plan.method != "training state only"
    unit, size = ("GB", 1e9) if max(row.peak_allocated for row in plan.rows) >= 1e9 else ("MB", 1e6)
    what = "per rank at the peak of a step" if known else "per rank, without activations"
    marked = "; x: does not fit" if plan.machine else ""
    console.print(_matrix(plan, f"{unit} {what}{marked}", lambda row: _fitting(row, size, plan)))
    console.print(_matrix(plan, f"{unit} sent per rank and step", lambda row: _number(row.sent_bytes_per_step, size)))
    ranks = plan.asked.ranks if plan.asked else decided.row.ranks if decided and decided.row else plan.rows[-1].ranks
    rows = [row for row in plan.rows if row.ranks == ranks]
    if plan.asked and plan.asked not in rows:
        rows.append(plan.asked)
    if known:
        console.print(_terms(rows, ranks, unit, size))
        console.print(_totals(rows, ranks, unit, size, plan))
    if any(row.step_s is not None for row in rows):
        console.print(_times(rows, ranks))
    _choices(console, plan)
    for title, lines in (("Assumed", plan.assumed), ("Left out", plan.left_out)):
        if lines:
            console.print(f"{title}: " + "; ".join(lines) + ".", highlight=False)


def _head(console: Console, plan: Plan) -> None:
    model, run = plan.model, plan.run
    trained = model["trainable_parameters"]
    total = 2 * model["parameters"] + 14 * trained
    unit, size, power = ("GB", 1e9, "1e9") if total >= 1e9 else ("MB", 1e6, "1e6")
    counts = f"{model['parameters']:,} parameters"
    if model["active_parameters"] != model["parameters"]:
        counts += f" ({model['active_parameters']:,} of them used by a token)"
    name = "" if model["family"] == "parameters" else f"{model['name']}: "
    if trained == model["parameters"]:
        console.print(
            f"{name}{counts} x 16 bytes = {_number(total, size)} {unit} of weights, gradients and optimizer states "
            f"(bf16, Adam with fp32 master weights); {unit} = {power} bytes", highlight=False,
        )  # fmt: skip
    else:
        console.print(f"{name}{counts}, {trained:,} of them trained; {unit} = {power} bytes", highlight=False)
    if plan.method != "training state only":
        console.print(
            f"A step: {run['accumulation']} x {run['micro_batch']} sequences of {run['sequence']} tokens a rank; {run['checkpointing']} "
            f"activation checkpointing, {run['attention']} attention, {run['loss']} loss, {run['engine']}; {plan.method}", highlight=False,
        )  # fmt: skip


def _decision(console: Console, plan: Plan) -> None:
    decided = plan.recommendation
    verdict = f"{decided.layout} on {decided.ranks} x {plan.machine['gpu']}" if decided.fits else f"nothing that was tried fits a {plan.machine['gpu']}"
    console.print(f"\n[bold]{verdict}[/bold]")
    for reason in decided.reasons:
        console.print(f"- {reason}", highlight=False)
    room = []
    if decided.largest_micro_batch:
        room.append(f"the largest micro-batch that fits is {decided.largest_micro_batch}")
    if decided.longest_sequence:
        room.append(f"the longest sequence {decided.longest_sequence:,} tokens")
    if room:
        console.print("- " + ", ".join(room), highlight=False)
    if plan.asked:
        answer = "fits" if plan.asked.fits else "does not fit"
        console.print(f"- asked for: {plan.asked.layout} on {plan.asked.ranks} ranks {answer}", highlight=False)
    console.print()


def _number(value: float, size: float) -> str:
    value /= size
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}"


def _fitting(row: Row, size: float, plan: Plan) -> str:
    return _number(row.peak_allocated, size) + (" x" if plan.machine and not row.fits else "")


def _matrix(plan: Plan, title: str, cell: Callable[[Row], str]) -> Table:
    """One row per number of ranks, one column per stage or hybrid."""
    kinds = {_kind(row): None for row in plan.rows}
    table = Table(title=title, title_justify="left")
    for heading in ("ranks", *kinds):
        table.add_column(heading, justify="right")
    for ranks in dict.fromkeys(row.ranks for row in plan.rows):
        cells = {_kind(row): cell(row) for row in plan.rows if row.ranks == ranks}
        table.add_row(str(ranks), *(cells.get(kind, "") for kind in kinds))
    return table


def _kind(row: Row) -> str:
    if row.stage is not None:
        return f"stage {row.stage}"
    return "weights\nin a node" if row.partition[0] != row.partition[2] else "hybrid"


def _named(rows: Iterable[Row]) -> list[Row]:
    return list({row.layout: row for row in rows}.values())


def _terms(rows: list[Row], ranks: int, unit: str, size: float) -> Table:
    """By term: at rest the first ones, at most the others; their sum is more than the peak, which none reaches at one time."""
    terms = [term for term in TERMS if any(getattr(row.bytes, term) for row in rows)]
    table = Table(title=f"{unit} by term on {ranks} ranks, each at its most", title_justify="left")
    table.add_column("", justify="left")
    for term in terms:
        table.add_column(TERMS[term], justify="right")
    for row in _named(rows):
        table.add_row(row.layout, *(_number(getattr(row.bytes, term), size) for term in terms))
    return table


def _totals(rows: list[Row], ranks: int, unit: str, size: float, plan: Plan) -> Table:
    table = Table(title=f"In all on {ranks} ranks: {unit} allocated, GiB (2^30 bytes) reserved and shown by nvidia-smi", title_justify="left")
    phases = ("forward", "loss", "backward", "step")
    headings = ["", *phases, "first\nstep", f"peak\n{unit}", "reserved\nGiB", "nvidia-smi\nGiB", *(["left\n" + unit, ""] if plan.machine else [])]
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left")
    for row in _named(rows):
        cells = [row.layout, *(_number(row.phases.get(phase, 0), size) for phase in phases), _number(row.first_step, size)]
        cells += [_number(row.peak_allocated, size), f"{row.reserved_low / 2**30:,.1f} to {row.reserved_high / 2**30:,.1f}"]
        cells += [f"to {row.device_used / 2**30:,.1f}"]
        if plan.machine:
            cells += [_number(row.left, size), "fits" if row.fits else "does not fit"]
        table.add_row(*cells)
    return table


def _times(rows: list[Row], ranks: int) -> Table:
    table = Table(title=f"Time of a step on {ranks} ranks", title_justify="left")
    for i, heading in enumerate(("", "compute s", "communication s", "exposed s", "step s", "tokens/s/GPU", "MFU")):
        table.add_column(heading, justify="right" if i else "left")
    for row in _named(rows):
        if row.step_s is not None:
            seconds = (row.compute_s, row.communication_s, row.exposed_s, row.step_s)
            table.add_row(row.layout, *(f"{s:,.2f}" for s in seconds), f"{row.tokens_per_s_per_gpu:,.0f}", f"{100 * row.mfu:.0f}%")
    return table


def _choices(console: Console, plan: Plan) -> None:
    decided = plan.recommendation
    if not decided or not decided.choices or not decided.row:
        return
    table = Table(title="With one thing changed, faster ones first", title_justify="left")
    for i, heading in enumerate(("", "peak GB", "step s", "")):
        table.add_column(heading, justify="right" if i else "left")
    for choice in decided.choices:
        seconds = "" if choice.step_s is None else f"{choice.step_s:,.2f}"
        table.add_row(choice.change, _number(choice.peak_allocated, 1e9), seconds, "fits" if choice.fits else "does not fit")
    console.print(table)
