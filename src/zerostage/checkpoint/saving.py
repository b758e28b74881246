"""Save a sharded model and its optimizer: every rank writes the intervals that no other rank counts as its own."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import CheckpointException

import zerostage
from zerostage.autograd import not_compiled
from zerostage.checkpoint import folder
from zerostage.checkpoint.source import AVERAGE, MASTER, WEIGHTS
from zerostage.checkpoint.stored import FORMAT, pack, unpack
from zerostage.checkpoint.writing import Item, write_items
from zerostage.collectives import World
from zerostage.division import own_name
from zerostage.ema import EMA
from zerostage.engine import Engine, require
from zerostage.flat import Flat

log = logging.getLogger("zerostage")

#: Bytes beside the tensors that a rank's file may take: objects, and what torch.save adds to each tensor.
OVERHEAD = 2_000


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
    _check(engine, optimizer, extra, keep_last)
    items, index, described = _collect(engine, optimizer is not None, extra)
    needed = sum(engine.world.collect_objects(sum(item.nbytes + OVERHEAD for item in items), f"zerostage.save({path.name})"))
    with_rank_0 = partial(_on_rank_0, engine, f"zerostage.save({path.name})")

    def prepare() -> Path:
        partial_ = folder.prepare(path, needed)
        _save_assets(partial_, engine.model, beside)
        return partial_

    hidden = with_rank_0(prepare)
    _check_shared(engine, hidden)
    if asynchronous:
        for item in items:
            value = item.get()
            if isinstance(value, torch.Tensor):
                value = value.detach().to("cpu", copy=True)
            item.get = partial(_given, value)
    saving = Saving(path)
    group = engine.world.group_for_saving()
    work = partial(_write, path, hidden, items, index, described, keep_last, engine.world, group)
    if asynchronous:
        saving._thread = threading.Thread(target=saving._run, args=(work,), name="zerostage-save")
        engine.saving = saving
        saving._thread.start()
        return saving
    saving.bytes = work()
    if engine.world.rank == 0:
        log.info(f"saved {saving.bytes:,} bytes to {path}")
    return saving


def _given(value: Any) -> Any:
    return value


def _check(engine: Engine, optimizer: Any, extra: Any, keep_last: int) -> None:
    if engine.world.alone:
        raise RuntimeError("zerostage.save: the 'fake' process group has no other ranks that would write their parts")
    if optimizer is not None and (engine.driver is None or engine.driver.optimizer is not optimizer):
        raise ValueError("zerostage.save: this optimizer is not the one that was sharded with the model")
    if not isinstance(keep_last, int) or keep_last < 0:
        raise ValueError(f"zerostage.save: keep_last is {keep_last!r}; it must be a whole number of checkpoints, or 0 to keep all")
    if engine.missing:
        raise RuntimeError(f"'{min(engine.missing)}' has no values to save yet: call zerostage.load_weights(model, folder) first")
    engine.schedule.refuse_averaged("zerostage.save")
    engine.check_places()
    for unit in engine.units:
        if unit.pinned:
            raise RuntimeError(f"zerostage.save within `gathered` of {unit.name}: leave the block before")


def plain(extra: Any) -> Any:
    """`extra` with the `state_dict()` in the place of each value that has one."""
    if isinstance(extra, EMA):
        raise ValueError("an EMA is saved and loaded with its model: leave it out of `extra`")
    if isinstance(extra, dict):
        return {key: plain(value) for key, value in extra.items()}
    if isinstance(extra, (list, tuple)) and type(extra) in (list, tuple):
        return type(extra)(plain(value) for value in extra)
    if hasattr(extra, "state_dict"):
        return extra.state_dict()
    return extra


def _packed_extra(extra: Any) -> Any:
    """`extra` as it will come back. Raises ValueError that names what would not."""
    extra = plain(extra)
    try:
        unpack(pack(extra))
        return extra
    except Exception:
        for key, value in extra.items() if isinstance(extra, dict) else ():
            try:
                unpack(pack(value))
            except Exception as error:
                reason = str(error).splitlines()[0]
                raise ValueError(
                    f"zerostage.save: extra[{key!r}] has something that cannot be loaded again without running its code "
                    f"({type(value).__name__}: {reason}); use numbers, strings, tensors, lists and dicts, or its state_dict()"
                ) from None
        raise ValueError(
            f"zerostage.save: extra is a {type(extra).__name__} that cannot be loaded again without running its code; use a dict "
            "of numbers, strings, tensors and lists"
        ) from None


def _collect(engine: Engine, optimized: bool, extra: Any) -> tuple[list[Item], dict[str, Any], dict[str, Any]]:
    """This rank's items, the index's entries that all ranks know, and the manifest's. Ranks agree here; nothing is copied."""
    world, driver = engine.world, engine.driver if optimized else None
    problem: Exception | None = None
    mine: dict[str, Any] = {}
    try:
        own_extra = _packed_extra(extra)
        buffers = {own_name(n): buffer.cpu().clone() for n, buffer in engine.model.named_buffers(remove_duplicate=False)}
        mine["extra"] = _digest(own_extra)
        mine["buffers"] = {name: _digest(buffer) for name, buffer in buffers.items()}
        mine["terms"] = {i: _terms(driver, flat) for i, flat in enumerate(engine.flats) if driver and flat.trainable}
        mine["states"] = _states(driver) if driver else []
    except Exception as error:  # the others must not wait for this rank
        problem, mine["problem"] = error, f"{type(error).__name__}: {error}"
    everyone = world.collect_objects(mine, "zerostage.save, which every rank must call")
    for rank, other in enumerate(everyone):
        if "problem" in other:
            raise problem or ValueError(f"zerostage.save failed on rank {rank}: {other['problem']}")
    items: list[Item] = []
    averages = list(engine.averages.values())
    for number, flat in enumerate(engine.flats):
        terms = {term: dtype for other in everyone for term, dtype in other["terms"].get(number, {}).items()}
        items += _items_of(engine, number, flat, terms, averages)
    items = [item for item in items if item.numel]  # a flat of empty parameters has nothing to write
    apart = {name for name in buffers if any(other["buffers"].get(name) != mine["buffers"][name] for other in everyone)}
    own = {
        "random": random_states(),
        "buffers": {name: buffers[name] for name in sorted(apart)},
        "extra": [own_extra] if mine["extra"] != everyone[0]["extra"] else [],
    }
    blobs = {f"rank.{world.rank}": own}
    states = _joined(other["states"] for other in everyone)
    if world.rank == 0:
        blobs["common"] = {
            "states": states,
            "groups": _groups(engine) if driver else None,
            "buffers": buffers,
            "unsaved": sorted(_not_persistent(engine.model)),
            "averages": [average.decay for average in averages],
            "skipped": driver.optimizer.skipped_steps if driver else 0,
            "extra": own_extra,
            "extras_differ": any(other["extra"] != everyone[0]["extra"] for other in everyone),
        }
    for key, value in blobs.items():
        data = pack(value)
        items.append(Item(key, partial(io.BytesIO, data), len(data)))
    index = {
        "parameters": [
            [slot.names, number, slot.start, slot.shape, str(flat.sources[place])[6:], flat.parameters[place].requires_grad]
            for number, flat in enumerate(engine.flats)
            for place, slot in enumerate(flat.layout.slots)
        ],
        "always": [WEIGHTS, MASTER, *(f"{AVERAGE}{number}" for number in range(len(averages)))],
        "dtypes": {item.key: str(item.dtype)[6:] for item in items if item.numel is not None},
    }
    return items, index, _described(engine, driver, states, everyone, items)


