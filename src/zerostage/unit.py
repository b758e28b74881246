"""A unit: the group of parameters that is gathered and reduced as one, a transformer block for example.

A unit holds one flat per dtype and per trainable or frozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from torch import nn

from zerostage import guard
from zerostage.collectives import Pending
from zerostage.flat import Flat
from zerostage.partition import Partition


class State(Enum):
    AT_REST = "at rest"
    GATHERING = "being gathered"
    GATHERED = "gathered"


class Unit:
    """Flats that are gathered together, and the modules whose forward needs them."""

    def __init__(self, name: str, modules: Sequence[nn.Module]) -> None:
        self.name = name
        self.modules = list(modules)
        self.flats: list[Flat] = []
        self.state = State.GATHERED
        #: gathered from its first use to the end of a forward, and from the start of a backward:
        #: it is used in several places, or apart from its modules
        self.resident = False
        self.pinned = 0  # `gathered` blocks that hold it
        self.on_touch: Any = None
        self._pending: list[Pending] = []

    @property
    def divided(self) -> bool:
        return any(flat.divided for flat in self.flats)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weights."""
        return sum(flat.nbytes for flat in self.flats)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the whole gradients."""
        return sum(flat.layout.numel * flat.grad_dtype.itemsize for flat in self.flats if flat.trainable)

    @property
    def trained(self) -> bool:
        """Whether a parameter of it is to be trained, as of now: parameters may be frozen at any time."""
        return any(parameter.requires_grad for flat in self.flats for parameter in flat.parameters)

    @property
    def frozen(self) -> bool:
        """Whether a parameter of it is not to be trained, as of now."""
        return not all(parameter.requires_grad for flat in self.flats for parameter in flat.parameters)

    def _move(self, before: State, after: State) -> None:
        if self.state is not before:
            raise AssertionError(f"unit {self.name} is {self.state.value}, not {before.value}")
        self.state = after

    def gather(self) -> None:
        """Start to gather a unit that is at rest."""
        self._move(State.AT_REST, State.GATHERING)
        self._pending = [flat.gather() for flat in self.flats]

    def arrive(self) -> None:
        """Wait for the gather that is under way; the parameters have values from here on."""
        for pending in self._pending:
            pending.wait()
        self._pending = []
        self._move(State.GATHERING, State.GATHERED)
        self._show(True)

    def release(self) -> None:
        """Free the whole weights of a gathered unit."""
        self._move(State.GATHERED, State.AT_REST)
        for flat in self.flats:
            flat.release()
        self._show(False)

    def rest(self) -> None:
        """Bring a unit whose values have just been divided to its first rest."""
        if self.divided:
            self.state = State.AT_REST
            self._show(False)

    def _show(self, present: bool) -> None:
        for flat in self.flats:
            for parameter in flat.parameters:
                guard.set_present(parameter, present)

    def touched(self, parameter: str, function: Any) -> None:
        """A weight at rest is about to be used."""
        self.on_touch(self, parameter, function)


def gradients_bound(units: Iterable[Unit], partition: Partition) -> int:
    """The most bytes that gradients in flight may take, besides those that are kept.

    The unit that backward fills (in the kept buffer, where that is whole), and another one with
    the parts received for it.
    """
    largest = max((unit.gradient_bytes for unit in units), default=0)
    return (3 if partition.gradients > 1 else 1) * largest
