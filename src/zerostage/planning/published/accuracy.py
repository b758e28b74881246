"""How wrong the planner is: its predictions beside published measurements."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from zerostage.mistakes import InputError
from zerostage.partition import Partition
from zerostage.planning.memory.buffers import Buffers
from zerostage.planning.memory.engines import BUFFERS
from zerostage.planning.memory.track import Track
from zerostage.planning.published.cases import Case, read
from zerostage.planning.rows import row
from zerostage.planning.schema import Row
from zerostage.planning.timing import hardware
from zerostage.planning.timing.duration import step
from zerostage.planning.timing.hardware import FILL

PUBLISHED = Path(__file__).with_name("published.json")


@dataclass
class Verdict:
    """One figure beside its prediction. `error`: predicted / measured - 1, for bytes and for tokens/s."""

    case: Case
    kind: str
    measured: float
    predicted: float
    low: float | None = None  # of a band
    high: float | None = None

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool | None:
        return None if self.low is None else self.low <= self.measured <= self.high


def judge(path: str | Path = PUBLISHED) -> tuple[list[Verdict], list[Case]]:
    """The verdicts on all figures of the file, and the cases that leave too much open to be predicted."""
    verdicts, skipped = [], []
    for case in read(path):
        if case.missing:
            skipped.append(case)
        else:
            verdicts += _judge(case)
    return verdicts, skipped


def _judge(case: Case) -> list[Verdict]:
    partition = Partition.from_stage(case.stage, case.ranks) if case.ranks > 1 else Partition(1, 1, 1)
    machine = None
    if case.gpu:
        try:
            world = case.ranks * case.run.tensor
            machine = hardware.machine(case.gpu, max(1, world // 8), min(8, world))
        except InputError:
            machine = None  # a card that is not in the table: memory only
    answer, track, _ = row(case.architecture, case.run, partition, case.ranks, machine, timed=False)
    buffers = BUFFERS[case.run.engine](case.architecture, case.run, partition, case.ranks, Track())
    found = []
    figures = {case.kind: case.value, **case.also} if case.fitted else {}
    for kind, value in figures.items():
        if kind and value:
            found.append(_verdict(case, kind, value, answer, buffers))
    if not case.fitted and machine:
        usable = machine.card.usable_bytes
        found.append(Verdict(case, "out of memory", usable, answer.peak_allocated + answer.bytes.context, FILL * usable, float("inf")))
    if case.tokens_per_s and machine and case.run.tensor == 1:
        predicted = step(case.architecture, case.run, machine, partition, case.ranks).tokens_per_s_per_gpu
        found.append(Verdict(case, "tokens/s/GPU", case.tokens_per_s, predicted))
    return found


def _verdict(case: Case, kind: str, value: int, answer: Row, buffers: Buffers) -> Verdict:
    b = answer.bytes
    state = b.weights + b.master + b.exp_avg + b.exp_avg_sq + b.buffers
    if kind == "allocated":
        return Verdict(case, kind, value, answer.peak_allocated)
    if kind == "active":
        return Verdict(case, kind, value, answer.peak_allocated + buffers.pending())
    if kind == "at rest":
        return Verdict(case, kind, value, state + (b.gradients if buffers.gradients_outlive_zero_grad else 0))
    if kind == "state":
        return Verdict(case, kind, value, state + b.gradients)
    high = answer.reserved_high + (b.context if kind == "device" else 0)
    low = answer.reserved_low
    middle = min(max(low, value), high)  # a band errs by how far outside of it a figure lies
    return Verdict(case, kind, value, middle, low, high)


SUMMARY = ("engine", "figure", "figures", "median", "90th percentile", "worst")


def summary(verdicts: list[Verdict]) -> list[tuple[str, ...]]:
    """Per engine and kind of figure, and over all engines: how many, and the median, 90th percentile and worst error."""
    groups: dict[tuple[str, str], list[float]] = {}
    for v in verdicts:
        if v.kind != "out of memory":
            own = v.case.run.engine + (", tensor parallel" if v.case.run.tensor > 1 else "")
            for engine in (own, "all"):
                groups.setdefault((engine, v.kind), []).append(abs(v.error))
    found = []
    for (engine, kind), errors in sorted(groups.items(), key=lambda item: (item[0][0] == "all", item[0])):
        errors.sort()
        figures = statistics.median(errors), errors[round(0.9 * (len(errors) - 1))], errors[-1]
        found.append((engine, kind, str(len(errors)), *(f"{100 * x:.1f}%" for x in figures)))
    return found


def show(console: Console, path: str | Path = PUBLISHED, rows: bool = True) -> None:
    """Print each figure with its prediction, and per engine and kind the median, 90th percentile and worst error."""
    verdicts, skipped = judge(path)
    if rows:
        table = Table(title="Predicted beside measured; GiB = 2^30 bytes", title_justify="left")
        for heading in ("case", "engine", "figure", "measured", "predicted", "error"):
            table.add_column(heading, justify="left" if heading in ("case", "engine", "figure") else "right")
        for v in verdicts:
            bytes_ = v.kind != "tokens/s/GPU"
            number = (lambda x: f"{x / 2**30:,.2f}") if bytes_ else (lambda x: f"{x:,.0f}")
            shown = f"{number(v.low)} to {number(v.high)}" if v.low is not None and v.high != float("inf") else number(v.predicted)
            verdict = f"{100 * v.error:+.1f}%" if v.low is None else "inside" if v.inside or v.kind == "out of memory" and v.predicted >= v.low else f"outside by {100 * abs(v.error):.1f}%"
            table.add_row(v.case.id, v.case.engine, v.kind, number(v.measured), shown, verdict)
        console.print(table)
    table = Table(title="Error of the prediction, of its size", title_justify="left")
    for heading in SUMMARY:
        table.add_column(heading, justify="left" if heading in SUMMARY[:2] else "right")
    for line in summary(verdicts):
        table.add_row(*line)
    console.print(table)
    if skipped:
        console.print(f"{len(skipped)} cases leave open what memory depends on:")
        for case in skipped:
            console.print(f"  {case.id} {case.engine}: no {', '.join(case.missing)}", highlight=False)
