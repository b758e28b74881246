"""Save a sharded model and its optimizer: every rank writes the intervals that no other rank counts as its own."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from zerostage.autograd import not_compiled
from zerostage.checkpoint import folder
from zerostage.checkpoint.contents import check_ready, collect, given
from zerostage.checkpoint.writing import Item, write_items
from zerostage.collectives import World
from zerostage.engine import Engine, require

log = logging.getLogger("zerostage")

#: Bytes beside the tensors that a rank's file may take: objects, and what torch.save adds to each tensor.
OVERHEAD = 2_000
#: Bytes that the index takes for a parameter.
INDEX_ROW = 200


class Saving:
    """A checkpoint that is being saved, or was.

    path: its folder. bytes: of all its files, 0 until it is published.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Saving:
        """Return once the checkpoint is published. Raises what went wrong, once."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self

    def _run(self, work: Callable[[], int]) -> None:
        try:
            self.bytes = work()
        except BaseException as error:
            self._error = error


@not_compiled
@torch.no_grad()
def save(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    *,
    keep_last: int = 0,
    asynchronous: bool = False,
    beside: Sequence[Any] = (),
) -> Saving:
    """Save everything that training needs to go on, for any stage and number of ranks. Every rank must call it.

    path: the checkpoint's folder, on a disk that all ranks see. It is written under a hidden
        name beside and renamed when it is whole and synced; a checkpoint that is there already
        is replaced then.
    optimizer: the one that was sharded with the model; without it, only the weights.
    extra: the user's own: numbers, strings, tensors, numpy arrays, lists and dicts of them.
        A value with a `state_dict` (an LR scheduler, a GradScaler) is saved as that. Ranks may
        have different ones: each gets its own back on as many ranks, else all get rank 0's.
    keep_last: delete all but the newest so many whole checkpoints beside `path`, once this
        one is published (0: keep all).
    asynchronous: copy this rank's share (14/n bytes per parameter in mixed precision) to the
        CPU's memory and return; later changes do not reach the file. What goes wrong is raised by
        `wait()`, or else by the next save or by `close`.
    beside: objects with `save_pretrained(folder)`, such as a tokenizer, for `export`. The
        model's own configuration is there by itself.

    Saved are weights, masters, the optimizer's state and step counts by parameter, parameter
    groups by name, `EMA`s, buffers (each rank's, where they differ), and the random states of
    Python, numpy and torch. Gradients are not. Nothing changes by saving.

    Raises OSError on all ranks, naming the first, where there is no room or a rank cannot
    write; what was there before is there after. ValueError for what cannot be saved.
    """
    engine = require(model)
    path = Path(path).absolute()
    if engine.saving is not None:
        engine.saving.wait()
    _check(engine, optimizer, keep_last)
    items, index, described = collect(engine, optimizer is not None, extra)
    size = sum(item.nbytes + OVERHEAD for item in items) + (INDEX_ROW * len(index["parameters"]) if engine.world.rank == 0 else 0)
    needed = sum(engine.world.collect_objects(size, f"zerostage.save({path.name})"))

    def prepare() -> Path:
        partial_ = folder.prepare(path, needed)
        _save_assets(partial_, engine.model, beside)
        return partial_

    hidden = _on_rank_0(engine, f"zerostage.save({path.name})", prepare)
    _check_shared(engine, hidden)
    if asynchronous:
        for item in items:
            value = item.get()
            if isinstance(value, torch.Tensor):
                value = value.detach().to("cpu", copy=True)
            item.get = partial(given, value)
    saving = Saving(path)
    work = partial(_write, path, hidden, items, index, described, keep_last, engine.world)
    if asynchronous:
        saving._thread = threading.Thread(target=saving._run, args=(work,), name="zerostage-save")
        engine.saving = saving
        saving._thread.start()
        return saving
    saving.bytes = work()
    if engine.world.rank == 0:
        log.info(f"saved {saving.bytes:,} bytes to {path}")
    return saving


def _check(engine: Engine, optimizer: Any, keep_last: int) -> None:
    if engine.world.alone:
        raise RuntimeError("zerostage.save: the 'fake' process group has no other ranks that would write their parts")
    if not isinstance(keep_last, int) or keep_last < 0:
        raise ValueError(f"zerostage.save: keep_last is {keep_last!r}; it must be a whole number of checkpoints, or 0 to keep all")
    if engine.missing:
        raise RuntimeError(f"'{min(engine.missing)}' has no values to save yet: call zerostage.load_weights(model, folder) first")
    check_ready(engine, optimizer, "zerostage.save")


def _save_assets(partial_: Path, model: nn.Module, beside: Sequence[Any]) -> None:
    assets = partial_ / folder.ASSETS
    peft = getattr(model, "peft_config", None)
    config = getattr(model, "config", None)
    things = [config, getattr(model, "generation_config", None), *beside]
    for thing in things:
        if hasattr(thing, "save_pretrained"):
            thing.save_pretrained(assets)
    for name, adapter in peft.items() if isinstance(peft, dict) else ():
        adapter.save_pretrained(assets if name == "default" else assets / name)
    if assets.exists() and not any(assets.iterdir()):
        assets.rmdir()


def _on_rank_0(engine: Engine, what: str, work: Callable[[], Any]) -> Any:
    """What `work` returns on rank 0, on all ranks; OSError on all ranks where it failed."""
    problem, outcome = None, None
    if engine.world.rank == 0:
        try:
            outcome = work()
        except Exception as error:
            problem, outcome = error, f"{what}: {error}" if isinstance(error, OSError) else f"{what}: {type(error).__name__}: {error}"
    outcome = engine.world.collect_objects(outcome, what)[0]
    if isinstance(outcome, str):
        raise OSError(outcome) from problem
    return outcome


def _check_shared(engine: Engine, hidden: Path) -> None:
    """All ranks must see the folder that rank 0 has made."""
    for rank, sees in enumerate(engine.world.collect_objects(hidden.is_dir(), "zerostage.save")):
        if not sees:
            raise OSError(f"rank {rank} does not see {hidden.parent}, where rank 0 writes: save to a disk that all ranks share")


def _write(
    path: Path,
    hidden: Path,
    items: list[Item],
    index: dict[str, Any],
    described: dict[str, Any],
    keep_last: int,
    world: World,
) -> int:
    """Write, join and publish; may run on a thread. Returns the bytes of the checkpoint, the same on all ranks."""
    try:
        outcome: Any = None
        try:
            writer = write_items(hidden, items, world.saving)
            outcome = (writer.file.name, writer.placed, folder.digest(writer.file))
        except (Exception, CheckpointException) as error:  # torch's, on all ranks where one cannot write, is no Exception
            outcome = _reason(error)
        written = _everyone(outcome, world, path.name)
        for other, result in enumerate(written):
            if isinstance(result, str):
                where = "" if result.startswith("on rank ") else f"on rank {other}: "
                raise OSError(f"zerostage.save({path.name}) failed {where}{result}")
        published: Any = None
        if world.rank == 0:
            try:
                published = _join(path, hidden, index, described, written, keep_last)
            except Exception as error:
                published = f"{type(error).__name__}: {error}"
        published = _everyone(published, world, path.name)[0]
        if isinstance(published, str):
            raise OSError(f"zerostage.save({path.name}) failed on rank 0: {published}")
        return published
    except BaseException:
        if world.rank == 0:
            shutil.rmtree(hidden, ignore_errors=True)
        raise


def _reason(error: BaseException) -> str:
    """In a line, why a write failed, and on which rank."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = min(failures.items())
        return f"on rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"


def _everyone(value: Any, world: World, name: str) -> list[Any]:
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    try:
        dist.all_gather_object(values, value, group=world.saving)
    except RuntimeError:  # a connection was closed
        raise world.notes.lost(f"the save of {name}") from None
    return values


def _join(path: Path, hidden: Path, index: dict[str, Any], described: dict[str, Any], written: list[Any], keep_last: int) -> int:
    chunks: dict[str, list[list[Any]]] = {}
    checksums = {}
    for name, placed, checksum in written:
        checksums[name] = checksum
        for key, start, stop, byte in placed:
            chunks.setdefault(key, []).append([start, stop, name, byte])
    index["chunks"] = {key: sorted(parts) for key, parts in chunks.items()}
    folder.write(hidden / folder.INDEX, json.dumps(index).encode())
    described["sequence"] = folder.next_sequence(path.parent)
    nbytes = folder.publish(hidden, path, described, checksums)
    if keep_last:
        folder.rotate(path, keep_last)
    return nbytes
