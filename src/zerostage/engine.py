"""The public functions: shard a model and its optimizer, and what a training script then calls."""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from zerostage import ledger as accounts
from zerostage.autograd import not_compiled
from zerostage.collectives import World
from zerostage.division import Division, divide, own_name, unwrapped
from zerostage.flat import Flat
from zerostage.ledger import Ledger, Traffic
from zerostage.norm import grad_norm, scale_gradients
from zerostage.optimizer import Driver
from zerostage.partition import Partition
from zerostage.precision import Precision
from zerostage.schedule import Schedule
from zerostage.unfreezing import regroup
from zerostage.unit import Unit


class Engine:
    """What holds one sharded model together. Reached through `engine_of(model)`."""

    def __init__(
        self,
        model: nn.Module,
        divisions: list[Division],
        world: World,
        precision: Precision | None,
        prefetch: int,
        optimized: bool,
        missing: set[str],
    ) -> None:
        self.model, self.world, self.prefetch = model, world, prefetch
        self.precision, self.optimized = precision, optimized
        self.units: list[Unit] = []
        self.driver: Driver | None = None
        self.averages: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # the `EMA`s of this model
        self.saving: Any = None  # the checkpoint that is being saved while training goes on
        self.missing = missing  # parameters, by first name, that have no values yet
        self._flats_made = 0
        for division in divisions:
            unit = Unit(division.name, division.modules)
            unit.engine, unit.resident = self, division.resident
            for parameters, names in _kinds(division, precision):
                flat = self.new_flat(unit, parameters, names)
                flat.fill([parameter.detach() for parameter in parameters], missing.issuperset(n[0] for n in names))
                unit.flats.append(flat)
            unit.rest()
            self.units.append(unit)
        self._places: list[tuple[dict[str, Any], str, Any]] = []  # where each parameter and the modules above it are
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self._places.append((module._parameters, key, parameter))
            for key, child in module._modules.items():
                if child is not None and next(child.parameters(), None) is not None:
                    self._places.append((module._modules, key, child))
        self.schedule = Schedule(model, self.units, world, prefetch)
        self.schedule.before_forward = partial(regroup, self)
        if self.missing:
            self._unready = model.register_forward_pre_hook(self._refuse_unready, prepend=True)

    def new_flat(self, unit: Unit, parameters: list[nn.Parameter], names: list[tuple[str, ...]]) -> Flat:
        """A flat of parameters of one kind (see `_kinds`), yet without values."""
        precision = _precision_of(parameters[0], self.precision)
        self._flats_made += 1
        return Flat(self._flats_made - 1, unit, parameters, names, precision, self.world, self.optimized)

    @property
    def flats(self) -> list[Flat]:
        return self.schedule.flats

    @property
    def partition(self) -> Partition:
        return self.world.partition

    @property
    def ranks(self) -> int:
        return self.world.size

    @not_compiled
    def _refuse_unready(self, module: nn.Module, args: Any) -> None:
        raise RuntimeError(
            f"the model was built on the meta device and '{min(self.missing)}' (of {len(self.missing)} parameters) has "
            "no values yet: call zerostage.load_weights(model, folder) before the first forward"
        )

    def check_places(self) -> None:
        """Raise when somebody has put another parameter or module in the place of a managed one."""
        for held, key, thing in self._places:
            if unwrapped(held.get(key)) is not unwrapped(thing):  # torch.compile may come later
                parameter = next(thing.parameters()) if isinstance(thing, nn.Module) else thing
                name = parameter._flat.layout.slots[parameter._index].name
                raise RuntimeError(
                    f"'{name}' is no longer the parameter that was sharded: the model was changed after zerostage.shard. "
                    "Write new values into it within `with zerostage.gathered(model, write=True):`, or change the model "
                    "before it is sharded"
                )

    def loaded(self, names: Iterable[str]) -> None:
        """Note that parameters, by first name, have values now."""
        before = bool(self.missing)
        self.missing.difference_update(names)
        if before and not self.missing:
            self._unready.remove()

    def storages(self) -> dict[str, list[torch.Tensor]]:
        """The live tensors by term: what the ledger and the audit measure."""
        flats = self.flats
        trainable = [flat for flat in flats if flat.trainable]
        result = {
            "weights": [flat.shard for flat in flats],
            "gradients": [flat.grad for flat in trainable if flat.grad is not None],
            "master": [flat.master for flat in trainable if flat.has_master],
        }
        for name, tensors in (self.driver.state_tensors() if self.driver else {}).items():
            result[name] = tensors
        for average in self.averages.values():
            result["average"] = result.get("average", []) + average.tensors()
        if aside := [flat.aside for flat in flats if flat.aside is not None]:
            result["set aside"] = aside
        if self.driver is not None and self.driver.reserved:
            result["reserved"] = list(self.driver.reserved.values())
        result["buffers"] = list(self.model.buffers())
        result["gathered"] = [flat.whole for flat in flats if flat.divided]
        result["in_flight"] = [flat.local for flat in trainable if flat.local is not None]
        return result

    def unscale(self, places: list[tuple[Flat, int]], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
        """torch.amp.GradScaler's work on divided gradients: scale them; `found_inf` becomes 1 on all ranks or on none."""
        slices, wanted = [], set(places)
        for flat in dict.fromkeys(flat for flat, _ in places):
            base, gradient = flat.bounds[3][0], flat.settled_grad()
            parts = flat.layout.segments(*flat.bounds[3])
            slices += [gradient[a - base : b - base] for index, a, b in parts if (flat, index) in wanted]
            flat.version += 1
        if slices:
            torch._amp_foreach_non_finite_check_and_unscale_(slices, found_inf, inverse_scale)
        found_inf.copy_(self.world.maximum(found_inf.cpu(), "GradScaler.unscale_"))

    def units_of(self, what: nn.Module | nn.Parameter | Iterable[Any]) -> list[Unit]:
        """The units that hold the given module's or modules' parameters, in order."""
        items = [what] if isinstance(what, (nn.Module, torch.Tensor)) else list(what)
        wanted = {
            parameter._flat.unit
            for item in items
            for parameter in (item.parameters() if isinstance(item, nn.Module) else [item])
            if hasattr(parameter, "_flat")
        }
        return [unit for unit in self.units if unit in wanted]

    def close(self) -> None:
        if self.saving is not None:
            self.saving.wait()
        self.schedule.close()
        if self.driver is not None:
            self.driver.close()
        self.world.close()


def engine_of(model: Any) -> Engine | None:
    """The engine of a sharded model, of a module within or around it, or of a parameter; None if there is none."""
    items = [model] if isinstance(model, torch.Tensor) else None
    if items is None:
        items = list(model.parameters()) if isinstance(model, nn.Module) else list(model)
    for item in items:
        for parameter in item.parameters() if isinstance(item, nn.Module) else [item]:
            flat = parameter.__dict__.get("_flat")
            if flat is not None:
                return flat.unit.engine
    return None


def require(model: Any) -> Engine:
    """The engine of a sharded model; ValueError if it is not sharded."""
    engine = engine_of(model)
    if engine is None:
        raise ValueError("this model is not sharded: call zerostage.shard(model, optimizer) first")
    return engine


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    stage: int = 3,
    *,
    partition: Partition | None = None,
    group: Any = None,
    units: Sequence[nn.Module | str | type] | None = None,
    precision: Precision | None = None,
    prefetch: int = 1,
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Divide a model's training state over the ranks, in place. Every rank must call it alike.

    model: any module; rank 0's values are taken on all ranks, of parameters and of buffers.
        From then on each rank keeps its own buffers, such as BatchNorm's running statistics.
        Built on the meta device, it needs `load_weights` before its first forward.
    optimizer: an elementwise torch optimizer built over `model.parameters()`. It stays the
        same object. Without one, the model can be run and differentiated but not stepped.
    stage: 0 to 3, or `partition` in its place.
    group: the process group of the data-parallel ranks (default: all). Without torchrun and
        without a process group, there is one rank.
    units: modules, names or classes that shall each be gathered as one (default: found).
    precision: dtypes; None keeps each parameter's own, with fp32 masters for 16-bit ones.
    prefetch: how many units are gathered ahead of the one that computes (stage 3).

    Returns (model, optimizer). Raises ValueError, on all ranks, when ranks disagree about
    the model or the settings, or when the optimizer cannot run on divided parameters.
    """
    _check_arguments(model, optimizer, prefetch)
    device = next((p.device for p in model.parameters() if not p.is_meta), None)
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    world = World(group, partition, device, lambda ranks: Partition.from_stage(stage, ranks))
    given, model = model, model._modules.get("_orig_mod", model)  # the hooks must hold for torch.compile's twin too
    divisions = divide(model, units)
    on_meta = _check_agreement(world, model, divisions, optimizer, precision, prefetch)
    _share_buffers(model, world, on_meta)
    missing = {names[0] for d in divisions for names in d.names} & on_meta
    engine = Engine(model, divisions, world, precision, prefetch, optimizer is not None, missing)
    _guard_conversions(engine)
    _keep_generation_in_step(engine)
    if optimizer is not None:
        engine.driver = Driver(optimizer, engine.schedule, world, engine.check_places)
        _warn_without_masters(engine)
    for flat in engine.flats:
        flat.count_uses()
    model.register_load_state_dict_pre_hook(lambda *_: engine.schedule.refuse_averaged("load_state_dict"))
    model.register_load_state_dict_post_hook(lambda module, keys: _after_load_state_dict(engine))
    world.meter.reset()
    return given, optimizer


def _check_arguments(model: nn.Module, optimizer: Any, prefetch: int) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; shard takes a torch.nn.Module")
    if engine_of(model) is not None:
        raise ValueError("this model is sharded already; shard it once, with its optimizer")
    if not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(f"prefetch is {prefetch!r}; it must be a whole number of units, 0 or more")
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; shard takes a torch.optim.Optimizer")
    known = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ValueError(
                    f"parameter group {number} of the optimizer has a parameter of shape {tuple(parameter.shape)} that "
                    "the model does not have: build the optimizer over model.parameters() of this model"
                )


def _check_agreement(
    world: World, model: nn.Module, divisions: list[Division], optimizer: Any, precision: Any, prefetch: int
) -> set[str]:
    """All ranks must divide the same model in the same way; otherwise their collectives would not match.

    Returns the names of what is on the meta device on rank 0, and so on all ranks.
    """
    facts: dict[str, Any] = {
        "settings": (world.partition, precision, prefetch, type(optimizer).__name__),
        "units": [division.name for division in divisions],
        "buffers": [(own_name(name), tuple(b.shape), b.dtype) for name, b in model.named_buffers()],
    }
    for division in divisions:
        for parameter, names in zip(division.parameters, division.names):
            facts[names[0]] = (names, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
    if optimizer is not None:
        names_of = {p: names[0] for d in divisions for p, names in zip(d.parameters, d.names)}
        for number, group in enumerate(optimizer.param_groups):
            facts[f"parameter group {number}"] = [names_of[p] for p in group["params"]]
    # a rank of many shall not hold a copy of everybody's facts where one word of each will do
    digests = world.collect_objects(hashlib.sha256(repr(facts).encode()).hexdigest(), "zerostage.shard")
    everyone = world.collect_objects(facts, "zerostage.shard") if len(set(digests)) > 1 else [facts]
    for rank, other in enumerate(everyone):
        for key in everyone[0] | other:
            mine, theirs = everyone[0].get(key, "absent"), other.get(key, "absent")
            if mine != theirs:
                raise ValueError(
                    f"the ranks do not shard the same model in the same way: '{key}' is {mine} on rank 0 and "
                    f"{theirs} on rank {rank}"
                )
    on_meta = {ns[0] for d in divisions for p, ns in zip(d.parameters, d.names) if p.is_meta}
    on_meta |= {own_name(name) for name, buffer in model.named_buffers() if buffer.is_meta}
    for rank, there in enumerate(everywhere := world.collect_objects(on_meta, "zerostage.shard")):
        if only := everywhere[0] - there:
            raise ValueError(f"'{min(only)}' is on the meta device on rank 0 but not on rank {rank}: give rank 0 the values")
    return everywhere[0]


def _share_buffers(model: nn.Module, world: World, on_meta: set[str]) -> None:
    """Give every rank rank 0's buffers. Each rank keeps its own from then on."""
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            name = own_name(f"{prefix}.{key}" if prefix else key)
            if buffer is None or name in on_meta:
                continue
            if buffer.is_meta:
                module._buffers[key] = buffer = torch.empty_like(buffer, device=world.device)
            world.broadcast(buffer.data, f"the buffer {name}")


def _kinds(division: Division, precision: Precision | None) -> list[tuple[list[nn.Parameter], list[tuple[str, ...]]]]:
    """A unit's parameters by dtype and trainable or not, trainable ones first; each kind is one flat."""
    kinds: dict[Any, tuple[list[nn.Parameter], list[tuple[str, ...]]]] = {}
    for parameter, names in zip(division.parameters, division.names):
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ValueError(f"'{names[0]}' is trainable and of dtype {parameter.dtype}; zerostage trains real numbers")
        kind = (not parameter.requires_grad, str(_precision_of(parameter, precision) or parameter.dtype))
        members = kinds.setdefault(kind, ([], []))
        members[0].append(parameter)
        members[1].append(names)
    return [kinds[kind] for kind in sorted(kinds)]


def _precision_of(parameter: nn.Parameter, precision: Precision | None) -> Precision | None:
    """The dtypes of one parameter's terms; None where it keeps its own and is not trained."""
    if not parameter.is_floating_point():
        return None
    return precision or (Precision.of(parameter.dtype) if parameter.requires_grad else None)


def _guard_conversions(engine: Engine) -> None:
    """`model.to`, `.half` and the like would replace the parameters' memory; let only those through that change nothing.

    A copy would have the hooks of this model's engine and weights that nobody keeps; refuse it.
    """

    def apply(fn: Any, recurse: bool = True) -> nn.Module:
        for flat in engine.flats:
            before = torch.empty(1, dtype=flat.dtype, device=flat.device)
            after = fn(before)
            if after.dtype != before.dtype or after.device != before.device:
                raise RuntimeError(
                    f"the model is sharded; it cannot be moved or cast (here from {before.dtype} on {before.device} to "
                    f"{after.dtype} on {after.device}). Do that before zerostage.shard, or give shard a precision"
                )
        for module in engine.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
        return engine.model

    engine.model._apply = apply

    def refuse_copy(*_: Any) -> None:
        raise RuntimeError(
            "a sharded model, or a part of one, cannot be copied or pickled as it is: build a second model and load "
            "zerostage.full_state_dict(model) into it, or save that"
        )

    for module in engine.model.modules():
        if next(module.parameters(), None) is not None:
            module.__dict__["__reduce_ex__"] = refuse_copy


def _keep_generation_in_step(engine: Engine) -> None:
    """Have transformers' `generate` go on until the last rank is done: an earlier one would be missed in a gather."""
    if engine.partition.weights > 1 and engine.world.is_whole:
        for module in engine.model.modules():
            if hasattr(module, "generate"):
                # the marks by which it knows modules that gather, FSDP's; torch.compile expects both
                module._is_fsdp_managed_module = module._fsdp_use_orig_params = True


def _warn_without_masters(engine: Engine) -> None:
    bare = [f for f in engine.flats if f.trainable and not f.has_master and f.dtype.itemsize < 4]
    if bare and engine.world.rank == 0:
        warnings.warn(
            f"no master weights: the optimizer updates {bare[0].dtype} weights, such as "
            f"'{bare[0].layout.slots[0].name}', directly. A bf16 number has 8 bits of mantissa, so that an update below "
            "about 1/256 of a weight rounds to nothing; use Precision(master=torch.float32) to keep it",
            stacklevel=3,
        )


def _after_load_state_dict(engine: Engine) -> None:
    """Weights that were loaded in place are what the masters follow from here on."""
    for flat in engine.flats:
        if flat.trainable and not flat.divided:
            flat.absorb_changes()


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward without communication: gradients gather on this rank until a backward outside the block.

    Saves the reductions of all but the last micro-batch. Stages 0 and 1 keep whole gradients
    anyway, so it costs no memory there. Stages 2 and 3 hold a whole local copy of the
    gradients meanwhile (2 bytes per parameter in bf16), on top of the kept slice.
    Accumulates in the gradients' dtype.
    """
    with require(model).schedule.without_sync():
        yield


@not_compiled
def reserve(model: nn.Module) -> None:
    """Take now the memory of the gradients and of the optimizer's state, which else come with the first backward and step.

    So a run that does not fit ends in its first step and not in its second, whose forward and
    backward are the first to run beside the state. The state itself is still made by the first
    step, from the memory that is held for it until then ('reserved' in `memory(model).measured`).
    State that has been loaded is counted in. Raises ValueError where the model was sharded without
    an optimizer.
    """
    engine = require(model)
    if engine.driver is None:
        raise ValueError("the model was sharded without an optimizer, so there is no state to reserve memory for")
    engine.driver.reserve()


@contextmanager
def gathered(what: nn.Module | nn.Parameter | Iterable[Any], write: bool = False) -> Iterator[None]:
    """Whole weights inside the block, on every rank; every rank must enter it alike.

    what: the model, modules or parameters of it; their whole units are gathered.
    write: keep changes made inside, rank 0's on all ranks. Without it, changes to divided
        weights are lost at the end of the block.

    A loss computed inside from the weights may be differentiated after the block.
    """
    items = [what] if isinstance(what, (nn.Module, torch.Tensor)) else list(what)
    engine = require(items)
    regroup(engine)
    units = engine.units_of(items)
    schedule = engine.schedule
    if write:
        schedule.refuse_averaged("gathered(write=True)")
    schedule.hold(units)
    divided = [flat for unit in units for flat in unit.flats if flat.divided]
    for flat in divided:
        flat.note_versions()
    try:
        with schedule.saved.hooks() if divided and torch.is_grad_enabled() else nullcontext():
            yield
        if write:
            for flat in (flat for unit in units for flat in unit.flats):
                engine.world.broadcast(flat.whole, f"the values written to {flat.unit.name}")
                flat.write_back()
        else:
            _refuse_lost_changes(divided)
    finally:
        schedule.let_go(units)


def _refuse_lost_changes(divided: list[Flat]) -> None:
    for flat in divided:
        changed = flat.changed()
        if not changed:
            continue
        base = flat.bounds[1][0]
        seen = {index: flat.mine[a - base : b - base] for index, a, b in flat.layout.segments(*flat.bounds[1])}
        kept = {index: flat.shard[a - base : b - base] for index, a, b in flat.layout.segments(*flat.bounds[1])}
        for index in changed:
            # `p.data` may have been asked for to be read, so there the values tell
            if index not in flat.exposed or index in seen and not torch.equal(seen[index], kept[index]):
                raise RuntimeError(
                    f"'{flat.layout.slots[index].name}' was changed within `gathered`, where changes are lost; "
                    "use zerostage.gathered(..., write=True) to keep them"
                )


@not_compiled
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; every rank must call it.

    Returns the norm before clipping: an fp32 scalar on the model's device, the same on all
    ranks and at every stage. The factor is min(1, max_norm / (norm + 1e-6)), as in torch.
    A norm that is not finite changes nothing; the step that follows is skipped.
    """
    engine = require(model)
    engine.schedule.refuse_unreduced("clip_grad_norm_")
    flats = [flat for flat in engine.flats if flat.trainable]
    norm = grad_norm(flats, engine.world, float(norm_type))
    result = torch.tensor(norm, dtype=torch.float32)
    factor = float(max_norm / (result + 1e-6))
    if factor < 1.0:
        scale_gradients(flats, factor)
    if engine.driver is not None:
        engine.driver.known_norm = tuple(flat.version for flat in engine.driver.flats), norm
    return result.to(engine.world.device)


@not_compiled
def full_state_dict(
    model: nn.Module, *, rank0_only: bool = True, trainable_only: bool = False
) -> dict[str, torch.Tensor]:
    """Whole weights and persistent buffers on the CPU under the names of `model.state_dict()`.

    On rank 0, empty on the others unless `rank0_only` is False. `trainable_only`: the
    parameters that require gradients now and nothing else. Gathered unit by unit and
    copied one tensor at a time; shared parameters appear under each name and share memory.
    Buffers, which each rank keeps for itself, are rank 0's. Every rank must call it.
    """
    engine = require(model)
    engine.check_places()
    wanted = not rank0_only or engine.world.rank == 0
    values: dict[str, torch.Tensor] = {}
    for unit in engine.units:
        chosen = [
            (slot, parameter)
            for flat in unit.flats
            for slot, parameter in zip(flat.layout.slots, flat.parameters)
            if parameter.requires_grad or not trainable_only
        ]
        with torch.no_grad(), gathered([parameter for _, parameter in chosen]) if chosen else nullcontext():
            for slot, parameter in chosen if wanted else ():
                values |= dict.fromkeys(slot.names, parameter.detach().to("cpu", copy=True))
    if not wanted or trainable_only:
        return values
    for path, module in engine.model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                name = own_name(f"{path}.{key}" if path else key)
                values[name] = buffer.detach().to("cpu", copy=True)
                if not rank0_only:
                    engine.world.broadcast(values[name], f"the buffer {name}")
    return values


@not_compiled
def memory(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Ledger:
    """Bytes on this rank by term: expected, measured now, and peak. See `Ledger`."""
    engine = require(model)
    if optimizer is not None and (engine.driver is None or engine.driver.optimizer is not optimizer):
        raise ValueError("this optimizer is not the one that was sharded with the model")
    states = list(engine.driver.state_tensors()) if engine.driver else []
    averages = len(engine.averages)
    return accounts.ledger(engine.units, engine.world, engine.prefetch, engine.storages(), states, averages)


def traffic(model: nn.Module) -> Traffic:
    """Bytes sent by this rank by collective. See `Traffic`."""
    engine = require(model)
    return Traffic(engine.world, engine.units)


@not_compiled
def close(model: nn.Module) -> None:
    """Remove the hooks and release threads and process groups, once a save under way is done. The model's weights stay as they are."""
    require(model).close()
