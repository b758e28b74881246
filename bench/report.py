"""The bench's figures as a table and a plot."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import floor
from bench.engines import ENGINES

PARAMETERS = 43_790_848


def medians(rounds: list[list[float]]) -> list[float]:
    """The median step of each round."""
    return [statistics.median(seconds) for seconds in rounds]


def ratio(ours: list[list[float]], theirs: list[list[float]]) -> tuple[float, float, float]:
    """Median, least and largest over rounds of ours / theirs."""
    pairs = sorted(a / b for a, b in zip(medians(ours), medians(theirs)))
    return statistics.median(pairs), pairs[0], pairs[-1]


def floors(run: dict[str, Any], stage: int) -> list[float]:
    """The floor of a stage in each round."""
    compute = medians(run["engines"]["compute alone"]["rounds"])
    return [floor.seconds(stage, alone, parts) for alone, parts in zip(compute, run["floor"])]


def rows(run: dict[str, Any]) -> list[dict[str, Any]]:
    """One dict an engine, as printed."""
    found = []
    for name, figures in run["engines"].items():
        stage = ENGINES[name][1]
        row: dict[str, Any] = {"engine": name, "stage": stage, "seconds": statistics.median(medians(figures["rounds"]))}
        row["spread"] = min(medians(figures["rounds"])), max(medians(figures["rounds"]))
        row["peak"], row["at_rest"] = (figures[key] / PARAMETERS for key in ("peak", "at_rest"))
        row["sent"] = sum(figures["sent"].values()) / (2 * PARAMETERS * (run["ranks"] - 1) / run["ranks"])
        row["losses"] = figures["losses"]
        if stage is not None:
            over = sorted(a / b for a, b in zip(medians(figures["rounds"]), floors(run, stage)))
            row["floor"] = statistics.median(over), over[0], over[-1]
        found.append(row)
    return found


def fastest_peer(run: dict[str, Any], stage: int) -> str | None:
    """The fastest engine of the stage that is not zerostage."""
    peers = {
        name: statistics.median(medians(figures["rounds"]))
        for name, figures in run["engines"].items()
        if ENGINES[name][1] == stage and not name.startswith("zerostage")
    }
    return min(peers, key=peers.get) if peers else None


def show(result: dict[str, Any]) -> None:
    console = Console(width=140)
    machine = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if number)
    console.print(f"{machine['command']}\n{machine['cpu']}, {machine['cores']} cores; {machine['system']}; {versions}")
    for run in result["runs"]:
        table = Table(title=f"{run['ranks']} ranks, one thread each; {PARAMETERS:,} parameters", title_justify="left")
        for heading in ("engine", "step, s", "(rounds)", "of its floor", "peak B/param", "at rest B/param", "model sizes sent", "loss"):
            table.add_column(heading, justify="left" if heading == "engine" else "right")
        for row in rows(run):
            table.add_row(
                row["engine"],
                f"{row['seconds']:.3f}",
                f"{row['spread'][0]:.3f} to {row['spread'][1]:.3f}",
                "{:.2f} ({:.2f} to {:.2f})".format(*row["floor"]) if "floor" in row else "",
                f"{row['peak']:.1f}",
                f"{row['at_rest']:.1f}",
                f"{row['sent']:.2f}",
                "{:.4f} to {:.4f}".format(*row["losses"]),
            )
        console.print(table)
        for stage in range(4):
            ours, peer = f"zerostage {stage}", fastest_peer(run, stage)
            if ours in run["engines"] and peer:
                found = ratio(run["engines"][ours]["rounds"], run["engines"][peer]["rounds"])
                console.print("{} takes {:.2f} ({:.2f} to {:.2f}) of {}'s step".format(ours, *found, peer))


def plot(result: dict[str, Any], path: Path) -> None:
    """Step time and peak bytes of every engine, one panel a number of ranks each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(result["runs"]), 2, figsize=(12, 5 * len(result["runs"])), squeeze=False)
    for (left, right), run in zip(axes, result["runs"]):
        found = rows(run)[::-1]
        names = [row["engine"] for row in found]
        colours = ["tab:orange" if name.startswith("zerostage") else "tab:blue" for name in names]
        spread = [[row["seconds"] - row["spread"][0] for row in found], [row["spread"][1] - row["seconds"] for row in found]]
        left.barh(names, [row["seconds"] for row in found], xerr=spread, color=colours)
        left.set_xlabel(f"seconds a step, {run['ranks']} ranks (median and range of rounds)")
        right.barh(names, [row["peak"] for row in found], color=colours)
        right.set_xlabel("peak bytes per parameter and rank, activations included")
        right.set_yticklabels([])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
