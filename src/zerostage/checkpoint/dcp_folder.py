"""A folder of torch.distributed.checkpoint (DCP) as it lies on the disk: its keys, and any part of what they hold.

The folder has a pickled `.metadata` (for each key the shape, the dtype and the rectangles, called
chunks, that the ranks wrote) and files `__RANK_I.distcp`, in which each chunk is an item of its own.
One process reads it here without a process group.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import zipfile
from enum import Enum
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zerostage.checkpoint import rectangle
from zerostage.checkpoint.damage import DamagedError
from zerostage.checkpoint.dcp_item import Part, read_rows

METADATA = ".metadata"
#: What wrappers (torch.compile, activation checkpointing, FSDP) put into names.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
#: Bytes of an item up to which it is read at once.
_SMALL = 64 * 1024

Sizes = tuple[int, ...]


class Folder:
    """
    tensors: for each key that holds a tensor its shape and dtype. Keys are free of wrappers' parts.
    objects: the keys that hold anything else.
    paths: for each key the dicts' keys and lists' indices that lead to it, in the order of the state dict.
    files: names of the data files.

    Raises DamagedError that names the file where `.metadata` or a data file is missing, truncated or
    damaged, and ValueError where the items were written through a transformation (compressed).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        stored = _read_metadata(path / METADATA)
        paths = stored.planner_data if isinstance(stored.planner_data, dict) else {}
        entries = stored.state_dict_metadata
        self.tensors: dict[str, tuple[Sizes, torch.dtype]] = {}
        self.objects: set[str] = set()
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self._chunks: dict[str, dict[Sizes, Sizes]] = {}  # sizes by offsets
        self._written: dict[str, str] = {}  # the key as it was written
        self._items = {(index.fqn, _offsets(index)): item for index, item in stored.storage_data.items()}
        self._known: dict[bytes, Any] = {}
        for written in [key for key in paths if key in entries] + [key for key in entries if key not in paths]:
            key, entry = _unwrapped(written), entries[written]
            if key in self._written:
                raise ValueError(f"{path} has both {self._written[key]} and {written}, which without wrappers are the same")
            self._written[key] = written
            path_to = paths.get(written, (written,))
            self.paths[key] = tuple(_unwrapped(part) if isinstance(part, str) else part for part in path_to)
            if isinstance(entry, TensorStorageMetadata):
                self.tensors[key] = tuple(entry.size), entry.properties.dtype
                # Ranks that have the same part may each have listed it; a rank that has none has listed an empty one.
                self._chunks[key] = {tuple(c.offsets): tuple(c.sizes) for c in entry.chunks if math.prod(c.sizes)}
            else:
                self.objects.add(key)
        self.files = self._check_files()

    def _check_files(self) -> list[str]:
        ends: dict[str, int] = {}
        for (key, _), item in self._items.items():
            if getattr(item, "transform_descriptors", None):
                raise ValueError(f"{self.path} has {key} written through {item.transform_descriptors}: save without extensions")
            ends[item.relative_path] = max(ends.get(item.relative_path, 0), item.offset + item.length)
        for name, end in ends.items():
            file = self.path / name
            if not file.is_file():
                raise DamagedError(f"{file} is missing: copy the whole checkpoint again or use another one")
            if (size := file.stat().st_size) < end:
                raise DamagedError(f"{file} is truncated: it has {size:,} of {end:,} bytes; use another checkpoint")
        return sorted(ends)

    def object(self, key: str) -> Any:
        """What `key`, which is no tensor's, holds. Raises pickle.UnpicklingError where it is not of torch's safe types."""
        return self._once(key, None, lambda data: torch.load(data, map_location="cpu", weights_only=True))

    def tensor(self, key: str) -> torch.Tensor:
        """The whole tensor of `key`, on the CPU."""
        shape, dtype = self.tensors[key]
        if shape == ():
            return self._once(key, (), lambda data: self._checked(read_rows(data, 0, 1), key, ()))
        flat = torch.empty(math.prod(shape), dtype=dtype)
        self.fill([(key, 0, flat.numel(), flat)])
        return flat.view(shape)

    @torch.no_grad()
    def fill(self, requests: list[tuple[str, int, int, torch.Tensor]]) -> None:
        """For each (key, start, stop, out) copy elements [start, stop) of the flattened tensor into the one-dimensional `out`.

        Of each chunk the rows that are needed are read once, in the order of the files; one chunk's are held at a time.
        """
        wanted: dict[tuple[str, Sizes], list[int]] = {}
        for number, (key, start, stop, out) in enumerate(requests):
            shape, _ = self.tensors[key]
            if not 0 <= start <= stop <= math.prod(shape) or out.shape != (stop - start,):
                raise ValueError(f"[{start}, {stop}) into {list(out.shape)} does not fit {key} of shape {list(shape)}")
            found = 0
            for offsets, sizes in self._chunks[key].items():
                if count := rectangle.overlap(offsets, sizes, shape, start, stop):
                    wanted.setdefault((key, offsets), []).append(number)
                    found += count
            if found < stop - start:
                where = f"{self.path / METADATA} lists only {found} of elements [{start}, {stop}) of {key}"
                raise DamagedError(f"{where}: a rank's part was not saved; use another checkpoint")
        file: BinaryIO | None = None
        try:
            for key, offsets in sorted(wanted, key=lambda chunk: self._place(*chunk)):
                name, _, _ = self._place(key, offsets)
                if file is None or file.name != str(self.path / name):
                    if file is not None:
                        file.close()
                    file = (self.path / name).open("rb")
                self._copy(file, key, offsets, [requests[number][1:] for number in wanted[key, offsets]])
        finally:
            if file is not None:
                file.close()

    def _copy(self, file: BinaryIO, key: str, offsets: Sizes, parts: list[tuple[int, int, torch.Tensor]]) -> None:
        shape, _ = self.tensors[key]
        sizes = self._chunks[key][offsets]
        low, high = 0, 1
        if shape:
            needed = [rectangle.rows(offsets, sizes, shape, start, stop) for start, stop, _ in parts]
            low, high = min(first for first, _ in needed), max(last for _, last in needed)
            sizes = (high - low, *sizes[1:])
        values = self._read(file, key, offsets, lambda data: self._checked(read_rows(data, low, high), key, sizes))
        if shape:
            offsets = (offsets[0] + low, *offsets[1:])
        for start, stop, out in parts:
            rectangle.copy(out, start, stop, values, offsets, shape)

    def _checked(self, values: Any, key: str, sizes: Sizes) -> torch.Tensor:
        _, dtype = self.tensors[key]
        if not isinstance(values, torch.Tensor) or tuple(values.shape) != sizes or values.dtype != dtype:
            raise TypeError(f"it has not the shape and {dtype} that {METADATA} tells")
        return values

    def _place(self, key: str, offsets: Sizes | None) -> tuple[str, int, int]:
        """File, first byte and length of an item."""
        item = self._items.get((self._written[key], offsets))
        if item is None:
            raise DamagedError(f"{self.path / METADATA} is damaged: it does not say where {key} lies; use another checkpoint")
        return item.relative_path, item.offset, item.length

    def _read(self, file: BinaryIO, key: str, offsets: Sizes | None, parse: Any) -> Any:
        """What `parse` makes of an item of the open file."""
        name, start, length = self._place(key, offsets)
        data: io.IOBase = Part(file, start, length)
        if length <= _SMALL:
            data = io.BytesIO(data.read(length))
        try:
            return parse(data)
        except Exception as error:
            if offsets is None and isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(data):
                raise  # not damaged, but of a class that is not made from a file
            where = f"{self.path / name} is damaged at bytes {start:,} to {start + length:,}, which hold {key}"
            raise DamagedError(f"{where}: {_line(error)}; use another checkpoint") from error

    def _once(self, key: str, offsets: Sizes | None, parse: Any) -> Any:
        """A small item, which is parsed once for all keys with the same bytes, as most steps and hyperparameters have."""
        name, start, length = self._place(key, offsets)
        with (self.path / name).open("rb") as file:
            if length > _SMALL:
                return self._read(file, key, offsets, parse)
            file.seek(start)
            data = file.read(length)
            if data not in self._known:
                self._known[data] = self._read(file, key, offsets, parse)
        return copy.deepcopy(self._known[data])