def _items_of(engine: Engine, number: int, flat: Flat, states: dict[str, torch.dtype], averages: list[EMA]) -> list[Item]:
    """What this rank writes of one flat: its own share of each term."""
    first, last = flat.bounds[4]

    def item(term: str, dtype: torch.dtype, get: Callable[[], torch.Tensor]) -> Item:
        return Item(f"{number}.{term}", get, (last - first) * dtype.itemsize, dtype, flat.layout.numel, first, last)

    base, own = flat.bounds[1][0], flat.bounds[3][0]
    weights = flat.aside if flat.aside is not None else flat.shard
    items = [item(WEIGHTS, flat.dtype, lambda: weights[first - base : last - base])]
    if flat.trainable and flat.has_master:
        items.append(item(MASTER, flat.master_dtype, lambda: flat.master[first - own : last - own]))
    for term, dtype in states.items():
        items.append(item(term, dtype, partial(_joined_state, engine, flat, term, dtype)))
    for place, average in enumerate(averages):
        values = average.follow().get(flat)
        if values is not None:
            items.append(item(f"{AVERAGE}{place}", values.dtype, partial(_given, values[first - own : last - own])))
    return items


def _joined_state(engine: Engine, flat: Flat, term: str, dtype: torch.dtype) -> torch.Tensor:
    """One term of the optimizer's state over this rank's share of a flat; zero where a parameter has none."""
    first, last = flat.bounds[4]
    out = torch.zeros(last - first, dtype=dtype, device=flat.device)
    for segment in engine.driver.segments[flat]:
        value = engine.driver.state_of(segment).get(term)
        start, stop = max(first, segment.start), min(last, segment.stop)
        if start < stop and isinstance(value, torch.Tensor):
            out[start - first : stop - first].copy_(value[start - segment.start : stop - segment.start])
    return out


def _digest(value: Any) -> str:
    return hashlib.sha256(pack(value)).hexdigest()


