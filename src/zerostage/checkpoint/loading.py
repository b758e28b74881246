"""Load a checkpoint of any kind into a sharded model at any partition: each rank reads its own intervals."""

from __future__ import annotations

import difflib
import hashlib
import logging
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerostage.autograd import not_compiled
from zerostage.checkpoint import folder
from zerostage.checkpoint.contents import check_ready, not_persistent
from zerostage.checkpoint.damage import DamagedError
from zerostage.checkpoint.opening import is_source, open_source
from zerostage.checkpoint.source import AVERAGE, MASTER, WEIGHTS, Piece, Source, Stored
from zerostage.checkpoint.stored import StoredSource
from zerostage.collectives import World
from zerostage.division import own_name
from zerostage.engine import Engine, require
from zerostage.flat import Flat
from zerostage.mistakes import some
from zerostage.optimizer import Segment
from zerostage.unfreezing import regroup
from zerostage.weights import compute_buffers

log = logging.getLogger("zerostage")


@not_compiled
@torch.no_grad()
def load(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, strict: bool = True) -> Any:
    """Load a checkpoint into a sharded model, and its optimizer, at whatever stage and number of ranks.

    path: what `save` wrote, or a folder of such checkpoints, of which the newest whole one is
        taken and the others are logged with what is wrong; or a checkpoint of DeepSpeed ZeRO or
        of torch.distributed.checkpoint (FSDP2). Checksums are checked first, shared out among
        the ranks; then each rank reads the intervals that it holds. Every rank must call it.
    optimizer: the one that was sharded with the model. With it the optimizer's state, its
        groups' hyperparameters and the random states are those of the checkpoint; without it,
        only weights, masters, averages and buffers.
    strict: raise where the checkpoint has parameters that the model does not have.

    On as many ranks as saved it, each rank's random states and own buffers come back exactly; on
    others random states are derived from rank 0's, which is logged, and buffers are rank 0's.

    Returns what was saved as `extra`, or None. Raises FileNotFoundError where there is no checkpoint,
    DamagedError that names the file, KeyError for a parameter that the checkpoint lacks, ValueError
    for one of another shape, or groups that do not fit; then nothing has changed, on any rank.
    """
    engine = require(model)
    if engine.saving is not None:
        engine.saving.wait()
    check_ready(engine, optimizer, "zerostage.load")
    regroup(engine)
    source = _open(Path(path).absolute(), engine.world)
    groups = _together(engine.world, lambda: _match(engine, source, optimizer, strict))
    _together(engine.world, lambda: _read(engine, source, optimizer is not None), "the model is loaded in part: ")
    if groups is not None:
        for group, settings in zip(optimizer.param_groups, groups):
            group.update(settings)
    own = source.of_rank(engine.world.rank) if isinstance(source, StoredSource) and source.ranks == engine.world.size else None
    if optimizer is not None and isinstance(source, StoredSource):
        optimizer.skipped_steps = source.skipped
        _restore_random(engine.world, source, own)
    if own is not None and own["extra"]:
        return own["extra"][0]
    if own is None and isinstance(source, StoredSource) and source.extras_differ and engine.world.rank == 0:
        log.warning(f"the ranks that saved {source.path} had different `extra`s; on another number of ranks all get rank 0's")
    return source.extra()


def _together(world: World, work: Any, prefix: str = "") -> Any:
    """What `work` returns. Where it fails on a rank it raises on all, the failing one with its own error."""
    problem, outcome = None, None
    try:
        outcome = work()
    except Exception as error:
        problem = error
    text = None if problem is None else str(problem.args[0]) if isinstance(problem, KeyError) else str(problem)
    texts = world.collect_objects(text, "zerostage.load")
    for rank, text in enumerate(texts):
        if text is not None:
            if problem is not None and not prefix:
                raise problem
            raise RuntimeError(f"zerostage.load failed on rank {rank}: {prefix}{text}") from problem
    return outcome


def _open(path: Path, world: World) -> Source:
    """The source at `path`; of a folder of checkpoints the newest one whose checksums are right, on all ranks the same."""
    found: list[Path] | str = []
    if world.rank == 0:
        found = list(folder.candidates(path)) or ([path] if path.exists() and is_source(path) else [])
        if not found:
            reason = "there is no such folder" if not path.exists() else "it has no checkpoint, nor is it one"
            found = f"no checkpoint at {path}: {reason}"
    found = world.collect_objects(found, "zerostage.load")[0]
    if isinstance(found, str):
        raise FileNotFoundError(found)
    told = []
    for candidate in found:
        problems = _problems(candidate, world)
        if not problems:
            if told and world.rank == 0:
                log.warning(f"took {candidate} and passed over {len(told)} newer: " + "; ".join(told))
            return _together(world, lambda: open_source(candidate))
        told.append(problems[0])
    rest = "" if len(found) > 1 else _hint(path, world)
    raise DamagedError(f"{told[0]}{f' (and {len(told) - 1} more checkpoints are damaged)' if len(told) > 1 else ''}{rest}")


