"""One rank's part of a checkpoint, written by torch.distributed.checkpoint.

Its plan and its metadata are torch's, so its tools read what is written. The file is written
here, one item after the other: torch's own writer keeps all tensors of a file until its end,
which would be a second copy of the rank's state.
"""

from __future__ import annotations

import io
import os
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from zerostage.checkpoint.dcp_item import Part, first_byte


@dataclass
class Item:
    """Elements [start, stop) of one of the checkpoint's long tensors, or (numel None) an object of this rank."""

    key: str
    get: Callable[[], torch.Tensor | io.BytesIO]  # called when it is written; a tensor that may share memory
    nbytes: int
    dtype: torch.dtype = torch.uint8
    numel: int | None = None  # of the whole tensor
    start: int = 0
    stop: int = 0

    def planned(self) -> WriteItem:
        if self.numel is None:
            return WriteItem(index=MetadataIndex(self.key), type=WriteItemType.BYTE_IO)
        offsets, sizes = torch.Size([self.start]), torch.Size([self.stop - self.start])
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=self.dtype), torch.Size([self.numel]))
        return WriteItem(index=MetadataIndex(self.key, offsets), type=WriteItemType.SHARD, tensor_data=data)


class Planner(DefaultSavePlanner):
    """Plans `items` in the place of a state dict's tensors."""

    def __init__(self, items: Sequence[Item]) -> None:
        super().__init__(flatten_state_dict=False)
        self.items = {item.key: item for item in items}  # a rank has one interval of a key

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([item.planned() for item in self.items.values()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self.items[write_item.index.fqn].get()


class Writer(dcp.FileSystemWriter):
    """Writes a rank's items into one file, synced, and notes where each one's bytes are.

    placed: [key, start, stop, first byte] of each item, start and stop in elements, or in bytes of an object.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.placed: list[tuple[str, int, int, int]] = []
        self.file: Path | None = None

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        self.file = Path(self.path, name)
        results = []
        with open(self.file, "w+b") as file:
            for planned in plan.items:
                item, data, begin = planner.items[planned.index.fqn], planner.resolve_data(planned), file.tell()
                if isinstance(data, io.BytesIO):
                    file.write(data.getbuffer())
                    self.placed.append((item.key, 0, item.nbytes, begin))
                else:
                    data = data.detach().cpu()
                    # torch.save writes all of the memory that a tensor is a part of
                    torch.save(data if data.untyped_storage().nbytes() == data.nbytes else data.clone(), file)
                    self.placed.append((item.key, item.start, item.stop, _payload(file, begin, item.nbytes)))
                del data
                length = file.tell() - begin
                results.append(WriteResult(planned.index, length, _StorageInfo(name, begin, length)))
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _payload(file: io.BufferedRandom, begin: int, nbytes: int) -> int:
    """Where, in `file`, the bytes of the tensor lie that torch.save has just written from `begin` on."""
    end = file.tell()
    part = Part(file, begin, end - begin)
    with zipfile.ZipFile(part) as archive:
        entry = next(entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != nbytes:
        raise OSError(f"torch.save wrote {entry.file_size} bytes, compressed or not of this tensor of {nbytes} bytes")
    first = begin + first_byte(part, entry)
    file.seek(end)
    return first


def write_items(folder: Path, items: Sequence[Item], group: Any) -> Writer:
    """Write this rank's items into `folder`, together with the other ranks of `group` (None: there is one rank).

    Raises on all ranks where one could not write.
    """
    writer = Writer(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process, and that ours is no class of torch's
        dcp.save({}, storage_writer=writer, planner=Planner(items), process_group=group, no_dist=group is None)
    return writer
