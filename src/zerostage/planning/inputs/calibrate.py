"""Measure what a step's time follows from, where it will run: `zerostage calibrate`.

Matrix products, a copy in memory, and the very collectives that the engine uses (`collectives.Team`), over gloo or NCCL,
at several message sizes. The planner reads the file in place of its tables of cards and links.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from zerostage.mistakes import InputError
from zerostage.train import launch

VERSION = 1
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
#: Bytes of the gathered buffer, by device.
MESSAGES = {"cpu": [2**n for n in range(16, 27, 2)], "cuda": [2**n for n in range(16, 31, 2)]}
#: Rows of square matrices.
PRODUCTS = {"cpu": (512, 1024, 2048), "cuda": (2048, 4096, 8192, 16384)}
COPY = {"cpu": 2**26, "cuda": 2**30}  # bytes: far beyond any cache
#: Shares of the time that is given. What remains is for starting.
COMPUTE_SHARE, COPY_SHARE, MESSAGES_SHARE = 0.25, 0.05, 0.6
FEWEST, MOST = 3, 20  # repetitions of which the median is taken


def calibrate(ranks: int, device: str, out: str | Path, seconds: float = 10.0) -> int:
    """Measure on `ranks` processes of this machine, or as a rank of the job that is there, and write JSON to `out`.

    `device` is 'cpu' or 'cuda'; `seconds` is about how long it may take, beside the start of the processes. Returns the
    exit code: 0, or 1 after a rank failed (as `launch.start` reports it). Raises InputError for what cannot be measured.

    The file: `version`, `device`, `memory_bytes` (of the card, or of the machine for the CPU), `flops_reached` and
    `memory_bytes_per_s` (read and written) of one rank while all work, `dtype` of the products, `world`,
    `ranks_per_node`, `backend`, `collectives`: for each of all_gather, reduce_scatter and all_reduce a list of
    [bytes of the whole buffer, seconds of the slowest rank, median], `spread` with [least, most] of each, `torch`, `when`.
    """
    out = Path(out).absolute()
    joined = launch.place(os.environ)
    _check(ranks, device, out, seconds, joined)
    if joined or ranks == 1:
        return launch.run_rank(measure, device, out, seconds)
    command = [sys.executable, "-m", "zerostage.planning.inputs.calibrate", device, str(out), str(seconds)]
    return launch.start(command, ranks, device)


def command(ranks: int | None, device: str | None, out: str, seconds: float) -> int:
    """The body of `zerostage calibrate`: fills in the device and one rank per card (two on the CPU), and shows the file."""
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if ranks is None:
        ranks = 2 if device == "cpu" else launch.default_ranks(device)
    code = calibrate(ranks, device, out, seconds)
    if code == 0 and os.environ.get("RANK", "0") == "0":
        show(json.loads(Path(out).read_text(encoding="utf-8")), out)
    return code


def show(found: dict[str, Any], path: str) -> None:
    """Print what was measured."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    ranks = "1 rank" if found["world"] == 1 else f"{found['world']} ranks over {found['backend']}"
    console.print(
        f"{found['device']}, {ranks}: matrix products {found['flops_reached'] / 1e12:.3g} "
        f"TFLOP/s per rank in {found['dtype']}, copies {found['memory_bytes_per_s'] / 1e9:.3g} GB/s",
        soft_wrap=True,
    )
    if found["world"] > 1:
        table = Table("whole buffer", *(f"{name.replace('_', '-')}\nms, GB/s" for name in COLLECTIVES), box=None)
        for column in table.columns:
            column.justify = "right"
        for points in zip(*(found["collectives"][name] for name in COLLECTIVES)):
            cells = (f"{time_s * 1e3:.3g}, {size / time_s / 1e9:.3g}" for size, time_s in points)
            table.add_row(f"{points[0][0] / 2**20:.4g} MiB", *cells)
        console.print(table)
    console.print(f"written to {path}", soft_wrap=True)


