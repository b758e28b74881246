"""The plan in print. GB = 1e9 bytes; what nvidia-smi will show is in GiB = 2^30 bytes, as that tool counts."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from zerostage.planning.schema import PASSING, PHASES, STATE, Plan, Row


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
    counts = [row.ranks for row in plan.rows]
    ranks = plan.asked.ranks if plan.asked else decided.ranks if decided and decided.ranks in counts else counts[-1]
    rows = [row for row in plan.rows if row.ranks == ranks]
    if plan.asked and plan.asked not in rows:
        rows.append(plan.asked)
    if known:
        console.print(_whole(rows, ranks, unit, size, plan))
    _choices(console, plan)
    for title, lines in (("Assumed", plan.assumed), ("Left out", plan.left_out)):
        if lines:
            console.print(f"{title}: " + "; ".join(lines) + ".", highlight=False)


def _head(console: Console, plan: Plan) -> None:
    model, run = plan.model, plan.run
    trained, total = model["trainable_parameters"], model["state_bytes"]
    unit, size, power = ("GB", 1e9, "1e9") if total >= 1e9 else ("MB", 1e6, "1e6")
    text = "" if model["family"] == "parameters" else f"{model['name']}: "
    text += f"{model['parameters']:,} parameters"
    if model["active_parameters"] != model["parameters"]:
        text += f" ({model['active_parameters']:,} of them used by a token)"
    if trained != model["parameters"]:
        text += f", {trained:,} of them trained"
    elif total == 16 * model["parameters"]:
        text += " x 16 bytes"
    master = "" if run["master"] in ("none", run["weights"]) else f", {run['master']} master weights"
    kept = f"weights, gradients and optimizer states ({run['weights']}{master}, {run['optimizer']})"
    console.print(f"{text} = {_number(total, size)} {unit} of {kept}; {unit} = {power} bytes", highlight=False)
    saved = f"a checkpoint takes {_number(model['checkpoint_bytes'], size)} {unit} on the disk (weights{', masters' if master else ''} and moments)"
    console.print(f"{saved}; a resumed run has its states from the start, so its first step takes what later steps take", highlight=False)
    if plan.method != "training state only" or plan.machine:
        console.print(
            f"A step: {run['accumulation']} x {run['micro_batch']} sequences of {run['sequence']} tokens a rank; {'no' if run['checkpointing'] == 'none' else run['checkpointing']} "
            f"activation checkpointing, {run['attention']} attention, {run['loss']} loss, {run['engine']}; {plan.method}", highlight=False,
        )  # fmt: skip


def _decision(console: Console, plan: Plan) -> None:
    decided = plan.recommendation
    if plan.asked:
        left = f"{_number(abs(plan.asked.left), 1e9)} GB are {'left' if plan.asked.fits else 'missing'}"
        answer = "fits" if plan.asked.fits else "does not fit"
        console.print(f"\n[bold]asked for: {plan.asked.layout} on {plan.asked.ranks} ranks {answer}[/bold]: "
                      f"{_number(plan.asked.peak_allocated, 1e9)} GB at its peak, {left}", highlight=False)  # fmt: skip
    verdict = f"{decided.layout} on {decided.ranks} x {plan.machine['gpu']}" if decided.fits else f"nothing that was tried fits the {plan.machine['gpu']}"
    console.print(f"\n[bold]{'recommended: ' if plan.asked else ''}{verdict}[/bold]", highlight=False)
    for reason in decided.reasons:
        console.print(f"- {reason}", highlight=False)
    room = []
    if decided.largest_micro_batch:
        room.append(f"the largest micro-batch that fits is {decided.largest_micro_batch}")
    if decided.longest_sequence:
        room.append(f"the longest sequence {decided.longest_sequence:,} tokens")
    if room:
        console.print("- " + ", ".join(room), highlight=False)
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


def _whole(rows: list[Row], ranks: int, unit: str, size: float, plan: Plan) -> Table:
    """Everything about one number of ranks, a column for each stage or hybrid.

    Terms are each at their most; their sum is more than the peak, since no moment has all of them.
    """
    rows = list({row.layout: row for row in rows}.values())
    table = Table(title=f"On {ranks} ranks, {unit} per rank; GiB = 2^30 bytes", title_justify="left")
    table.add_column("", justify="left", no_wrap=True)
    for row in rows:
        table.add_column(_kind(row), justify="right")

    def line(name: str, cell: Callable[[Row], str], last: bool = False) -> None:
        table.add_row(name, *(cell(row) for row in rows), end_section=last)

    for group in (STATE, PASSING):
        shown = [term for term in group if any(getattr(row.bytes, term) for row in rows)]
        for term in shown:
            line(term.replace("optimizer_", "step "), lambda row: _number(getattr(row.bytes, term), size), term == shown[-1])
    for phase in PHASES:
        line(f"{phase}, at most", lambda row: _number(row.phases.get(phase, 0), size))
    line("first step", lambda row: _number(row.first_step, size), True)
    line("peak allocated", lambda row: _number(row.peak_allocated, size))
    line("reserved GiB, from", lambda row: f"{row.reserved_low / 2**30:,.1f}")
    line("to", lambda row: f"{row.reserved_high / 2**30:,.1f}")
    line("nvidia-smi GiB, to", lambda row: f"{row.device_used / 2**30:,.1f}", not plan.machine)
    if plan.machine:
        line("left", lambda row: _number(row.left, size))
        line("fits", lambda row: "yes" if row.fits else "no", True)
    if any(row.step_s is not None for row in rows):
        for name, field in (("compute, s", "compute_s"), ("communication, s", "communication_s"), ("exposed, s", "exposed_s"), ("step, s", "step_s")):
            line(name, lambda row: "" if row.step_s is None else f"{getattr(row, field):,.2f}")
        line("tokens/s/GPU", lambda row: "" if row.step_s is None else f"{row.tokens_per_s_per_gpu:,.0f}")
        line("MFU", lambda row: "" if row.step_s is None else f"{100 * row.mfu:.0f}%")
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
