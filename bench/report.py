"""The bench's figures as a table and a plot."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import floor, network, scaling
from bench.engines import ENGINES, FUSED
from zerostage.tracing import ROWS


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


def rows(run: dict[str, Any], parameters: int) -> list[dict[str, Any]]:
    """One dict an engine, as printed."""
    found = []
    alone = run["engines"]["compute alone"]
    activations = alone["peak"] - alone["at_rest"]
    for name, figures in run["engines"].items():
        stage = ENGINES[name][1]
        row: dict[str, Any] = {"engine": name, "stage": stage, "seconds": statistics.median(medians(figures["rounds"]))}
        row["spread"] = min(medians(figures["rounds"])), max(medians(figures["rounds"]))
        row["peak"], row["at_rest"] = (figures[key] / parameters for key in ("peak", "at_rest"))
        row["sent"] = sum(figures["sent"].values()) / (2 * parameters * (run["ranks"] - 1) / run["ranks"])
        row["losses"] = figures["losses"]
        if "bound" in figures:
            row["bound"] = (figures["bound"] + activations) / parameters
        if stage is not None:
            over = sorted(a / b for a, b in zip(medians(figures["rounds"]), floors(run, stage)))
            row["floor"] = statistics.median(over), over[0], over[-1]
        found.append(row)
    return found


def fastest_peer(run: dict[str, Any], stage: int, fused: bool) -> str | None:
    """The fastest engine of the stage that is not zerostage, with or without those for which the fused AdamW was asked for."""
    peers = {
        name: statistics.median(medians(figures["rounds"]))
        for name, figures in run["engines"].items()
        if ENGINES[name][1] == stage and not name.startswith("zerostage") and (fused or not name.endswith(FUSED))
    }
    return min(peers, key=peers.get) if peers else None


def show(result: dict[str, Any]) -> None:
    """Print everything that was measured."""
    console = Console(width=140, highlight=False)
    machine = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if number)
    console.print(f"{machine['command']}\n{machine['cpu']}, {machine['cores']} cores; {machine['system']}; {versions}")
    for run in result["runs"]:
        _show_engines(console, run, result["task"]["parameters"])
        for stage in range(4):
            _show_ratios(console, run, stage)
        _show_splits(console, run)
    if "scaling" in result:
        scaling.show(result["scaling"])
    if "network" in result:
        network.show(result["network"])


def _show_engines(console: Console, run: dict[str, Any], parameters: int) -> None:
    console.print(
        f"\n{run['ranks']} ranks, one thread each; {parameters:,} parameters. Seconds a step and their ratio to the floor of the "
        "stage: median (range of rounds). Bytes per parameter and rank: at most, zerostage's bound for that, at rest after "
        "zero_grad. Model sizes of 2 bytes per parameter sent, in units of (n-1)/n. Loss of the first and last step."
    )
    table = Table()
    for heading in ("engine", "step, s", "/ floor", "peak", "bound", "at rest", "sent", "loss"):
        table.add_column(heading, justify="left" if heading == "engine" else "right", no_wrap=True)
    for row in rows(run, parameters):
        table.add_row(
            row["engine"],
            f"{row['seconds']:.3f} ({row['spread'][0]:.3f} to {row['spread'][1]:.3f})",
            "{:.2f} ({:.2f} to {:.2f})".format(*row["floor"]) if "floor" in row else "",
            f"{row['peak']:.2f}",
            f"{row['bound']:.2f}" if "bound" in row else "",
            f"{row['at_rest']:.2f}",
            f"{row['sent']:.2f}",
            "{:.4f} to {:.4f}".format(*row["losses"]),
        )
    console.print(table)


def _show_ratios(console: Console, run: dict[str, Any], stage: int) -> None:
    ours = f"zerostage {stage}"
    peers = dict.fromkeys(peer for fused in (False, True) if (peer := fastest_peer(run, stage, fused)))
    if ours not in run["engines"]:
        return
    floor_ = statistics.median(floors(run, stage))
    console.print(f"stage {stage}: floor {floor_:.3f} s", end="")
    for peer in peers:
        found = ratio(run["engines"][ours]["rounds"], run["engines"][peer]["rounds"])
        console.print("; {:.2f} ({:.2f} to {:.2f}) of {}'s step".format(*found, peer), end="")
    console.print()


def _show_splits(console: Console, run: dict[str, Any]) -> None:
    splits = {name: figures["split"] for name, figures in run["engines"].items() if "split" in figures}
    if not splits:
        return
    table = Table(title="where one step's time goes, ms (mean of ranks)", title_justify="left")
    table.add_column("")
    for name in splits:
        table.add_column(name, justify="right")
    for kind, label in ROWS.items():
        table.add_row(label, *(f"{1e3 * statistics.mean(rank[kind] for rank in split):.1f}" for split in splits.values()))
    console.print(table)


def plot(result: dict[str, Any], path: Path) -> None:
    """Step time and peak bytes of every engine, one panel a number of ranks each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(result["runs"]), 2, figsize=(12, 5 * len(result["runs"])), squeeze=False)
    for (left, right), run in zip(axes, result["runs"]):
        found = rows(run, result["task"]["parameters"])[::-1]
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
