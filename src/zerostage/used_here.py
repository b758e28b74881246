"""What processes hold on the cards of this machine, as nvidia-smi shows it: `zerostage audit --gpu`."""

from __future__ import annotations

from typing import Any

from zerostage.mistakes import InputError
from zerostage.planning.inputs.here import visible_cards
from zerostage.used import Used, size

#: A process that holds less than this share of the largest one's is none of the ranks (a context on a second card, a desktop).
HELPER = 0.05
#: Where processes are not told (in a container), a card with less than this in use is idle.
IDLE = 2**30


def read() -> tuple[list[Used], list[str]]:
    """One reading a rank, card by card, and what should be known about them.

    A process's memory counts; where the driver does not tell processes, the card's does. CUDA_VISIBLE_DEVICES is heeded.
    Raises InputError where there is no driver or card, and where nothing runs.
    """
    with visible_cards("give --used") as (nvml, handles):
        found = [one for handle in handles for one in _card(nvml, handle)]
    largest = max((used.bytes for used, _ in found), default=0)
    ranks = [(used, note) for used, note in found if used.bytes >= HELPER * largest]
    if not ranks:
        raise InputError("nothing runs on the cards that are visible here: run this beside the training, or give --used")
    notes = [note for _, note in ranks if note]
    for used, _ in found:
        if used.bytes < HELPER * largest:
            notes.append(f"{used.name} is left out: it holds only {size(used.bytes)}")
    return [used for used, _ in ranks], notes


def _card(nvml: Any, handle: Any) -> list[tuple[Used, str]]:
    """The processes of a card, or the card where they are not told; each with a note or ''."""
    index = nvml.nvmlDeviceGetIndex(handle)
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    if processes and all(process.usedGpuMemory for process in processes):
        return [(_used(process.usedGpuMemory, f"GPU {index} (process {process.pid})"), "") for process in processes]
    try:
        used = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used  # without what the driver keeps
    except nvml.NVMLError:
        used = nvml.nvmlDeviceGetMemoryInfo(handle).used
    if not processes and used < IDLE:
        return []
    return [(_used(used, f"GPU {index}"), f"GPU {index}: what the whole card has in use, as its processes' memory is not told")]


def _used(size_: int, name: str) -> Used:
    return Used(bytes=size_, low=size_, high=size_, name=name)
