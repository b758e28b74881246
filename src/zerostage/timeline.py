"""What a rank does when: the spans of a step on its main thread, and its transfers on the network.

`World.timeline` holds one while somebody traces (tracing.py); else nothing is noted. Host
clocks only: on CUDA, where the host runs ahead, torch.profiler is the tool.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

#: What the main thread's time goes to. What no span claims is 'compute': the model's own forward and backward.
KINDS = ("compute", "gather", "reduce", "optimizer", "waiting")


@dataclass
class Timeline:
    """Spans as (kind, what, start, stop) in ns since the epoch. Those of the main thread do not overlap."""

    start: int = field(default_factory=time.time_ns)
    stop: int = 0
    main: list[tuple[str, str, int, int]] = field(default_factory=list)
    network: list[tuple[str, str, int, int]] = field(default_factory=list)
    ready: list[tuple[str, int]] = field(default_factory=list)  # units, and when their weights were there

    @contextmanager
    def span(self, kind: str, what: str) -> Iterator[None]:
        start = time.time_ns()
        try:
            yield
        finally:
            self.main.append((kind, what, start, time.time_ns()))

    def split(self) -> dict[str, float]:
        """Seconds of the main thread by kind; they sum to the whole."""
        seconds = dict.fromkeys(KINDS, 0.0)
        for kind, _, start, stop in self.main:
            seconds[kind] += (stop - start) / 1e9
        seconds["compute"] = (self.stop - self.start) / 1e9 - sum(seconds.values())
        return seconds

    def computing(self) -> list[tuple[str, int, int]]:
        """(name, start, stop) of the time between spans; the name is that of the last unit that was ready."""
        edges = sorted(self.main, key=lambda span: span[2])
        starts = [self.start, *(stop for *_, stop in edges)]
        stops = [*(start for _, _, start, _ in edges), self.stop]
        arrivals = sorted(self.ready, key=lambda arrival: arrival[1])
        found, name, place = [], "compute", 0
        for start, stop in zip(starts, stops):
            while place < len(arrivals) and arrivals[place][1] <= start:
                name, place = arrivals[place][0], place + 1
            if stop > start:
                found.append((name, start, stop))
        return found
