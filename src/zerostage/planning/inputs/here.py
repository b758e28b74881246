"""The cards in this machine, as NVML tells them: `zerostage plan --here`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zerostage.mistakes import InputError

#: Bytes per second, one way, of one NVLink link by NVML's number for its version (1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0).
NVLINK = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 25e9, 6: 25e9, 7: 50e9}
#: Bytes per second, one way, of one PCIe lane by generation (8, 16, 32 GT/s at 128b/130b; 64 GT/s in FLITs).
PCIE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_GIVE = "give --gpu h100, or another card, and --gpus-per-node"


def here() -> dict[str, Any]:
    """The cards of this machine that CUDA_VISIBLE_DEVICES leaves visible.

    Returns `name` (NVML's, which `hardware.card` knows), `gpus_per_node`, `memory_bytes` (what CUDA can use of one card)
    and `link_bytes_per_s` (one way, of one card: its NVLinks, else PCIe; None where NVML does not tell). Raises
    InputError where there is no driver or card, and where the cards differ.
    """
    with visible_cards(_GIVE) as (nvml, handles):
        cards = [_card(nvml, handle) for handle in handles]
    names = Counter(card["name"] for card in cards)
    if len(names) > 1:
        what = ", ".join(f"{count} x {name}" for name, count in names.items())
        raise InputError(f"the cards of this machine differ ({what}): choose by CUDA_VISIBLE_DEVICES or {_GIVE}")
    links = [card["link_bytes_per_s"] for card in cards]
    return {
        "name": cards[0]["name"],
        "gpus_per_node": len(cards),
        "memory_bytes": min(card["memory_bytes"] for card in cards),
        "link_bytes_per_s": None if None in links else min(links),
    }


@contextmanager
def visible_cards(otherwise: str) -> Iterator[tuple[Any, list[Any]]]:
    """NVML, and the cards of this machine that CUDA_VISIBLE_DEVICES leaves visible, while the block runs.

    otherwise: what else can be given. Raises InputError with it where there is no driver or card, or NVML fails in the block.
    """
    try:
        import pynvml
    except ModuleNotFoundError:
        raise InputError(
            f"the cards of this machine are read by nvidia-ml-py: pip install 'zerostage[plan]' (or {otherwise})"
        ) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise InputError(f"no NVIDIA driver here ({error}): {otherwise}") from None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        handles = _visible(pynvml, handles)
        if not handles:
            raise InputError(f"no NVIDIA card is visible here: {otherwise}")
        yield pynvml, handles
    except pynvml.NVMLError as error:
        raise InputError(f"the NVIDIA driver here does not tell its cards ({error}): {otherwise}") from None
    finally:
        pynvml.nvmlShutdown()


def _visible(nvml: Any, handles: list[Any]) -> list[Any]:
    """Those that CUDA_VISIBLE_DEVICES names, by index or UUID (or its beginning), up to the first that is not there."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return handles
    chosen = []
    for word in filter(None, map(str.strip, wanted.split(","))):
        if word.isdecimal():
            found = handles[int(word) : int(word) + 1]
        else:
            found = [handle for handle in handles if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(word)]
        if len(found) != 1:
            break
        chosen += found
    return chosen


def _card(nvml: Any, handle: Any) -> dict[str, Any]:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        reserved = memory.reserved  # by the driver: in no figure of CUDA's
    except nvml.NVMLError:
        memory, reserved = nvml.nvmlDeviceGetMemoryInfo(handle), 0
    return {
        "name": _text(nvml.nvmlDeviceGetName(handle)),
        "memory_bytes": memory.total - reserved,
        "link_bytes_per_s": _link(nvml, handle),
    }


def _link(nvml: Any, handle: Any) -> float | None:
    speed = 0.0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED:
                speed += NVLINK.get(nvml.nvmlDeviceGetNvLinkVersion(handle, link), 0.0)
        except nvml.NVMLError:
            break  # the card has no more links, or none
    if speed:
        return speed
    try:
        lane = PCIE.get(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
        return lane * nvml.nvmlDeviceGetMaxPcieLinkWidth(handle) if lane else None
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
