"""What a checkpoint offers to whoever reads it, whichever program wrote it.

Everything is asked for by parameter name and interval: elements [start, stop) of the flattened
parameter. So a reader never holds more than it asked for, and no reader knows how the writer
had divided anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

#: The terms that are not the optimizer's; averages are 'average.0' and so on, one for each `zerostage.EMA`.
WEIGHTS, MASTER, AVERAGE = "weights", "master", "average."


@dataclass(frozen=True)
class Stored:
    """What a checkpoint has of one parameter.

    terms: dtype of each stored term of the parameter's shape: 'weights', 'master' and the
        optimizer's ('exp_avg', ...). At least one of the first two is there.
    scalars: the optimizer's other entries ('step': a 0-dimensional tensor). Without optimizer
        state it is empty, as `states` is.
    source: the dtype of the values from which the weights were made; an export has it by default.
    """

    shape: tuple[int, ...]
    terms: dict[str, torch.dtype]
    scalars: dict[str, Any] = field(default_factory=dict)
    source: torch.dtype = torch.float32
    trainable: bool = True

    @property
    def states(self) -> list[str]:
        """The optimizer's terms."""
        return [term for term in self.terms if term not in (WEIGHTS, MASTER) and not term.startswith(AVERAGE)]


class Piece(NamedTuple):
    """A request: elements [start, stop) of the flattened parameter `name`, to be copied (and cast) into `out`."""

    name: str
    start: int
    stop: int
    out: torch.Tensor  # one-dimensional, stop - start elements, any dtype and device


class Source(ABC):
    """A checkpoint that is open for reading, as one process; every rank opens its own.

    what: in a few words, for messages ('a DeepSpeed ZeRO-3 checkpoint of 4 ranks').
    parameters: by name; a parameter that modules share is there under each name that is known.
    names: the first name of each parameter, in order (a subset of `parameters`).
    optimizer: the class name of the optimizer, '' where unknown, None where there is no state.
    groups: the optimizer's parameter groups, as in `param_groups`, with 'names' in the place
        of 'params'; None where they are not stored.
    """

    what: str
    parameters: dict[str, Stored]
    names: list[str]
    optimizer: str | None = None
    groups: list[dict[str, Any]] | None = None

    @abstractmethod
    def read(self, term: str, pieces: Sequence[Piece]) -> None:
        """Fill each piece's `out` with its part of `term`. Only those bytes are read, and no more held than a piece has."""

    def buffers(self) -> dict[str, torch.Tensor]:
        """Module buffers by name, on the CPU."""
        return {}

    def extra(self) -> Any:
        """What the user stored beside; None where there is nothing."""
        return None