def _problems(path: Path, world: World) -> list[str]:
    if not folder.is_checkpoint(path):
        return []
    mine = folder.check(path, (world.rank, world.size)) if path.is_dir() else [f"{path} is not there, as seen from rank {world.rank}"]
    return [problem for problems in world.collect_objects(mine, "zerostage.load") for problem in problems]


def _hint(path: Path, world: World) -> str:
    others = (other for other in folder.newest_first(path.parent) if other != path and not folder.check_sizes(other))
    whole = next(others, None) if world.rank == 0 else None
    whole = world.collect_objects(whole, "zerostage.load")[0]
    return f". {whole} is whole: load that, or the folder above, which takes the newest whole one" if whole else ""


def _match(engine: Engine, source: Source, optimizer: Any, strict: bool) -> list[dict[str, Any]] | None:
    """Check that everything fits, and return the settings for each of the optimizer's parameter groups, if it has stored ones."""
    names = {name for flat in engine.flats for slot in flat.layout.slots for name in slot.names}
    for flat in engine.flats:
        for slot in flat.layout.slots:
            name, stored = _find(source, slot.names)
            if stored.shape != slot.shape:
                raise ValueError(f"'{name}' has shape {stored.shape} in {source.what} and {slot.shape} in the model")
    known = names | {name for name, _ in _buffers(engine.model)}
    left = [name for name in source.names if name not in known]
    if left and strict:
        aliases = {id(source.parameters[name]) for name in names if name in source.parameters}
        left = [name for name in left if id(source.parameters[name]) not in aliases]
        if left:
            raise KeyError(
                f"the checkpoint has {len(left)} parameters that the model does not have ({some(left)}): build the model that was "
                "saved, or pass strict=False"
            )
    buffers = source.all_buffers() if isinstance(source, StoredSource) else source.buffers()
    for name, buffer in _buffers(engine.model):
        if name in buffers and buffers[name].shape != buffer.shape and name not in not_persistent(engine.model):
            raise ValueError(f"the buffer '{name}' has shape {tuple(buffers[name].shape)} in {source.what} and {tuple(buffer.shape)} in the model")
    if optimizer is None:
        return None
    if source.optimizer is None:
        raise ValueError(
            f"{source.what} has no optimizer state: call zerostage.load(path, model) for the weights alone, and start with a new optimizer"
        )
    if source.optimizer and source.optimizer != type(optimizer).__name__:
        raise ValueError(
            f"{source.what} was saved with {source.optimizer} and the optimizer is {type(optimizer).__name__}, whose state is another: "
            "use the same, or call zerostage.load(path, model) for the weights alone"
        )
    return _match_groups(engine, source, optimizer) if source.groups is not None else None


def _match_groups(engine: Engine, source: Source, optimizer: Any) -> list[dict[str, Any]]:
    names_of = {id(p): slot.names for flat in engine.flats for slot, p in zip(flat.layout.slots, flat.parameters)}
    group_of = {name: number for number, group in enumerate(source.groups) for name in group["names"]}
    result = []
    for number, group in enumerate(optimizer.param_groups):
        members: dict[int, str] = {}
        for parameter in group["params"]:
            for name in names_of[id(parameter)]:
                if name in group_of:
                    members.setdefault(group_of[name], name)
        if not group["params"] and len(source.groups) == len(optimizer.param_groups) and not source.groups[number]["names"]:
            members = {number: ""}  # an empty group, which a scheduler may drive
        stored = [{k: v for k, v in source.groups[place].items() if k != "names"} for place in members]
        for other, name in zip(stored[1:], list(members.values())[1:]):
            differing = [k for k in other if repr(other[k]) != repr(stored[0].get(k))]
            if differing:
                raise ValueError(
                    f"'{next(iter(members.values()))}' and '{name}' are in one parameter group (number {number}) and were saved in two "
                    f"with different {some(differing)}: make the groups as they were when it was saved"
                )
        result.append(stored[0] if stored else {})
    return result


def _find(source: Source, names: tuple[str, ...]) -> tuple[str, Stored]:
    found = [name for name in names if name in source.parameters]
    if found:  # others keep a tied parameter's state under one of its names only
        name = max(found, key=lambda name: len(source.parameters[name].terms))
        return name, source.parameters[name]
    near = difflib.get_close_matches(names[0], source.names, 1)
    raise KeyError(f"'{names[0]}' is not in {source.what}" + (f"; the closest name there is '{near[0]}'" if near else ""))


