"""One item of a DCP data file: a tensor that torch.save wrote into a range of the file's bytes.

torch.load would read all of it. A reader of some of the rows needs only to know at which byte the
elements begin; torch.save's form, a zip archive without compression, tells that in its first bytes.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import sys
import zipfile
from typing import Any, BinaryIO

import torch

#: What a pickle calls the storage of a dtype.
_STORAGES = {
    "FloatStorage": torch.float32, "BFloat16Storage": torch.bfloat16, "HalfStorage": torch.float16,
    "DoubleStorage": torch.float64, "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16,
    "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip


class Part(io.RawIOBase):
    """Bytes [start, start + length) of an open file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if place < 0:
            raise OSError(f"byte {place} of {self._length}")
        self._at = place
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        room = memoryview(buffer).cast("B")[: max(self._length - self._at, 0)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(room)
        self._at += count
        return count


def read_rows(data: io.IOBase, low: int, high: int) -> torch.Tensor:
    """Elements [low, high) along the first dimension of the tensor in `data`, all of it if it has none; on the CPU.

    Only these bytes are read if the tensor is contiguous (DCP writes no other), else all. Raises
    whatever zipfile, pickle and torch raise where `data` is damaged.
    """
    found = _layout(data)
    if found is None:
        data.seek(0)
        whole = torch.load(data, map_location="cpu", weights_only=True)
        return whole[low:high].clone() if whole.dim() else whole
    begin, dtype, shape = found
    row = math.prod(shape[1:])
    if shape:
        high = min(high, shape[0])
        begin, shape = begin + low * row * dtype.itemsize, (high - low, *shape[1:])
    values = torch.empty(math.prod(shape), dtype=dtype)
    data.seek(begin)
    _read_exactly(data, memoryview(values.view(torch.uint8).numpy()))
    return values.view(shape)


def _read_exactly(data: io.IOBase, room: memoryview) -> None:
    while room:
        count = data.readinto(room)
        if not count:
            raise EOFError(f"{len(room)} bytes are missing at its end")
        room = room[count:]


def _layout(data: io.IOBase) -> tuple[int, torch.dtype, tuple[int, ...]] | None:
    """At which byte the tensor's first element is, its dtype and shape; None where it is not stored plainly."""
    with zipfile.ZipFile(data) as archive:
        entries = {name.partition("/")[2]: entry for entry in archive.infolist() for name in (entry.filename,)}
        if "byteorder" in entries and archive.read(entries["byteorder"]).decode() != sys.byteorder:
            return None
        try:
            storage, first, shape, stride = _LayoutUnpickler(io.BytesIO(archive.read(entries["data.pkl"]))).load()
            _, dtype, key, *_ = storage
        except (pickle.UnpicklingError, TypeError, ValueError):
            return None  # torch.load knows more forms, or says what is wrong
    entry = entries[f"data/{key}"]
    if entry.compress_type != zipfile.ZIP_STORED or not _contiguous(shape, stride):
        return None
    if (first + math.prod(shape)) * dtype.itemsize > entry.file_size:
        return None
    return first_byte(data, entry) + first * dtype.itemsize, dtype, tuple(shape)


def first_byte(data: io.IOBase, entry: zipfile.ZipInfo) -> int:
    """Where, in a zip archive, the bytes of a member begin that is stored without compression."""
    data.seek(entry.header_offset)
    header = data.read(30)  # its last two numbers are the lengths of what follows it
    if header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile("a header is missing")
    return entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))


def _contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return all(step == math.prod(shape[dim + 1 :]) for dim, step in enumerate(stride) if shape[dim] > 1)


class _LayoutUnpickler(pickle.Unpickler):
    """Gives (storage, first element, shape, stride) of a pickled tensor, and calls nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, first, shape, stride, *_: (storage, first, shape, stride)
        if (module, name) == ("collections", "OrderedDict"):
            return dict  # the backward hooks, of which there are none
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, storage: Any) -> Any:
        return storage