def _offsets(index: Any) -> Sizes | None:
    return None if index.offset is None else tuple(index.offset)


def _unwrapped(name: str) -> str:
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def _line(error: Exception) -> str:
    """The first line of what an exception says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _read_metadata(file: Path) -> Metadata:
    if not file.is_file():
        raise DamagedError(f"{file} is missing: copy the whole checkpoint again or use another one")
    try:
        stored = _MetadataUnpickler(io.BytesIO(file.read_bytes())).load()
        if not isinstance(stored, Metadata) or not stored.state_dict_metadata or not stored.storage_data:
            raise TypeError("it lists no tensors and files")
    except Exception as error:  # a damaged pickle can raise anything
        what = f"{file} is damaged or not of torch.distributed.checkpoint"
        raise DamagedError(f"{what}: {_line(error)}; use another checkpoint") from error
    return stored


class _MetadataUnpickler(pickle.Unpickler):
    """Knows what DCP's metadata consists of, and nothing else: the file comes from elsewhere, and a pickle can call anything."""

    def find_class(self, module: str, name: str) -> Any:
        if module == dcp_metadata.__name__ and isinstance(found := getattr(dcp_metadata, name, None), type):
            return found
        if module == "torch" and (isinstance(found := getattr(torch, name, None), torch.dtype) or name == "Size"):
            return found
        if (module, name) in _OTHERS:
            return _OTHERS[module, name]
        if module.partition(".")[0] == "pathlib" and name.endswith("Path"):
            return PureWindowsPath if "Windows" in name else PurePosixPath  # of the machine that wrote it
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def _member(kind: type[Enum], name: str) -> Enum:
    """An Enum's member, which some versions of Python pickle as a call of getattr."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"it asks for {name} of {kind}")
    return kind[name]


_OTHERS = {
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
    ("builtins", "set"): set,
    ("builtins", "getattr"): _member,
}
