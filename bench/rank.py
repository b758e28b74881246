"""What one rank process does for one measurement of one engine."""

from __future__ import annotations

import bisect
import gc
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from bench import floor, task
from bench.engines import ENGINES, Step

WARM_UP = 3


def run(rank: int, ranks: int, port: int, engine: str, kind: str, steps: int, results: Any) -> None:
    """Join the group and send (rank, figures) of one measurement: 'time', 'bytes', 'trace' or 'floor'.

    A measurement that fails sends the exception's text.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        if kind == "floor":
            figures = floor.measure(rank, ranks)
        else:
            figures = {"time": times, "bytes": held, "trace": trace}[kind](rank, engine, steps)
        results.put((rank, figures))
        dist.barrier()
    except Exception as error:
        results.put((rank, f"{type(error).__name__}: {error}"))
    results.close()
    results.join_thread()
    os._exit(0)  # some engines' threads and destructors wait for ever


def warmed_up(rank: int, engine: str) -> tuple[nn.Module, Step]:
    """A model, and its step after WARM_UP of them."""
    model = task.model()
    step = ENGINES[engine][0](model)
    for number in range(WARM_UP):
        step(task.batch(rank, number))
    return model, step


def times(rank: int, engine: str, steps: int) -> dict[str, Any]:
    """Seconds of each step after a warm-up, and all losses."""
    step = ENGINES[engine][0](task.model())
    losses, seconds = [], []
    for number in range(WARM_UP + steps):
        batch = task.batch(rank, number)
        if number == WARM_UP:
            dist.barrier()
        began = time.perf_counter()
        losses.append(step(batch))
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds[WARM_UP:], "losses": torch.stack(losses).float().tolist()}


def held(rank: int, engine: str, steps: int) -> dict[str, Any]:
    """Bytes by the allocator's own events, from before the model is built: at rest after the last step, and at most in it.

    'bound' is what zerostage's ledger allows for the peak without activations; 'sent' are the bytes
    that one more step sends, by collective.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model, step = warmed_up(rank, engine)
        gc.collect()
        began = time.time_ns()
        step(task.batch(rank, WARM_UP))
    events = _allocations(profiler.profiler.kineto_results.experimental_event_tree())
    live = Live()
    peak = 0
    for event in sorted(events, key=lambda event: event.start_time_ns):
        live.change(event.extra_fields.ptr, event.extra_fields.alloc_size)
        if event.start_time_ns >= began:
            peak = max(peak, live.bytes)
    found: dict[str, Any] = {"at_rest": live.bytes, "peak": peak, "sent": sent(step, task.batch(rank, WARM_UP + 1))}
    if engine.startswith("zerostage"):
        import zerostage

        found["bound"] = zerostage.memory(model).peak["bound"]
    return found


class Live:
    """The allocations that are held.

    Threads of torch.distributed free what they have sent, and the profiler does not see that;
    memory that is handed out again must have been freed.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}

    def change(self, address: int, size: int) -> None:
        if size < 0:
            self._drop(address)
            return
        place = bisect.bisect_left(self._starts, address)
        if place and self._starts[place - 1] + self._sizes[self._starts[place - 1]] > address:
            place -= 1
        while place < len(self._starts) and self._starts[place] < address + size:
            self._drop(self._starts[place])
        if size:
            bisect.insort(self._starts, address)
            self._sizes[address] = size
            self.bytes += size

    def _drop(self, address: int) -> None:
        if address in self._sizes:
            self.bytes -= self._sizes.pop(address)
            del self._starts[bisect.bisect_left(self._starts, address)]


def _allocations(tree: list[Any]) -> Iterator[Any]:
    for event in tree:
        if event.tag == torch._C._profiler._EventType.Allocation:
            yield event
        yield from _allocations(event.children)


#: How many bytes a rank sends in each of torch.distributed's collectives, of n ranks: from its input's bytes.
SENT = {
    "c10d::allreduce_": lambda size, n: 2 * size * (n - 1) // n,
    "c10d::_allgather_base_": lambda size, n: size * (n - 1),
    "c10d::allgather_": lambda size, n: size * (n - 1),
    "c10d::allgather_into_tensor_coalesced_": lambda size, n: size * (n - 1),
    "c10d::_reduce_scatter_base_": lambda size, n: size * (n - 1) // n,
    "c10d::reduce_scatter_": lambda size, n: size * (n - 1) // n,
    "c10d::reduce_scatter_tensor_coalesced_": lambda size, n: size * (n - 1) // n,
    "c10d::reduce_": lambda size, n: size * (n - 1) // n,
    "c10d::alltoall_base_": lambda size, n: size * (n - 1) // n,
    "c10d::broadcast_": lambda size, n: size * (n - 1) // n,
    "c10d::send": lambda size, n: size,
}


def sent(step: Step, batch: dict[str, torch.Tensor]) -> dict[str, int]:
    """Bytes that a step sends, by collective, counted where torch.distributed dispatches them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found: dict[str, int] = {}

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name
            if name in SENT:
                place = 1 if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::alltoall_base_") else 0
                size = sum(tensor.nbytes for tensor in _tensors(args[place]))
                found[name] = found.get(name, 0) + SENT[name](size, dist.get_world_size())
            return func(*args, **(kwargs or {}))

    with Counter():
        step(batch)
    return found


def trace(rank: int, engine: str, steps: int) -> Any:
    """All ranks' timelines of a step after the warm-up, by zerostage itself; see `zerostage.trace`."""
    import zerostage

    model, step = warmed_up(rank, engine)
    with zerostage.trace(model) as found:
        step(task.batch(rank, WARM_UP))
    return found.ranks


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []
