"""What zerostage itself holds, and when. It follows `schedule.py`, `flat.py`, `collectives.py` and `optimizer.py` to the byte."""

from __future__ import annotations

from dataclasses import dataclass

from zerostage import layout
from zerostage.planning.memory.buffers import Buffers
from zerostage.planning.model.architecture import Unit

#: Elements of one piece of the optimizer's work on a GPU (`collectives.LARGE_CHUNK`).
PIECE = 16_777_216


@dataclass
class Flight:
    """A reduction under way: for each collective to come, bytes sent, received, and of the copies in which the parts are added."""

    unit: Unit
    collectives: list[tuple[int, int, int]]
    aside: int  # bytes of earlier micro-batches' sum, in whose place the gradients came
    ranks: int

    @property
    def counted(self) -> int:
        """What `Schedule._has_room` counts: this rank's own part is not received."""
        sent, received, _ = self.collectives[0]
        return sent + received * (self.ranks - 1) // self.ranks

    @property
    def now(self) -> int:
        return sum(self.collectives[0][:2]) + self.aside


class Zerostage(Buffers):
    """zerostage itself."""

    kernel = "fused"

    def __init__(self, *arguments) -> None:
        self._padded: dict[tuple[str, bool], int] = {}
        super().__init__(*arguments)
        self.held: dict[str, int] = {}  # gathered units
        self.window = 0  # of them, those that are not resident
        self.following: list[Unit] = []  # what this pass comes to next
        self.flying: list[Flight] = []  # reductions under way
        self.opened: set[str] = set()  # units whose gradients are being filled
        self.last: dict[str, int] = {}  # by unit: bytes of the gradient that came last
        self.summed: set[str] = set()  # units whose kept gradients are reduced
        self.divided = self.partition.weights > 1
        self.allowed = (3 if self.partition.gradients > 1 else 1) * max((self.gradient(u) for u in self.units), default=0)

    def padded(self, unit: Unit, trainable: bool) -> int:
        key = (unit.name, trainable)
        if key not in self._padded:
            self._padded[key] = layout.padded((w.numel for w in unit.weights if w.trainable is trainable), self.ranks)
        return self._padded[key]

    # Gathering: `Schedule.need`, `_fill`, `release`

    def need(self, unit: Unit, following: list[Unit]) -> None:
        self.following = following
        if self.divided:
            self._gather(unit)
            self._ahead()

    def _ahead(self) -> None:
        """Start gathering the units that come next, as far as the window allows."""
        for follower in self.following if self.divided and self.run.prefetch else ():
            if self.window < 1 + self.run.prefetch:
                self._gather(follower)

    def _gather(self, unit: Unit) -> None:
        if unit.name not in self.held:
            self.held[unit.name] = self.whole(unit)
            self.window += not unit.resident
            self.track.change("gathered", self.held[unit.name])

    def _release(self, unit: Unit) -> None:
        size = self.held.pop(unit.name, None)
        if size is not None:
            self.window -= not unit.resident
            self.track.change("gathered", -size)

    def leave(self, unit: Unit, last: bool) -> None:
        if not unit.resident:
            self._release(unit)
            self._ahead()

    def end_forward(self) -> None:
        for unit in self.units:
            self._release(unit)

    # Gradients: `Flat.take`, `Schedule._reduce`

    def arrive(self, unit: Unit, elements: int) -> None:
        size = elements * self.c
        self.track.change("reduce", size)  # as autograd made it
        if unit.name not in self.opened:
            self.opened.add(unit.name)
            if self.partition.gradients > 1:
                self.track.change("reduce", self.gradient(unit))
            else:
                self.keep(unit, self.gradient(unit))
                if unit.name in self.summed:  # what has been summed makes room for this rank's next gradients
                    self.track.change("reduce", self.gradient(unit) // self.ranks)
        self.track.change("reduce", -size)
        self.last[unit.name] = size

    def reduce(self, unit: Unit, following: list[Unit]) -> None:
        self._release(unit)
        self._ahead()
        if unit.name not in self.opened or not self.reduces:
            return
        self.opened.discard(unit.name)
        self.track.change("reduce", last := self.last.pop(unit.name, 0))  # autograd still holds it
        whole = self.gradient(unit)
        ahead = self.gradient(following[0]) if following and self.partition.gradients > 1 else 0
        own = whole if self.partition.gradients > 1 else 0
        if sum(flight.counted for flight in self.flying) + own + whole + ahead > self.allowed:
            self._proceed()
        aside = whole // self.ranks if unit.name in self.summed and self.partition.gradients == 1 else 0
        flight = Flight(unit, self._collectives(unit), aside, self.ranks)
        self.summed.add(unit.name)
        self.track.change("reduce", flight.now - own - aside)
        self.track.change("reduce", -last)
        self.flying.append(flight)

    def _collectives(self, unit: Unit) -> list[tuple[int, int, int]]:
        """For each collective of a unit's reduction: bytes that are sent and received, and beside them those of the fp32 copies
        in which `collectives.tree_sum` then adds up what came, a piece at a time."""
        elements, size = self.padded(unit, True), self.g
        again = unit.name in self.summed  # there is a sum of earlier micro-batches to be added
        levels = [radix for radix in self.partition.levels(self.ranks) if radix > 1]
        if not levels:
            return [(0, 0, 4 * min(elements, PIECE) if again else 0)]
        found = []
        for number, radix in enumerate(levels):
            last, part = number == len(levels) - 1, elements // radix
            wide = 4 * -(-radix // 2) * min(part, max(1, 2 * PIECE // radix))
            if radix == 2 and not (last and again) and (size == 4 or last and self.run.weights != "fp16"):
                wide = 0  # two numbers of the result's dtype are added as they are
            sent = elements * size if number or self.partition.gradients > 1 else 0  # the kept gradients' own memory
            found.append((sent, elements * size, wide))
            elements, size = part, max(4, size)
        return found

    def _proceed(self) -> None:
        """`Schedule._step_inflight`: each reduction under way goes one collective further."""
        for flight in self.flying:
            before = flight.now
            wide, following = flight.collectives[0][2], flight.collectives[1:]
            if not following:
                self.keep(flight.unit, self.gradient(flight.unit) // self.partition.gradients)
            self.track.change("reduce", wide + (following[0][0] if following else 0))
            self.track.change("reduce", -wide)
            del flight.collectives[0]
            if following:
                self.track.change("reduce", following[0][1])
            self.track.change("reduce", (flight.aside if following else 0) - before)
        self.flying = [flight for flight in self.flying if flight.collectives]

    def end_backward(self) -> None:
        while self.flying:
            self._proceed()
        self.end_forward()

    def step(self) -> None:
        """`_fused_adam` widens gradients a piece of a parameter at a time, `_plain` those of a unit, which torch then updates."""
        slices = {unit.name: self.padded(unit, True) // self.partition.optimizer for unit in self.units}
        largest = max(slices.values(), default=0)
        widens = self.master if self.g != self.master else 0
        if self.run.optimizer == "adamw" and self.run.optimizer_kernel != "foreach":
            parts = (min(w.numel, slices[unit.name]) for unit in self.units for w in unit.weights if w.trainable)
            temporary = widens * min(PIECE, max(parts, default=0))
        else:
            temporary = (widens + (self.moment if self.run.optimizer == "adamw" else 0)) * largest
        self.track.change("optimizer_temporaries", temporary)
        self.track.change("optimizer_temporaries", -temporary)

    def zero_grad(self) -> None:
        super().zero_grad()
        self.summed.clear()
