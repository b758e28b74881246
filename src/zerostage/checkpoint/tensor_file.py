"""A safetensors file written as a stream: its header first, then tensor after tensor, a window of bytes at a time.

The file: 8 bytes of little-endian length of the header, the header (JSON, padded with spaces to
a multiple of 8), then the data of all tensors without a gap. So it is known before the first
tensor is read how long the file will be, and no more than a window of it is ever held.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

#: Bytes of a window: never more than the first; never less than the second, so that many small tensors are read at once.
MOST, LEAST = 128 << 20, 1 << 20

_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
}  # fmt: skip
#: What a safetensors header calls a dtype.
DTYPES = {getattr(torch, name): short for name, short in _NAMES.items() if hasattr(torch, name)}


class Item(NamedTuple):
    """A tensor to be written; `origin` is whatever its reader needs to find it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    origin: Any = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize


class Part(NamedTuple):
    """Elements [start, stop) of a flattened item, to be filled into `out`: one-dimensional, of the item's dtype."""

    item: Item
    start: int
    stop: int
    out: torch.Tensor


def _in_order(items: Sequence[Item]) -> list[Item]:
    """Wide elements first, so that every tensor starts at a multiple of its element: readers map the file."""
    return sorted(items, key=lambda item: -item.dtype.itemsize)


def header(items: Sequence[Item]) -> bytes:
    """The length and the header of a file that holds `items`."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for item in _in_order(items):
        entry = {"dtype": DTYPES[item.dtype], "shape": list(item.shape), "data_offsets": [position, position + item.bytes]}
        entries[item.name] = entry
        position += item.bytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(path: Path, items: Sequence[Item], read: Callable[[list[Part]], None]) -> None:
    """Write `items` to the new file `path`, which is on the disk on return. `read` fills the parts of one window.

    Held: one window, which is no longer than the largest item (or LEAST). Raises ValueError for
    a dtype that the format has no name for, OSError where the file cannot be written.
    """
    for item in items:
        if item.dtype not in DTYPES:
            raise ValueError(f"'{item.name}' is {item.dtype}, for which safetensors has no name: export it with another dtype")
    window = max(min(MOST, max((item.bytes for item in items), default=0)), LEAST)
    memory = torch.empty(window + -window % 8, dtype=torch.uint8)
    with open(path, "xb") as file:
        file.write(header(items))
        parts: list[Part] = []
        used = 0
        for item in _in_order(items):
            size, done = item.dtype.itemsize, 0
            if item.bytes and used + item.bytes > len(memory):
                used = _flush(file, memory, parts, used, read)
            while done < item.elements:
                if used == len(memory):
                    used = _flush(file, memory, parts, used, read)
                count = min(item.elements - done, (len(memory) - used) // size)
                parts.append(Part(item, done, done + count, memory[used : used + count * size].view(item.dtype)))
                used, done = used + count * size, done + count
        _flush(file, memory, parts, used, read)
        file.flush()
        os.fsync(file.fileno())


def _flush(file: Any, memory: torch.Tensor, parts: list[Part], used: int, read: Callable[[list[Part]], None]) -> int:
    if parts:
        read(parts)
        parts.clear()
        file.write(memoryview(memory.numpy())[:used])
    return 0


def check(path: Path, items: Sequence[Item]) -> None:
    """Open a written file again as its readers do. Raises OSError that names what is not as `items` have it."""
    from safetensors import SafetensorError, safe_open

    expected = len(header(items)) + sum(item.bytes for item in items)
    try:
        with safe_open(path, framework="np") as file:  # torch's would count the whole file as memory
            found = {}
            for name in file.keys():
                part = file.get_slice(name)
                found[name] = tuple(part.get_shape()), part.get_dtype()
    except SafetensorError as error:
        raise OSError(f"{path.name} was written, but cannot be read again: {error}") from None
    wrong = [item.name for item in items if found.get(item.name) != (item.shape, DTYPES[item.dtype])]
    if wrong or len(found) != len(items) or path.stat().st_size != expected:
        named = f"; '{wrong[0]}' differs" if wrong else ""
        raise OSError(
            f"{path.name} was written, but has {len(found)} tensors and {path.stat().st_size:,} bytes "
            f"instead of {len(items)} and {expected:,}{named}"
        )