def _read(engine: Engine, source: Source, with_states: bool) -> None:
    averages = list(engine.averages.values())
    for flat in engine.flats:
        _read_weights(flat, source)
        for place, average in enumerate(averages):
            values = average.follow().get(flat)
            if values is not None:
                _fill_average(flat, values, f"{AVERAGE}{place}", source)
        if with_states and engine.driver is not None and flat.trainable:
            _read_states(engine, flat, source)
    _read_buffers(engine, source)
    engine.loaded(name for flat in engine.flats for slot in flat.layout.slots for name in slot.names)


def _pieces(flat: Flat, source: Source, level: int, target: torch.Tensor, term: Any) -> dict[str, list[Piece]]:
    """By stored term, the pieces that fill `target`, which has the flat's elements `bounds[level]`."""
    base, end = flat.bounds[level]
    wanted: dict[str, list[Piece]] = {}
    for index, first, last in flat.layout.segments(base, end):
        slot = flat.layout.slots[index]
        last = min(last, slot.start + slot.numel)
        if first < last:
            name, stored = _find(source, slot.names)
            if (chosen := term(stored)) is not None:
                piece = Piece(name, first - slot.start, last - slot.start, target[first - base : last - base])
                wanted.setdefault(chosen, []).append(piece)
    return wanted


def _widest(stored: Stored) -> str:
    return MASTER if MASTER in stored.terms else WEIGHTS


def _read_weights(flat: Flat, source: Source) -> None:
    def weights(stored: Stored) -> str:
        return WEIGHTS if stored.terms.get(WEIGHTS) == flat.dtype else _widest(stored)

    for term, pieces in _pieces(flat, source, 1, flat.shard, weights).items():
        source.read(term, pieces)
    if flat.has_master:
        for term, pieces in _pieces(flat, source, 3, flat.master, _widest).items():
            source.read(term, pieces)
        if isinstance(source, StoredSource):
            flat.follow()  # weights that were changed by hand between the last step and the save
    for index, slot in enumerate(flat.layout.slots):
        flat.sources[index] = _find(source, slot.names)[1].source
    flat.updated()
    flat.note_versions()


def _fill_average(flat: Flat, values: torch.Tensor, term: str, source: Source) -> None:
    """An average that the checkpoint does not have starts at the loaded masters."""
    values.copy_(flat.master)
    for found, pieces in _pieces(flat, source, 3, values, lambda stored: term if term in stored.terms else None).items():
        source.read(found, pieces)


def _read_states(engine: Engine, flat: Flat, source: Source) -> None:
    wanted: dict[str, list[Piece]] = {}
    states: list[tuple[Segment, dict[str, Any]]] = []
    for segment in engine.driver.segments[flat]:
        slot = flat.layout.slots[segment.index]
        name, stored = _find(source, slot.names)
        state: dict[str, Any] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in stored.scalars.items()}
        last = min(segment.stop, slot.start + slot.numel)
        for term in stored.states:
            dtype = stored.terms[term]
            if dtype == stored.terms[_widest(stored)]:  # states follow the master
                dtype = flat.master_dtype
            state[term] = torch.zeros(segment.stop - segment.start, dtype=dtype, device=flat.device)
            if segment.start < last:
                part = state[term][: last - segment.start]
                wanted.setdefault(term, []).append(Piece(name, segment.start - slot.start, last - slot.start, part))
        states.append((segment, state))
    for term, pieces in wanted.items():
        source.read(term, pieces)
    engine.driver.adopt(states)
    engine.driver.reserved.pop(flat, None)


def _buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(own_name(name), buffer) for name, buffer in model.named_buffers(remove_duplicate=False)]


def _read_buffers(engine: Engine, source: Source) -> None:
    if isinstance(source, StoredSource):
        values = dict(source.all_buffers())
        if source.ranks == engine.world.size:
            values |= source.of_rank(engine.world.rank)["buffers"]
    else:
        values = source.buffers()
    for path, module in engine.model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            if buffer is None:
                continue
            value = values.get(own_name(f"{path}.{key}" if path else key))
            fits = value is not None and value.shape == buffer.shape
            if buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=engine.world.device)
            if fits:
                module._buffers[key].copy_(value)
            elif buffer.is_meta:
                compute_buffers(engine.model, own_name(path), module, [key])


def _restore_random(world: World, source: StoredSource, own: dict[str, Any] | None) -> None:
    """This rank's random states exactly, or, on another number of ranks, states derived from rank 0's."""
    if own is None:
        first = source.of_rank(0)["random"]["torch"].numpy().tobytes()
        seed = int.from_bytes(hashlib.sha256(first + f" rank {world.rank} of {world.size}".encode()).digest()[:4], "little")
        if world.rank == 0:
            log.warning(
                f"{source.path} was saved on {source.ranks} ranks and is loaded on {world.size}: weights and optimizer state are the "
                "same bits, random states (dropout) are new ones, derived from rank 0's"
            )
        random.seed(seed)
        torch.manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        return
    states = own["random"]
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
