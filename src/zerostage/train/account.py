"""The account of a run: bytes per rank and traffic per step, expected beside measured, and the stage they show."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

WHAT = {
    "weights": "weights at rest",
    "gradients": "gradients",
    "master": "master weights",
    "exp_avg": "first moment",
    "exp_avg_sq": "second moment",
    "buffers": "module buffers",
    "gathered": "gathered weights",
    "in_flight": "communication buffers",
}


def unit_for(largest: float) -> tuple[str, float]:
    """The unit that gives `largest` bytes at least two digits: ('GB', 1e9), ('MB', 1e6) or ('kB', 1e3)."""
    for name, size in (("GB", 1e9), ("MB", 1e6)):
        if largest >= 10 * size:
            return name, size
    return "kB", 1e3


def account(ledger: Any, audit: Any, traffic: dict[str, dict[str, int]], ranks: int, stage: int) -> dict[str, Any]:
    """The account as plain values for the metrics file; all sizes are whole bytes of one rank.

    `traffic` has 'expected' and 'measured' bytes and 'calls' of one step, by collective.
    """
    return {
        "ranks": ranks,
        "configured_stage": stage,
        "stage": audit.stage,
        "bytes_per_parameter": dict(audit.bytes_per_parameter),
        "bytes": {
            "expected": {name: int(value) for name, value in ledger.expected.items()},
            "measured": {name: int(value) for name, value in ledger.measured.items()},
            "peak": {name: int(value) for name, value in ledger.peak.items()},
        },
        "traffic": traffic,
    }


def show(console: Console, record: dict[str, Any]) -> None:
    """Print `record` (what `account` returns) as two tables and a sentence; kB, MB and GB are 1e3, 1e6 and 1e9 bytes."""
    sizes, ranks = record["bytes"], record["ranks"]
    console.print(_sizes(sizes, ranks))
    console.print(_traffic(record["traffic"], ranks))
    if record["stage"] == record["configured_stage"]:
        console.print(f"The measured bytes are those of stage {record['stage']}, as configured.")
    elif ranks == 1:
        console.print("On one rank all stages are the same; nothing is divided and nothing is sent.")
    else:
        shown = "no stage" if record["stage"] is None else f"stage {record['stage']}"
        console.print(f"The measured bytes are those of {shown}, but stage {record['configured_stage']} was configured.")


def _sizes(sizes: dict[str, dict[str, int]], ranks: int) -> Table:
    expected, measured = sizes["expected"], sizes["measured"]
    peak = sizes["peak"]
    unit, size = unit_for(max(sum(measured.values()), peak["engine"]))
    table = Table(title=f"Bytes per rank ({ranks} ranks), {unit}", title_justify="left")
    for name in ("term", "expected", "measured"):
        table.add_column(name, justify="left" if name == "term" else "right")
    for term in dict.fromkeys([*expected, *measured]):
        row = [f"{part[term] / size:,.1f}" if term in part else "" for part in (expected, measured)]
        if expected.get(term) or measured.get(term):
            table.add_row(WHAT.get(term, term), *row)
    table.add_section()
    table.add_row("total after a step", *(f"{sum(part.values()) / size:,.1f}" for part in (expected, measured)))
    table.add_row("peak without activations", f"<= {peak['bound'] / size:,.1f}", f"{peak['engine'] / size:,.1f}")
    if "allocated" in peak:
        table.add_row("peak with activations (CUDA)", "", f"{peak['allocated'] / size:,.1f}")
    return table


def _traffic(traffic: dict[str, dict[str, int]], ranks: int) -> Table:
    expected, measured, calls = traffic["expected"], traffic["measured"], traffic["calls"]
    unit, size = unit_for(max([*expected.values(), *measured.values()], default=0))
    table = Table(title=f"Sent per rank and step, {unit}", title_justify="left")
    for name in ("collective", "expected", "measured", "calls"):
        table.add_column(name, justify="left" if name == "collective" else "right")
    for name in dict.fromkeys([*expected, *measured]):
        row = [f"{part[name] / size:,.1f}" if name in part else "" for part in (expected, measured)]
        table.add_row(name.replace("_", "-"), *row, f"{calls.get(name, 0):,}")
    table.add_section()
    table.add_row("total", *(f"{sum(part.values()) / size:,.1f}" for part in (expected, measured)), "")
    return table
