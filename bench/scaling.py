"""python -m bench.scaling: what the engine costs as the work grows: with more units, and with more ranks than there are cores.

Two measurements, both beside the same model's plain bf16 forward and backward in the same process:

- units: models of more and more equal blocks on two real ranks over gloo at stage 3. What a step
  takes beyond plain compute, divided by the number of units, should not depend on how many there are.
- worlds: one rank of 8 to 1024, whose peers are torch's fake process group. Its collectives copy
  this rank's own values and return at once, so what is left is the engine's own work, and the
  copying, a call a rank in each collective. Bytes per rank should be the stage's formula, and
  nothing else should grow with the ranks.

Seconds come by the clock and as CPU time of all threads of the process. The latter leaves out
what other programs on the machine take, and waits for the other rank.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from bench import engines, task

UNITS = (12, 32, 64, 128)
WORLDS = (8, 64, 512, 1024)
STAGES = (1, 2, 3)
#: Blocks of 46,000 parameters: so little to compute and to send that the engine's own time shows.
NARROW = dict(hidden_size=64, intermediate_size=176, num_attention_heads=4, num_key_value_heads=2, vocab_size=256)
#: 13.9M parameters in five large units: each is padded to 64 elements a rank, at 1024 ranks to 65,536, up to 2.3% of all.
WIDE = dict(num_hidden_layers=4, vocab_size=2048)
#: Bytes per parameter and rank, without padding.
FORMULA = {1: lambda n: 4 + 12 / n, 2: lambda n: 2 + 14 / n, 3: lambda n: 16 / n}
WARM_UP = 3
CLOCKS: dict[str, Callable[[], float]] = {"clock": time.perf_counter, "cpu": time.process_time}


def _run_steps(step: engines.Step, batch: dict[str, torch.Tensor], steps: int = WARM_UP) -> dict[str, float]:
    """Seconds of the fastest step by each clock: where a core was taken away, that is not the engine's time."""
    found = []
    for _ in range(steps):
        began = [now() for now in CLOCKS.values()]
        step(batch)
        found.append([now() - start for now, start in zip(CLOCKS.values(), began)])
    return dict(zip(CLOCKS, map(min, zip(*found))))


def beyond(figures: dict[str, Any], clock: str = "cpu") -> list[float]:
    """Seconds of a step beyond plain compute, by round."""
    return [step[clock] - alone[clock] for step, alone in zip(figures["step"], figures["compute"])]


