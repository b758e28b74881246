"""What a rank puts into a checkpoint: its share of every term, and what the index and the manifest say of it."""

from __future__ import annotations

import hashlib
import io
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import zerostage
from zerostage.checkpoint.source import AVERAGE, MASTER, WEIGHTS
from zerostage.checkpoint.stored import FORMAT, pack, unpack
from zerostage.checkpoint.writing import Item
from zerostage.division import own_name
from zerostage.ema import EMA
from zerostage.engine import Engine
from zerostage.flat import Flat


def check_ready(engine: Engine, optimizer: Any, call: str) -> None:
    """Raise where the model's weights are not its own or not in their places, or `optimizer` is not that of the model."""
    if optimizer is not None and (engine.driver is None or engine.driver.optimizer is not optimizer):
        raise ValueError(f"{call}: this optimizer is not the one that was sharded with the model")
    engine.schedule.refuse_averaged(call)
    engine.check_places()
    for unit in engine.units:
        if unit.pinned:
            raise RuntimeError(f"{call} within `gathered` of {unit.name}: leave the block before")


def given(value: Any) -> Any:
    return value


def _plain(extra: Any) -> Any:
    """`extra` with the `state_dict()` in the place of each value that has one."""
    if isinstance(extra, EMA):
        raise ValueError("an EMA is saved and loaded with its model: leave it out of `extra`")
    if isinstance(extra, dict):
        return {key: _plain(value) for key, value in extra.items()}
    if isinstance(extra, (list, tuple)) and type(extra) in (list, tuple):
        return type(extra)(_plain(value) for value in extra)
    if hasattr(extra, "state_dict"):
        return extra.state_dict()
    return extra


def _loadable(extra: Any) -> Any:
    """`extra` as it will come back. Raises ValueError that names what would not."""
    extra = _plain(extra)
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


def collect(engine: Engine, optimized: bool, extra: Any) -> tuple[list[Item], dict[str, Any], dict[str, Any]]:
    """This rank's items, the index's entries that all ranks know, and the manifest's. Ranks agree here; nothing is copied."""
    driver = engine.driver if optimized else None
    problem: Exception | None = None
    values: dict[str, Any] = {}
    mine: dict[str, Any] = {}
    try:
        values["extra"] = _loadable(extra)
        values["buffers"] = {own_name(n): b.cpu().clone() for n, b in engine.model.named_buffers(remove_duplicate=False)}
        mine["extra"] = _digest(values["extra"])
        mine["buffers"] = {name: _digest(buffer) for name, buffer in values["buffers"].items()}
        mine["terms"] = {i: _terms(driver, flat) for i, flat in enumerate(engine.flats) if driver and flat.trainable}
        mine["states"] = _states(driver) if driver else []
    except Exception as error:  # the others must not wait for this rank
        problem, mine["problem"] = error, f"{type(error).__name__}: {error}"
    everyone = engine.world.collect_objects(mine, "zerostage.save, which every rank must call")
    for rank, other in enumerate(everyone):
        if "problem" in other:
            raise problem or ValueError(f"zerostage.save failed on rank {rank}: {other['problem']}")
    averages = list(engine.averages.values())
    items: list[Item] = []
    for number, flat in enumerate(engine.flats):
        terms = {term: dtype for other in everyone for term, dtype in other["terms"].get(number, {}).items()}
        items += _items_of(engine, number, flat, terms, averages)
    items = [item for item in items if item.numel]  # a flat of empty parameters has nothing to write
    index = {
        "parameters": [
            [slot.names, number, slot.start, slot.shape, str(flat.sources[place])[6:], flat.parameters[place].requires_grad]
            for number, flat in enumerate(engine.flats)
            for place, slot in enumerate(flat.layout.slots)
        ],
        "always": [WEIGHTS, MASTER, *(f"{AVERAGE}{number}" for number in range(len(averages)))],
        "dtypes": {item.key: str(item.dtype)[6:] for item in items},
    }
    states = _joined(other["states"] for other in everyone)
    described = _described(engine, driver, states, items)
    return items + _objects(engine, driver, values, states, mine, everyone), index, described


def _objects(engine: Engine, driver: Any, values: dict[str, Any], states: Any, mine: Any, everyone: list[Any]) -> list[Item]:
    """What is no long tensor: of each rank what only it has, and on rank 0 what all have."""
    differing = [name for name in mine["buffers"] if any(o["buffers"].get(name) != mine["buffers"][name] for o in everyone)]
    found: dict[str, Any] = {
        f"rank.{engine.world.rank}": {
            "random": random_states(),
            "buffers": {name: values["buffers"][name] for name in differing},
            "extra": [values["extra"]] if mine["extra"] != everyone[0]["extra"] else [],
        }
    }
    if engine.world.rank == 0:
        found["common"] = {
            "states": states,
            "groups": _groups(engine) if driver else None,
            "buffers": values["buffers"],
            "unsaved": sorted(not_persistent(engine.model)),
            "averages": [average.decay for average in engine.averages.values()],
            "skipped": driver.optimizer.skipped_steps if driver else 0,
            "extra": values["extra"],
            "extras_differ": any(other["extra"] != everyone[0]["extra"] for other in everyone),
        }
    packed = {key: pack(value) for key, value in found.items()}
    return [Item(key, partial(io.BytesIO, data), len(data)) for key, data in packed.items()]


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
            items.append(item(f"{AVERAGE}{place}", values.dtype, partial(given, values[first - own : last - own])))
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


def not_persistent(model: nn.Module) -> set[str]:
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


def _described(engine: Engine, driver: Any, states: Any, items: list[Item]) -> dict[str, Any]:
    """The manifest: what `inspect` tells."""
    world = engine.world
    steps = [int(scalars["step"]) for _, scalars, _ in states if "step" in scalars]
    by_term: dict[str, int] = {}
    for item in items:
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
