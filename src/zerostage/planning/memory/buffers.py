"""What an engine holds beside the activations, and when: weights at rest and gathered, gradients, optimizer state.

`Buffers` is what every engine has in common; this file has zerostage's own, which follows `schedule.py`, `flat.py` and
`optimizer.py` to the byte. The other engines are in `engines.py`. `walk.py` calls the methods in the order of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerostage import layout
from zerostage.partition import Partition
from zerostage.planning.memory.track import Track
from zerostage.planning.model.architecture import Architecture, Unit
from zerostage.planning.run import ITEMSIZE, MOMENTS, Run

#: Elements of one piece of the optimizer's work on a GPU (`collectives.LARGE_CHUNK`).
PIECE = 16_777_216


class Buffers:
    """The memory of one rank under one engine. Methods are called as a step goes on; each changes `track`."""

    #: How the optimizer's step goes by default: 'foreach' makes one temporary of a moment's size (torch's
    #: _multi_tensor_adamw: the square root of exp_avg_sq), 'fused' none.
    kernel = "foreach"
    #: Stages that it has; None among them: hybrids.
    stages: tuple[int | None, ...] = (0, 1, 2, 3, None)
    #: Whether kept gradients go only with the next forward.
    gradients_outlive_zero_grad = False
    #: Gathered units whose memory another stream may still use after it is freed.
    pending_units = 0

    def __init__(self, architecture: Architecture, run: Run, partition: Partition, ranks: int, track: Track) -> None:
        self.architecture, self.run, self.partition, self.ranks, self.track = architecture, run, partition, ranks, track
        self.c = ITEMSIZE[run.weights]
        self.has_master = run.master not in ("none", run.weights)
        self.master = ITEMSIZE[run.master] if self.has_master else self.c
        self.g = ITEMSIZE[run.gradients] if run.gradients else self.gradient_itemsize()
        self.moment = ITEMSIZE[run.moments] if run.moments else self.master
        self.units = self.divide()
        self.reduces = True  # whether this backward's gradients are reduced (not within no_sync)
        self.kept: dict[str, int] = {}  # bytes of gradients that are kept, by unit
        self.arrived: dict[str, int] = {}  # bytes of gradients as autograd has made them, by unit
        self.of = {weight.name: unit for unit in self.units for weight in unit.weights}

    # What differs between engines

    def divide(self) -> tuple[Unit, ...]:
        """What is gathered and reduced as one."""
        return self.architecture.units

    def gradient_itemsize(self) -> int:
        """Bytes of a kept gradient's element where the run does not say."""
        return self.c

    def padded(self, unit: Unit, trainable: bool) -> int:
        """Elements of a unit's trainable or frozen weights as they are laid out, on one tensor-parallel rank."""
        return sum(weight.numel for weight in unit.weights if weight.trainable is trainable) // self.run.tensor

    def buffers(self) -> int:
        """Communication buffers of a fixed size."""
        return 0

    # At rest

    def sizes(self) -> dict[str, int]:
        """Bytes at rest by term; gradients as they are between backward and the end of the step."""
        trained = sum(self.padded(unit, True) for unit in self.units)
        stored = sum(self.stored(unit) for unit in self.units)
        p, offload = self.partition, self.run.offload
        on_card = 0 if offload != "none" else 1
        states = MOMENTS[self.run.optimizer]
        found = {
            "weights": 0 if offload == "optimizer+weights" else stored // p.weights,
            "gradients": trained * self.g // p.gradients,
            "master": on_card * trained * self.master // p.optimizer if self.has_master else 0,
            "exp_avg": on_card * trained * self.moment // p.optimizer if states else 0,
            "exp_avg_sq": on_card * trained * self.moment // p.optimizer if states == 2 else 0,
            "buffers": self.buffers(),
        }
        if self.run.optimizer == "adafactor":  # a row and a column of each matrix
            rows = sum(sum(w.shape) if len(w.shape) > 1 else w.numel for w in self.architecture.weights if w.trainable)
            found["exp_avg_sq"] = on_card * 4 * rows // p.optimizer
        return found

    def stored(self, unit: Unit) -> int:
        """Bytes of a unit's whole weights as they are kept: trained ones in the compute dtype, packed ones packed."""
        packed = [w for w in unit.weights if w.bits is not None]
        bytes_ = sum(round(w.numel * w.bits / 8) for w in packed)
        return bytes_ + (self.padded(unit, True) + self.padded(unit, False) - sum(w.numel for w in packed)) * self.c

    def whole(self, unit: Unit) -> int:
        """Bytes of a unit when it is gathered."""
        return self.stored(unit)

    def gradient(self, unit: Unit) -> int:
        """Bytes of a unit's whole gradients."""
        return self.padded(unit, True) * self.g

    def pending(self) -> int:
        """Bytes that the allocator counts as active after they are freed, at most."""
        return self.pending_units * max((self.whole(unit) for unit in self.units if not unit.resident), default=0)

    def start(self) -> None:
        """What is there before a step."""
        for term, size in self.sizes().items():
            if term != "gradients":
                self.track.change(term, size)

    # A step

    def need(self, unit: Unit, following: list[Unit]) -> None:
        """A forward or backward comes to `unit`; `following` come next."""

    def leave(self, unit: Unit, last: bool) -> None:
        """A forward is done with `unit`. last: no other part of this forward uses it."""

    def end_forward(self) -> None: ...

    def arrive(self, unit: Unit, elements: int) -> None:
        """Backward has made the gradient of `elements` weights of `unit`, in the compute dtype."""

    def reduce(self, unit: Unit, following: list[Unit]) -> None:
        """Backward is done with `unit`."""

    def end_backward(self) -> None: ...

    def step(self) -> None:
        """The optimizer's step, and zero_grad after it."""
        sizes = self.sizes()
        temporary = sizes["exp_avg_sq"] if (self.run.optimizer_kernel or self.kernel) == "foreach" and self.run.optimizer == "adamw" else 0
        self.track.change("optimizer_temporaries", temporary)
        self.track.change("optimizer_temporaries", -temporary)

    def keep(self, unit: Unit, size: int) -> None:
        """Gradients of `unit` are kept from now on; the next micro-batch's are added to them."""
        self.track.change("gradients", size - self.kept.get(unit.name, 0))
        self.kept[unit.name] = size

    def add(self, unit: Unit, size: int) -> None:
        """A gradient of `unit` has come, which stays until the unit is reduced."""
        self.track.change("reduce", size)
        self.arrived[unit.name] = self.arrived.get(unit.name, 0) + size

    def complete(self, unit: Unit) -> None:
        """All gradients of `unit` are there, also those that no tape has (of biases and positions)."""
        self.track.change("reduce", self.padded(unit, True) * self.c - self.arrived.pop(unit.name, 0))

    def zero_grad(self) -> None:
        self.track.change("gradients", -self.track.now["gradients"])
        self.kept.clear()


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
        self.window = 0
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
        if not self.divided:
            return
        self._gather(unit)
        for follower in following:
            if self.run.prefetch and self.window < 1 + self.run.prefetch:
                self._gather(follower)
        self._following = following

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
            for follower in self._following if self.divided else ():
                if self.run.prefetch and self.window < 1 + self.run.prefetch:
                    self._gather(follower)

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
        if self.divided:
            self._release(unit)
            for follower in following:
                if self.run.prefetch and self.window < 1 + self.run.prefetch:
                    self._gather(follower)
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