def measure(device: str, out: Path, seconds: float) -> None:
    """Measure as one rank of the world that the environment describes; rank 0 writes `out`."""
    import torch
    import torch.distributed as dist

    from zerostage.collectives import World
    from zerostage.partition import Partition

    place = torch.device(device, int(os.environ.get("LOCAL_RANK", "0")) if device == "cuda" else None)
    if device == "cuda":
        torch.cuda.set_device(place)
    world = World(None, None, place, lambda n: Partition.from_stage(3, n))
    flops, dtype = _products(world, seconds * COMPUTE_SHARE)
    copied = _copy(world, seconds * COPY_SHARE)
    points, spread = _messages(world, seconds * MESSAGES_SHARE)
    name = torch.cuda.get_device_name(place) if device == "cuda" else "cpu"
    memory = torch.cuda.get_device_properties(place).total_memory if device == "cuda" else memory_of_machine()
    found = {
        "version": VERSION,
        "device": name,
        "memory_bytes": memory,
        "flops_reached": flops,
        "memory_bytes_per_s": copied,
        "dtype": dtype,
        "world": world.size,
        "ranks_per_node": int(os.environ.get("LOCAL_WORLD_SIZE", world.size)),
        "backend": dist.get_backend() if world.size > 1 else "none",
        "collectives": points,
        "spread": spread,
        "torch": torch.__version__,
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if world.rank == 0:
        part = out.with_name(out.name + ".part")
        part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        part.replace(out)  # a reader never finds half a file
    world.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _products(world: Any, seconds: float) -> tuple[float, str]:
    """FLOP/s of the slowest rank at the size that is best, and the dtype: bf16 unless another is clearly faster."""
    import torch

    sizes = PRODUCTS[world.device.type]
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if world.device.type == "cpu":
        del names["fp16"]

    def rate(dtype: torch.dtype, rows: int, share: float) -> float:
        a, b = (torch.randn(rows, rows, device=world.device).to(dtype) for _ in range(2))
        c = torch.empty_like(a)
        times, _ = _times(world, lambda: torch.mm(a, b, out=c), share)
        return 2 * rows**3 / statistics.median(times)

    rates = {name: rate(dtype, sizes[0], seconds / 12) for name, dtype in names.items()}
    dtype = max(rates, key=lambda name: rates[name] * (1.1 if name == "bf16" else 1))
    best, spent = rates[dtype], 0.0
    for rows in sizes[1:]:
        # agreed upon: `best` is the same on all ranks
        expected = 2 * rows**3 / best * (FEWEST + 1)
        if spent + expected > seconds:
            break
        started = time.perf_counter()
        best = max(best, rate(names[dtype], rows, seconds / 4))
        spent = _agree(world, spent + time.perf_counter() - started)
    return best, dtype


def _copy(world: Any, seconds: float) -> float:
    """Bytes read and written per second by a copy on the slowest rank."""
    import torch

    source = torch.zeros(COPY[world.device.type], dtype=torch.uint8, device=world.device)
    target = torch.ones_like(source)
    times, _ = _times(world, lambda: target.copy_(source), seconds)
    return 2 * source.nbytes / statistics.median(times)


def _messages(world: Any, seconds: float) -> tuple[dict[str, list], dict[str, list]]:
    """Per collective [bytes, median seconds] and [least, most] at each message size that the time allows."""
    import torch

    from zerostage.collectives import tree_sum

    points: dict[str, list] = {name: [] for name in COLLECTIVES}
    spread: dict[str, list] = {name: [] for name in COLLECTIVES}
    if world.size == 1:
        return points, spread
    team, sizes, spent = world.teams[0], MESSAGES[world.device.type], 0.0
    for number, size in enumerate(sizes):
        part = size // 2 // world.size  # elements of one rank's part
        buffer = torch.zeros(part * world.size, dtype=torch.bfloat16, device=world.device)
        own = torch.empty(part, dtype=torch.bfloat16, device=world.device)

        def gather() -> None:
            team.gather(buffer, "calibration", 1).wait()

        def reduce() -> None:
            pending, parts = team.exchange(buffer, "calibration", 1)
            pending.wait()
            tree_sum(parts, own, divisor=world.size)

        def both() -> None:
            reduce()
            gather()

        share = (seconds - spent) / (len(sizes) - number) / len(COLLECTIVES)
        started = time.perf_counter()
        for name, call in zip(COLLECTIVES, (gather, reduce, both)):
            times, (least, most) = _times(world, call, share)
            points[name].append([buffer.nbytes, statistics.median(times)])
            spread[name].append([least, most])
        spent = _agree(world, spent + time.perf_counter() - started)
        # the next size is four times as large; what it takes at least is the same on all ranks
        if spent + 4 * (FEWEST + 2) * sum(points[name][-1][1] for name in COLLECTIVES) > 1.5 * seconds:
            break
    return points, spread


def _times(world: Any, call: Callable[[], Any], seconds: float) -> tuple[list[float], tuple[float, float]]:
    """Seconds that `call` took on the slowest rank, repetition by repetition, with their least and most.

    All ranks begin each repetition together and make the same number of them.
    """
    _once(world, call)  # with what is set up once
    started = time.perf_counter()
    _once(world, call)
    one = _agree(world, time.perf_counter() - started)
    count = max(FEWEST, min(MOST, int(seconds / one) - 2))
    own = [_once(world, call) for _ in range(count)]
    slowest = [max(times) for times in zip(*world.collect_objects(own, "calibration times"))]
    return slowest, (min(slowest), max(slowest))


def _once(world: Any, call: Callable[[], Any]) -> float:
    import torch

    on_card = world.device.type == "cuda"
    if on_card:
        torch.cuda.synchronize()
    _agree(world, 0.0)
    started = time.perf_counter()
    call()
    if on_card:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _agree(world: Any, value: float) -> float:
    """The largest of all ranks' values, the same on all."""
    import torch

    return float(world.maximum(torch.tensor([value], dtype=torch.float64), "calibration"))


def memory_of_machine() -> int:
    """Bytes of RAM that this process may use: the machine's, or its container's where that is less."""
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        import psutil

        size = psutil.virtual_memory().total
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = "max"
    return min(size, int(limit)) if limit.isdecimal() else size


def _check(ranks: int, device: str, out: Path, seconds: float, joined: bool) -> None:
    if device not in MESSAGES:
        raise InputError(f"--device is {device!r}; it must be cpu or cuda")
    if ranks < 1:
        raise InputError(f"--ranks is {ranks}; it must be 1 or more")
    if not 1 <= seconds <= 3600:
        raise InputError(f"--seconds is {seconds:g}; give 1 to 3600 seconds")
    if not out.parent.is_dir() or out.is_dir():
        raise InputError(f"--out is {out}: {'that is a folder' if out.is_dir() else f'there is no folder {out.parent}'}")
    if device == "cuda":
        import torch

        cards = torch.cuda.device_count()
        if cards == 0:
            raise InputError("--device is cuda, but torch sees no card here; use --device cpu")
        if not joined and ranks > cards:
            raise InputError(f"--ranks is {ranks}, but there are {cards} cards here; NCCL needs one for each rank")


if __name__ == "__main__":
    launch.quiet_interrupt()
    sys.exit(launch.run_rank(measure, sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])))
