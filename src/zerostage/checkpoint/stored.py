"""A checkpoint of this library, open for reading.

Each parameter lies in one of a few long tensors (a flat buffer of the run that saved it, one for
each term), at an interval that the index tells. Those tensors lie in the ranks' files, each file
with one interval. A reader seeks to the bytes that it needs.
"""

from __future__ import annotations

import io
import json
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from zerostage.checkpoint import folder
from zerostage.checkpoint.source import Piece, Source, Stored

FORMAT = 1
#: Elements that are read at a time where they must be cast.
CHUNK = 1 << 20


def recognises(path: Path) -> bool:
    """Whether `path` is the folder of such a checkpoint, whole or not."""
    return folder.is_checkpoint(path)


def verify(path: str | Path) -> list[str]:
    """What is wrong with a checkpoint: a line that names the file for each fault, [] where every checksum is right."""
    return folder.check(Path(path))


class StoredSource(Source):
    """The checkpoint at `path`; its files are taken to be whole (see `folder.check`).

    manifest: what `inspect` shows. ranks: of the run that saved it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest = folder.manifest(self.path)
        if self.manifest["format"] != FORMAT:
            raise ValueError(
                f"{self.path} has the checkpoint format {self.manifest['format']}, and this version reads {FORMAT}: "
                f"use the zerostage that wrote it ({self.manifest.get('zerostage')})"
            )
        self.ranks: int = self.manifest["ranks"]
        stage = self.manifest["stage"]
        self.what = f"a checkpoint of {self.ranks} ranks at " + (f"stage {stage}" if stage is not None else "a hybrid stage")
        index = json.loads((self.path / folder.INDEX).read_text(encoding="utf-8"))
        self._files: dict[str, BinaryIO] = {}
        self._chunks: dict[str, list[list[Any]]] = index["chunks"]  # by key: [start, stop, file, first byte], in order
        self._starts = {key: [chunk[0] for chunk in chunks] for key, chunks in self._chunks.items()}
        self._dtypes = {key: getattr(torch, name) for key, name in index["dtypes"].items()}
        self._common = self._object("common")
        self.optimizer = self.manifest["optimizer"]
        self.groups = self._common["groups"]
        self.averages: list[float] = self._common["averages"]
        self._place: dict[str, tuple[int, int]] = {}
        self.parameters, self.names = self._read_parameters(index)

    def _read_parameters(self, index: dict[str, Any]) -> tuple[dict[str, Stored], list[str]]:
        states = {name: (terms, scalars) for terms, scalars, names in self._common["states"] for name in names}
        kept: dict[int, dict[str, torch.dtype]] = {}  # of each flat, what is no optimizer state
        for key, dtype in self._dtypes.items():
            flat, _, term = key.partition(".")
            if term in index["always"]:
                kept.setdefault(int(flat), {})[term] = dtype
        parameters, names = {}, []
        for aliases, flat, start, shape, source, trainable in index["parameters"]:
            own, scalars = states.get(aliases[0], ([], {}))
            terms = kept.get(flat, {}) | {term: self._dtypes[f"{flat}.{term}"] for term in own}
            stored = Stored(tuple(shape), terms, scalars, getattr(torch, source), trainable)
            names.append(aliases[0])
            for name in aliases:
                parameters[name] = stored
                self._place[name] = flat, start
        return parameters, names

    @property
    def assets(self) -> Path | None:
        """The folder of the model's config and tokenizer; None if none was saved."""
        path = self.path / folder.ASSETS
        return path if path.is_dir() else None

    def read(self, term: str, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            flat, base = self._place[piece.name]
            key = f"{flat}.{term}"
            self.read_flat(key, base + piece.start, piece.out)

    def read_flat(self, key: str, start: int, out: torch.Tensor) -> None:
        """Fill `out` with the elements from `start` on of one of the long tensors."""
        stop, dtype = start + out.numel(), self._dtypes[key]
        chunks = self._chunks[key]
        number = bisect_right(self._starts[key], start) - 1
        while start < stop:
            first, last, file, byte = chunks[number]
            end = min(stop, last)
            self._fill(file, byte + (start - first) * dtype.itemsize, dtype, out[: end - start])
            out, start, number = out[end - start :], end, number + 1

    def _fill(self, name: str, byte: int, dtype: torch.dtype, out: torch.Tensor) -> None:
        file = self._open(name)
        file.seek(byte)
        direct = out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous()
        for part in (out,) if direct else out.split(CHUNK):
            target = part if direct else torch.empty(part.numel(), dtype=dtype)
            wanted = memoryview(target.view(torch.uint8).numpy())
            if file.readinto(wanted) != len(wanted):
                raise OSError(f"{self.path / name} ends before byte {byte + len(wanted):,}: it was truncated")
            if not direct:
                part.copy_(target)

    def _open(self, name: str) -> BinaryIO:
        if name not in self._files:
            self._files[name] = open(self.path / name, "rb", buffering=1 << 16)
        return self._files[name]

    def _object(self, key: str) -> Any:
        (_, size, name, byte), *_ = self._chunks[key]
        file = self._open(name)
        file.seek(byte)
        return unpack(file.read(size))

    def of_rank(self, rank: int) -> dict[str, Any]:
        """What one rank of the run that saved has for itself: its random states, and what differs from rank 0's."""
        return self._object(f"rank.{rank}")

    def buffers(self) -> dict[str, torch.Tensor]:
        """The persistent ones, rank 0's."""
        return {name: buffer for name, buffer in self._common["buffers"].items() if name not in self._common["unsaved"]}

    def all_buffers(self) -> dict[str, torch.Tensor]:
        """Also those that are not part of `state_dict()`."""
        return self._common["buffers"]

    @property
    def extras_differ(self) -> bool:
        """Whether the ranks had different extras."""
        return self._common["extras_differ"]

    @property
    def skipped(self) -> int:
        """Steps that the optimizer had skipped."""
        return self._common["skipped"]

    def extra(self) -> Any:
        """Rank 0's."""
        return self._common["extra"]


def pack(value: Any) -> bytes:
    """Bytes of plain values and tensors, which `unpack` reads without running code of theirs."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    with torch.serialization.safe_globals(_numpy()):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _numpy() -> list[Any]:
    """What a numpy array or number consists of, none of which runs code."""
    core = np._core if hasattr(np, "_core") else np.core
    kinds = [getattr(np.dtypes, name) for name in dir(np.dtypes) if name.endswith("DType")]
    return [np.ndarray, np.dtype, core.multiarray._reconstruct, core.multiarray.scalar, *kinds]
