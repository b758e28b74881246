"""The rank processes of a command that a test has started."""

from __future__ import annotations

import os


def ranks_of(launcher):
    """The process ids of the ranks that `launcher` started, by rank, once they are there."""
    found = {}
    for process in os.listdir("/proc"):
        try:
            with open(f"/proc/{process}/environ", "rb") as file:
                values = dict(part.split(b"=", 1) for part in file.read().split(b"\0") if b"=" in part)
            if int(values[b"ZEROSTAGE_PARENT"]) == launcher:
                found[int(values[b"RANK"])] = int(process)
        except (OSError, KeyError, ValueError):
            continue
    return found