def _batch(vocabulary: int) -> dict[str, torch.Tensor]:
    """Few tokens, int64 [2, 16]: compute is not what is to be measured."""
    tokens = torch.randint(vocabulary, (2, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def units(counts: tuple[int, ...] = UNITS, rounds: int = 5, steps: int = 3) -> dict[int, dict[str, Any]]:
    """On each rank of a group, by number of blocks: the number of units, and seconds of a step at stage 3 and of compute.

    All models are there from the start and take turns, so that what else the machine does falls on all alike.
    """
    import zerostage

    batch = _batch(NARROW["vocab_size"])
    found: dict[int, dict[str, Any]] = {}
    runs = []
    for count in counts:
        alone, model = (task.model(**NARROW, num_hidden_layers=count) for _ in range(2))
        found[count] = {"compute": [], "step": []}
        runs.append((found[count]["compute"], engines.compute(alone)))
        runs.append((found[count]["step"], engines.zerostage(model, 3)))
        found[count]["units"] = len(zerostage.engine.engine_of(model).units)
    for _, step in runs:
        _run_steps(step, batch)
    for _ in range(rounds):
        for seconds, step in runs:
            dist.barrier()
            seconds.append(_run_steps(step, batch, steps))
    return found


def world(ranks: int, stages: tuple[int, ...] = STAGES, rounds: int = 5, shape: dict[str, int] = WIDE) -> dict[int, dict[str, Any]]:
    """Rank 0 of `ranks` with fake peers, by stage: seconds to shard, of the first step and of later ones, and bytes.

    'expected' and 'measured' are the engine's account by term while there are gradients, 'walked'
    all live tensors' storages, 'passing' the most that is gathered and in flight.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import zerostage

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    batch = _batch(shape["vocab_size"])
    alone = engines.compute(task.model(**shape))
    _run_steps(alone, batch)
    found = {}
    for stage in stages:
        before = _live()
        model = task.model(**shape)
        figures: dict[str, Any] = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
        began = time.process_time()
        step = engines.zerostage(model, stage)
        figures["shard"] = time.process_time() - began
        figures["first"] = _run_steps(step, batch, 1)["cpu"]
        _run_steps(step, batch)
        figures["step"], figures["compute"] = [], []
        for _ in range(rounds):
            figures["step"].append(_run_steps(step, batch, 1))
            figures["compute"].append(_run_steps(alone, batch, 1))
        model(**batch).loss.backward()
        ledger, optimizer = zerostage.memory(model), zerostage.engine.engine_of(model).driver.optimizer
        figures["expected"], figures["measured"] = ledger.expected, ledger.measured
        figures["passing"] = ledger.peak["gathered"] + ledger.peak["in_flight"]
        scalars = 4 * len(optimizer.state)  # Adam counts steps in one fp32 number for each parameter
        figures["walked"] = sum(size for key, size in _live().items() if key not in before) - scalars
        figures["skipped"] = optimizer.skipped_steps
        zerostage.close(model)
        del model, optimizer, step, ledger
        found[stage] = figures
    dist.destroy_process_group()
    return found


def _live() -> dict[int, int]:
    """Bytes by identity of every storage that a live tensor views: a count that knows nothing of the engine."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                storage = thing.untyped_storage()
                found[storage._cdata] = storage.nbytes()
    return found


def _run(results: Any, rank: int, ranks: int, port: int, function: Callable[..., Any], *arguments: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    if port:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    results.put((rank, function(*arguments)))
    if port:
        dist.barrier()
        dist.destroy_process_group()


def _spawn(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Each rank's result, from fresh processes of one thread; with more than one rank they form a gloo group."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1] if ranks > 1 else 0
    processes = [context.Process(target=_run, args=(results, r, ranks, port, function, *arguments)) for r in range(ranks)]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=150) for _ in processes)
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    return [found[rank] for rank in range(ranks)]


def measure() -> dict[str, Any]:
    """All figures of rank 0, as plain values: seconds, and whole numbers of bytes. Keys are text, as in JSON."""
    worlds = {str(ranks): {str(s): figures for s, figures in _spawn(1, world, ranks)[0].items()} for ranks in WORLDS}
    return {"units": {str(count): figures for count, figures in _spawn(2, units)[0].items()}, "worlds": worlds}


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _spread(values: list[float]) -> str:
    """Median, least and largest, in ms."""
    return "{:.2f} ({:.2f} to {:.2f})".format(*(1e3 * f(values) for f in (statistics.median, min, max)))


def show(found: dict[str, Any]) -> None:
    console = Console(width=140)
    table = _table("Beyond plain compute, 2 ranks, stage 3: ms a unit", "units", "by the clock", "CPU time", "step, ms", "compute, ms")
    for figures in found["units"].values():
        each = ([seconds / figures["units"] for seconds in beyond(figures, clock)] for clock in CLOCKS)
        whole = (_spread([seconds["clock"] for seconds in figures[kind]]) for kind in ("step", "compute"))
        table.add_row(str(figures["units"]), *map(_spread, each), *whole)
    console.print(table)

    headings = ("ranks", "stage", "beyond compute, CPU ms", "first step", "shard", "bytes/param", "formula", "padding", "walked", "passing, MB")
    table = _table("One rank of many, the others fake; times in ms of CPU", *headings)
    for ranks, stages in found["worlds"].items():
        for stage, figures in stages.items():
            parameters, held = figures["parameters"], sum(figures["measured"].values())
            formula = FORMULA[int(stage)](int(ranks))
            table.add_row(
                ranks, stage, _spread(beyond(figures)), f"{1e3 * figures['first']:.0f}", f"{1e3 * figures['shard']:.0f}",
                f"{held / parameters:.4f}", f"{formula:.4f}", f"{held / parameters / formula - 1:.2%}",
                "the same" if figures["walked"] == held == sum(figures["expected"].values()) else f"{figures['walked']:,}",
                f"{figures['passing'] / 1e6:.1f}",
            )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    show(measure())
