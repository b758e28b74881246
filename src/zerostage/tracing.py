"""Where the time of a step goes: a Chrome trace of all ranks and a split with exposed communication."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from zerostage.engine import require
from zerostage.timeline import KINDS, Timeline

#: What each row of the split is called in print.
ROWS = {
    "compute": "compute (forward, backward)",
    "gather": "gather: copying and sending",
    "reduce": "reduce: copying, sending, adding",
    "optimizer": "optimizer",
    "waiting": "exposed communication (waiting)",
}


class Trace:
    """One `Timeline` a rank, in rank order, once the block of `trace` is left."""

    def __init__(self, ranks: Sequence[Timeline] = ()) -> None:
        self.ranks = list(ranks)

    def split(self) -> list[dict[str, float]]:
        """Seconds of each rank's main thread by kind (`timeline.KINDS`); they sum to the time of the block.

        'waiting' is exposed communication: the main thread could not go on before a message
        arrived. Transfers that run beside it cost what they take of the cores and nothing else.
        """
        return [timeline.split() for timeline in self.ranks]

    def save(self, path: str | Path) -> None:
        """Write a Chrome trace (JSON; open it in Perfetto or chrome://tracing). One process a rank."""
        events: list[dict[str, Any]] = []
        for rank, timeline in enumerate(self.ranks):
            for name, number, label in (("process_name", 0, f"rank {rank}"), ("thread_name", 0, "main thread")):
                events.append({"ph": "M", "name": name, "pid": rank, "tid": number, "args": {"name": label}})
            spans = [*timeline.main, *(("compute", *span) for span in timeline.computing())]
            for kind, what, start, stop in spans:
                name = what if what == kind else f"{kind}: {what}"
                times = {"ts": start / 1e3, "dur": (stop - start) / 1e3}
                events.append({"ph": "X", "cat": kind, "name": name, "pid": rank, "tid": 0, **times})
            for number, (kind, what, start, stop) in enumerate(timeline.network):
                common = {"cat": f"network {kind}", "name": what, "pid": rank, "tid": 1, "id": f"{rank}.{number}"}
                events += [{"ph": "b", "ts": start / 1e3, **common}, {"ph": "e", "ts": stop / 1e3, **common}]
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def __str__(self) -> str:
        splits = self.split()
        lines = [f"{'milliseconds, mean of ranks':<34}{'mean':>8}{'least':>8}{'most':>8}{'share':>8}"]
        total = sum(sum(split.values()) for split in splits)
        for kind in KINDS:
            values = [1e3 * split[kind] for split in splits]
            share = 1e-3 * sum(values) / total
            lines.append(f"{ROWS[kind]:<34}{sum(values) / len(values):>8.1f}{min(values):>8.1f}{max(values):>8.1f}{share:>8.1%}")
        return "\n".join([*lines, f"{'total':<34}{1e3 * total / len(splits):>8.1f}"])


@contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Note what every rank does inside the block, a step for example; every rank must enter it alike.

    The result has its figures once the block is left: `split()`, `save(path)`, `print`. The
    noting costs some microseconds a span. Raises RuntimeError on CUDA, where the host runs
    ahead of the work: use torch.profiler there.
    """
    world = require(model).world
    if world.device.type != "cpu":
        raise RuntimeError("zerostage.trace times the host, which runs ahead of a GPU: use torch.profiler.profile there")
    result = Trace()
    timeline = world.timeline = Timeline()
    try:
        yield result
        timeline.stop = time.time_ns()
    finally:
        world.timeline = None
    result.ranks = world.collect_objects(timeline, "zerostage.trace")
