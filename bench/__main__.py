"""python -m bench: every engine on the same work, in interleaved rounds; tables, a JSON file and a plot.

Each measurement runs in fresh processes, one thread each. In a round every engine is timed
once, so that what else the machine does falls on all alike; ratios are formed within rounds.
After that: a trace of a step at each stage, cost as the work grows (scaling.py), and prefetch
on a slow network (network.py).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import queue
import shlex
import socket
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench import network, rank, report, scaling, task
from bench.engines import ENGINES
from zerostage.tracing import Trace


def measure(engine: str, ranks: int, kind: str, steps: int = 0, timeout: float = 300) -> list[Any]:
    """Every rank's figures, in rank order. Raises RuntimeError when a rank ends without any."""
    context = multiprocessing.get_context("forkserver")  # each process is new, its imports are there
    context.set_forkserver_preload(["bench.rank", "transformers.models.llama.modeling_llama", "zerostage.engine"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results: Any = context.Queue()
    processes = [
        context.Process(target=rank.run, args=(r, ranks, port, engine, kind, steps, results)) for r in range(ranks)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(found) < ranks:
            try:
                number, found[number] = results.get(timeout=0.5)
                if isinstance(found[number], str):
                    raise RuntimeError(f"{engine} ({kind}, {ranks} ranks): rank {number}: {found[number]}")
            except queue.Empty:
                failed = [process.exitcode for process in processes if process.exitcode]
                if failed or time.monotonic() > deadline:
                    why = f"a rank ended with code {failed[0]}" if failed else f"no result within {timeout:.0f} s"
                    raise RuntimeError(f"{engine} ({kind}, {ranks} ranks): {why}") from None
        return [found[number] for number in range(ranks)]
    finally:
        for process in processes:
            process.join(5 if len(found) == ranks else 0)
            process.kill()


def bench(ranks: int, engines: list[str], rounds: int, steps: int, out: Path) -> dict[str, Any]:
    """All figures of one number of ranks; see report.py for what they are."""
    found: dict[str, Any] = {"ranks": ranks, "floor": [], "engines": {name: {"rounds": []} for name in engines}}
    for round_ in range(rounds):
        found["floor"].append(measure("", ranks, "floor")[0])
        for name in engines:
            # a step is over when the last rank is
            by_rank = measure(name, ranks, "time", steps)
            slowest = [max(times) for times in zip(*(figures["seconds"] for figures in by_rank))]
            found["engines"][name]["rounds"].append(slowest)
            losses = [sum(values) / ranks for values in zip(*(figures["losses"] for figures in by_rank))]
            found["engines"][name]["losses"] = [losses[0], losses[-1]]
            print(f"{ranks} ranks, round {round_ + 1}/{rounds}: {name} {sorted(slowest)[len(slowest) // 2]:.3f} s", flush=True)
    for name in engines:
        held = measure(name, ranks, "bytes")
        found["engines"][name] |= {key: max(figures[key] for figures in held) for key in held[0] if key != "sent"}
        found["engines"][name]["sent"] = held[-1]["sent"]
        print(f"{ranks} ranks: {name} {held[0]['peak'] / 1e6:,.0f} MB at most", flush=True)
        if name.startswith("zerostage"):
            trace = Trace(measure(name, ranks, "trace")[0])  # every rank has all of them
            trace.save(out / f"trace-{name[-1]}-of-{ranks}.json")
            found["engines"][name]["split"] = trace.split()
    return found


def machine() -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    versions = {}
    for package in ("torch", "transformers", "deepspeed", "zerostage"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return {
        "command": shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default: 2,4)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each engine is timed")
    parser.add_argument("--steps", type=int, default=6, help="timed steps a round")
    parser.add_argument("--engines", default="", help="only those whose names hold one of these, separated by commas")
    parser.add_argument("--only", default="engines,scaling,network", help="the parts to run")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for bench.json and bench.png")
    options = parser.parse_args()
    wanted = [part.strip().lower() for part in options.engines.split(",") if part.strip()]
    engines = [name for name in ENGINES if not wanted or name == "compute alone" or any(w in name.lower() for w in wanted)]
    # what libraries print in every rank would bury the tables
    os.environ.update(PYTHONWARNINGS="ignore", KINETO_LOG_LEVEL="99", DS_LOG_LEVEL="error")
    parts = options.only.split(",")
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"machine": machine(), "task": task.describe(), "runs": []}
    for ranks in map(int, options.ranks.split(",")) if "engines" in parts else ():
        result["runs"].append(bench(ranks, engines, options.rounds, options.steps, options.out))
        (options.out / "bench.json").write_text(json.dumps(result, indent=1))
    if "scaling" in parts:
        result["scaling"] = scaling.measure()
    if "network" in parts:
        try:
            result["network"] = network.measure()
        except RuntimeError as error:  # no right to make network namespaces, for example
            result["network"] = {"not measured": str(error)}
    (options.out / "bench.json").write_text(json.dumps(result, indent=1))
    report.show(result)
    if result["runs"]:
        report.plot(result, options.out / "bench.png")
    print(f"wrote {options.out}/bench.json" + (", bench.png and the traces" if result["runs"] else ""))


if __name__ == "__main__":
    main()
