"""The plan's table in print."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from zerostage.partition import STAGES


def show(console: Console, plan: dict) -> None:
    """Print what `memory.table` returns: one row per number of ranks, one column per stage."""
    total = plan["total_bytes"]
    unit, size, power = ("GB", 1e9, "1e9") if total >= 1e9 else ("MB", 1e6, "1e6")
    decimals = 0 if total >= 1000 * size else 1

    def number(value: float) -> str:
        return f"{value / size:,.{decimals}f}"

    console.print(
        f"{plan['parameters']:,} parameters x {plan['bytes_per_parameter']} bytes = {number(total)} {unit} of weights, "
        f"gradients and optimizer states (bf16, Adam with fp32 master weights); {unit} = {power} bytes"
    )
    titles = {"total": f"{unit} per rank, without activations", "traffic_per_step": f"{unit} sent per rank and step"}
    for key, title in titles.items():
        grid = Table(title=title, title_justify="left")
        grid.add_column("ranks", justify="right")
        for stage in STAGES:
            grid.add_column(f"stage {stage}", justify="right")
        for ranks in dict.fromkeys(row["ranks"] for row in plan["rows"]):
            grid.add_row(str(ranks), *(number(row[key]) for row in plan["rows"] if row["ranks"] == ranks))
        console.print(grid)
