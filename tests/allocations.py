"""What really was allocated, by two ways that do not know the library: the profiler and the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass
class Allocations:
    """Bytes on the CPU from the start of the recording: `net` at its end, `peak` at most."""

    net: int = 0
    peak: int = 0


@contextmanager
def recorded() -> Iterator[Allocations]:
    """Record every allocation and free of the CPU allocator inside the block."""
    result = Allocations()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield result
        gc.collect()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        result.net += event.nbytes()
        result.peak = max(result.peak, result.net)


def live_storages() -> dict[int, int]:
    """Bytes by identity of every storage that some live tensor views."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu" and type(thing).__name__ != "FakeTensor":
            with torch._C.DisableTorchFunctionSubclass():
                storage = thing.untyped_storage()
                found[storage._cdata] = storage.nbytes()
    return found
