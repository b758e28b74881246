"""What is said to people: where something that they gave cannot be used, and names in a sentence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class InputError(Exception):
    """Something that the user gave cannot be used; the text is one line that says what and what to do."""


class StrictError(InputError):
    """What runs is not what was configured, and --strict was given; the same on all ranks. Exit code 4."""


def closest(name: str, names: Iterable[str]) -> str:
    """'; did you mean X?' for the name nearest to `name`, or ''."""
    match = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {match[0]}?" if match else ""


def number(name: str, text: str) -> float:
    """A number such as 70.6e9, 7B or 135M. Raises InputError that names `name`."""
    match = re.fullmatch(r"(\d+(?:[._]\d+)*(?:e\+?\d+)?)([kmbt]?)", text.strip().lower())
    value = float(match[1].replace("_", "")) if match and match[1].count(".") <= 1 else 0
    value *= {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2]] if match else 1
    if not 1 <= value < 1e18:
        raise InputError(f"--{name} is {text!r}: give a number such as 70.6e9, 7B or 135M")
    return value


def some(names: Iterable[str], most: int = 3) -> str:
    """The first `most` names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
