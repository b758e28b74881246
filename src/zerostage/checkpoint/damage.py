"""A checkpoint that is not whole."""

from __future__ import annotations


class DamagedError(OSError):
    """A checkpoint's file is missing, truncated or altered. The message names the file and what is wrong with it."""
