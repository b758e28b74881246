"""Memory readings as people write them, '157GB' or '81234MiB', and sizes as they are printed. GB = 1e9 bytes, GiB = 2^30."""

from __future__ import annotations

import re

from pydantic import Field

from zerostage.mistakes import InputError, closest
from zerostage.planning.schema import Answer

UNITS = {
    "b": 1, "byte": 1, "bytes": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


class Used(Answer):
    """One rank's reading, with what its rounding leaves open: '157GB' is 156.5e9 to 157.5e9 bytes."""

    bytes: int
    low: int = Field(description="with its rounding, from here ...")
    high: int = Field(description="... to here")
    name: str = Field("", description="'rank 3', or 'GPU 0 (process 4711)'")


def parse(text: str) -> list[Used]:
    """Readings such as '157GB', '146.2 GiB', '81234MiB', '157000000000' or '150,151,150GB' (one a rank, in one unit).

    Raises InputError for anything else, also for a unit that could be two things.
    """
    found = [re.fullmatch(r"(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([A-Za-z]*)", part.strip()) for part in text.split(",")]
    give = "give for example 157GB (1e9 bytes), 146GiB (2^30), 149000MiB or whole bytes, with commas between ranks"
    if not all(found):
        raise InputError(f"--used is {text!r}: {give}")
    units = {match[2] for match in found if match[2]}
    if len({unit.lower() for unit in units}) > 1:
        raise InputError(f"--used mixes {' and '.join(sorted(units))}: give all ranks in one unit")
    unit = units.pop() if units else ""
    if unit and (unit.lower() not in UNITS or re.fullmatch("[kKMGT]b", unit)):
        bits = " (a small b is a bit)" if unit.lower() in UNITS else closest(unit, ("GB", "GiB", "MiB", "bytes"))
        raise InputError(f"--used has the unit {unit!r}{bits}; {give}")
    factor, readings = UNITS[unit.lower() or "b"], []
    for match in found:
        value = float(match[1])
        if not 10**6 <= value * factor < 10**15:
            hint = "is it in GB? " if not unit else ""
            raise InputError(f"--used has {match[0].strip()!r}, which is no memory of a rank: {hint}{give}")
        half = 0.0 if factor == 1 else factor * half_a_digit(match[1])
        readings.append(Used(bytes=round(value * factor), low=round(value * factor - half), high=round(value * factor + half)))
    return readings


def half_a_digit(text: str) -> float:
    """Half a unit of the last digit of '157', '70.6' or '70.6e9'."""
    mantissa, _, power = text.lower().partition("e")
    return 0.5 * 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))


def size(value: int, signed: bool = False) -> str:
    """In GB = 1e9 bytes, small ones in MB = 1e6."""
    sign = "+" if signed else ""
    return f"{value / 1e9:{sign},.1f} GB" if abs(value) >= 1e9 else f"{value / 1e6:{sign},.0f} MB"
