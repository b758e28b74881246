"""The memory of one step over time: bytes by term, and the most that each phase held.

Both ways to compute write one: the closed form (`walk.py`) and the simulation (`lives.py`).
"""

from __future__ import annotations

from collections import Counter

from zerostage.planning.schema import Moment


class Track:
    """Bytes by term as they change, cut into moments. A moment keeps the bytes at its own highest point."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.total = 0
        self.moments: list[Moment] = []
        self.phases: dict[str, int] = {}  # by phase, the most that was allocated in it
        self.highest: Counter[str] = Counter()  # by term, the most of it at any time
        self._best = -1

    def mark(self, at: str, phase: str) -> None:
        """Begin a moment. What was allocated before it is its first value."""
        self.moments.append(Moment(at=at, phase=phase, bytes={}))
        self._best = -1
        self._note()

    def change(self, term: str, size: int) -> None:
        """`size` bytes more (or, negative, fewer) are held by `term`."""
        if size:
            now = self.now[term] = self.now[term] + size
            self.total += size
            if size > 0:
                if now > self.highest[term]:
                    self.highest[term] = now
                if self.total > self._best:
                    self._note()

    def _note(self) -> None:
        if not self.moments:
            return
        moment = self.moments[-1]
        self._best = self.total
        moment.bytes = {term: size for term, size in self.now.items() if size}
        self.phases[moment.phase] = max(self.total, self.phases.get(moment.phase, 0))

    @property
    def peak(self) -> int:
        """The most that was allocated."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: self.phases[phase])