def _is_term(value: Any, numel: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == numel


def _terms(driver: Any, flat: Flat) -> dict[str, torch.dtype]:
    """The dtype of each elementwise term of the optimizer's state of one flat, on this rank."""
    found: dict[str, torch.dtype] = {}
    for segment in driver.segments[flat]:
        for name, value in driver.state_of(segment).items():
            if _is_term(value, segment.master.numel()):
                other = found.setdefault(name, value.dtype)
                if other != value.dtype:
                    raise ValueError(
                        f"zerostage.save: the optimizer state '{name}' is {value.dtype} for "
                        f"'{flat.layout.slots[segment.index].name}' and {other} for another parameter of {flat.unit.name}"
                    )
    return found


def _states(driver: Any) -> list[tuple[list[str], dict[str, Any], list[str]]]:
    """(terms, other entries, names) of parameters that have optimizer state on this rank; alike ones together."""
    alike: dict[Any, tuple[list[str], dict[str, Any], list[str]]] = {}
    for flat, segments in driver.segments.items():
        for segment in segments:
            state = driver.state_of(segment)
            if state:
                terms = sorted(name for name, value in state.items() if _is_term(value, segment.master.numel()))
                scalars = {name: value for name, value in state.items() if name not in terms}
                key = (tuple(terms), repr([(n, v.dtype, v.tolist()) if isinstance(v, torch.Tensor) else (n, v) for n, v in scalars.items()]))
                alike.setdefault(key, (terms, _on_cpu(scalars), []))[2].append(flat.layout.slots[segment.index].name)
    return list(alike.values())


def _on_cpu(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu().clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def _joined(everyone: Any) -> list[tuple[list[str], dict[str, Any], list[str]]]:
    """The ranks' lists of `_states` in one, each parameter once."""
    seen: set[str] = set()
    joined = []
    for states in everyone:
        for terms, scalars, names in states:
            fresh = [name for name in names if name not in seen]
            seen.update(fresh)
            if fresh:
                joined.append((terms, scalars, fresh))
    return joined


def _groups(engine: Engine) -> list[dict[str, Any]]:
    """The optimizer's parameter groups with names in the place of parameters."""
    name_of = {id(p): slot.name for flat in engine.flats for slot, p in zip(flat.layout.slots, flat.parameters)}
    groups = []
    for group in engine.driver.optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({**settings, "names": [name_of[id(p)] for p in group["params"]]})
    return groups


def _not_persistent(model: nn.Module) -> set[str]:
    return {
        own_name(f"{path}.{key}" if path else key)
        for path, module in model.named_modules(remove_duplicate=False)
        for key in module._non_persistent_buffers_set
    }


def random_states() -> dict[str, Any]:
    """The states of the random number generators of this process."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def _described(engine: Engine, driver: Any, states: Any, everyone: Any, items: list[Item]) -> dict[str, Any]:
    """The manifest: what `inspect` tells."""
    world = engine.world
    steps = [int(scalars["step"]) for _, scalars, _ in states if "step" in scalars]
    by_term: dict[str, int] = {}
    for item in items:
        if item.numel is not None:
            term = item.key.partition(".")[2]
            by_term[term] = by_term.get(term, 0) + item.numel * item.dtype.itemsize
    return {
        "format": FORMAT,
        "zerostage": zerostage.__version__,
        "torch": torch.__version__,
        "ranks": world.size,
        "stage": world.partition.stage(world.size),
        "partition": [world.partition.optimizer, world.partition.gradients, world.partition.weights],
        "saved_at": time.time(),
        "step": max(steps, default=0),
        "optimizer": type(driver.optimizer).__name__ if driver else None,
        "parameters": sum(flat.layout.values for flat in engine.flats),
        "trainable": sum(flat.layout.values for flat in engine.flats if flat.trainable),
        "terms": by_term,
    }


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
    group: Any,
) -> int:
    """Write, join and publish; may run on a thread. Returns the bytes of the checkpoint, the same on all ranks."""
    try:
        outcome: Any = None
        try:
            writer = write_items(hidden, items, group)
            outcome = (writer.file.name, writer.placed, folder.digest(writer.file))
        except (Exception, CheckpointException) as error:  # torch's, on all ranks where one cannot write, is no Exception
            outcome = _reason(error)
        written = _everyone(outcome, group, world, path.name)
        for other, result in enumerate(written):
            if isinstance(result, str):
                raise OSError(f"zerostage.save({path.name}) failed: {result if ' on rank ' in result else f'on rank {other}: {result}'}")
        published: Any = None
        if world.rank == 0:
            try:
                published = _join(path, hidden, index, described, written, keep_last)
            except Exception as error:
                published = f"{type(error).__name__}: {error}"
        published = _everyone(published, group, world, path.name)[0]
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


def _everyone(value: Any, group: Any, world: World, name: str) -> list[Any]:
    if group is None:
        return [value]
    values: list[Any] = [None] * world.size
    try:
        dist.all_gather_object(values, value, group=group)
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
