"""What is said where something that the user gave cannot be used."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(Exception):
    """Something that the user gave cannot be used; the text is one line that says what and what to do."""


def closest(name: str, names: Iterable[str]) -> str:
    """'; did you mean X?' for the name nearest to `name`, or ''."""
    match = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {match[0]}?" if match else ""
