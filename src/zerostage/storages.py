"""What one rank really holds of a model and its optimizer: live storages, each counted once, by term.

Every engine keeps its tensors somewhere else: parameters that are views of flat buffers,
DTensors, parameters whose storage was freed while their shape stayed, optimizers inside
optimizers. `hold` knows where, and brings them into one form. Local to one rank, no
communication; `zerostage.audit` compares the ranks.

FSDP, FSDP2 and DeepSpeed show too little in public: they are read through private
attributes, which a newer version of theirs may rename.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerostage.division import own_name

TERMS = ("weights", "gradients", "master", "exp_avg", "exp_avg_sq", "other")

#: The name that stands for all parameters together, where a flat buffer does not say whose values it holds.
POOLED = ""

#: Keys of `optimizer.state[p]` by term; every other tensor there is "other".
_STATE_TERMS = {
    **dict.fromkeys(("exp_avg", "momentum_buffer", "momentum"), "exp_avg"),
    **dict.fromkeys(("exp_avg_sq", "square_avg", "sum"), "exp_avg_sq"),
    **dict.fromkeys(("master", "master_param", "master_weight", "fp32_param"), "master"),
}
#: Attributes of DeepSpeed's optimizers: stages 1 and 2, stage 3, BF16_Optimizer, FP16 fused and unfused.
_DEEPSPEED = {
    "weights": ("fp16_partitioned_groups_flat", "bit16_groups_flat", "bf16_groups_flat", "fp16_groups_flat"),
    "gradients": ("averaged_gradients", "grad_partitions_flat_buffer", "fp32_groups_gradients_flat"),
    "master": (
        "single_partition_of_fp32_groups",
        "fp32_partitioned_groups_flat",
        "fp32_groups_flat_partition",
        "fp32_groups_flat",
        "fp32_groups",
    ),
}


@dataclass(frozen=True)
class Parameter:
    """One logical parameter: whole size in elements, bytes an element, whether it is trained."""

    numel: int
    itemsize: int
    trainable: bool
    padded: int = 0  #: elements with alignment padding, where the engine's own layout says how many; 0: not said

    @property
    def whole(self) -> int:
        """Elements that one whole copy takes."""
        return self.padded or self.numel


@dataclass
class Holdings:
    """One rank's tensors by term: bytes by storage, elements by parameter name."""

    configured: str = "plain torch"
    configured_stage: int | None = 0
    #: Shared parameters are here once, under their first name.
    parameters: dict[str, Parameter] = field(default_factory=dict)
    #: Bytes of the storages of each term, padding included.
    bytes: Counter[str] = field(default_factory=Counter)
    #: term -> parameter name -> local elements without padding, or POOLED -> elements of flat buffers with it.
    elements: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    itemsize: dict[str, int] = field(default_factory=dict)
    #: Unit -> (elements, degree of its weights between forward and backward; None: as at rest).
    units: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    #: The engine keeps whole gradients while backward runs, whatever is left of them after it.
    gradients_whole_in_backward: bool = False
    slack: int = 0  #: elements of padding that flat buffers may have for each parameter and rank, where `padded` is not said
    #: Parameters with a gradient from this rank's backward; None where none is held, or the engine does not tell.
    with_gradient: set[str] | None = None
    #: Parameters that this rank updates a part of -> whether no update so far has changed any bit of it.
    unmoved: dict[str, bool] = field(default_factory=dict)
    updates: int = 0  #: steps so far, skipped ones apart, where the engine counts them
    gathered: int = 0  #: bytes of whole weights that are there only for the moment; they count as other
    notes: list[str] = field(default_factory=list)
    precision: Any = None  #: this rank's `precision_audit.Look`
    #: Storage -> the term it counts for, and the elements of its views that were added so far.
    _storages: dict[tuple, tuple[str, int]] = field(default_factory=dict)
    _views: set[tuple] = field(default_factory=set)

    def add(self, term: str, tensor: Tensor | None, names: dict[str, int] | None = None) -> int:
        """Count the storages under `tensor` for `term`, unless they were counted before; return the new bytes.

        `names` are the local elements of each parameter in it; without it, its elements
        count as POOLED, in views of one storage up to what the storage has.
        """
        bytes_new, known = 0, len(self._views)
        for inner in [] if tensor is None else _inner(tensor):
            storage = inner.untyped_storage()
            if inner.device.type == "meta" or not storage.nbytes():
                continue
            key = (inner.device, storage.data_ptr())
            if key not in self._storages:
                self._storages[key] = term, 0
                bytes_new += storage.nbytes()
                self.itemsize.setdefault(term, inner.itemsize)
            owner, added = self._storages[key]
            # An optimizer inside another shows the same state twice; that is not more elements.
            view = (term, inner.device, inner.data_ptr(), inner.numel())
            if view not in self._views and names is None and owner == term:
                total = min(added + inner.numel(), storage.nbytes() // inner.itemsize)
                self._storages[key] = term, total
                self.elements[term][POOLED] += total - added
            self._views.add(view)
        self.bytes[term] += bytes_new
        if names and len(self._views) > known:
            self.elements[term].update(names)
        return bytes_new

    def gather(self, tensor: Tensor | None) -> None:
        """Count what is new under `tensor` as weights that are gathered for the moment."""
        self.gathered += self.add("other", tensor)


def hold(model: nn.Module, optimizer: Any = None) -> Holdings:
    """What this rank holds of `model` and `optimizer` at this moment, whatever engine made them."""
    from zerostage.engine import engine_of

    held = Holdings()
    if (engine := engine_of(model)) is not None:
        _zerostage(held, model, optimizer, engine)
    elif hasattr(model, "zero_optimization_stage") and hasattr(model, "module"):
        _deepspeed(held, model, optimizer)
    else:
        if isinstance(model, DistributedDataParallel):
            _ddp(held, model)
            model = model.module
        index = {**_fsdp(held, model), **_named(held, model)}
        _optimizer(held, optimizer, index)
        for buffer in model.buffers():
            held.add("other", buffer)
    if held.gathered:
        held.notes.append(f"{held.gathered:,} bytes of weights are gathered at this moment; they count as other.")
    return held


def _inner(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that this rank holds of `tensor`: the local part of a DTensor, the parts of a quantised one."""
    if is_traceable_wrapper_subclass(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:
            if isinstance(part := getattr(tensor, attribute), Tensor):  # DTensor names its mesh here too
                yield from _inner(part)
    else:
        yield tensor


def _local(tensor: Tensor) -> int:
    return sum(inner.numel() for inner in _inner(tensor))


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _label(path: str) -> str:
    return own_name(path) or "the root"


def _has_parent(path: str, paths: list[str]) -> bool:
    return any(other != path and (not other or path.startswith(f"{other}.")) for other in paths)


# -- The engines: each counts its weights and gradients, and says what it is -----------------


def _zerostage(held: Holdings, model: nn.Module, optimizer: Any, engine: Any) -> None:
    held.configured_stage = engine.partition.stage(engine.ranks)
    held.configured = f"zerostage {engine.partition if held.configured_stage is None else f'stage {held.configured_stage}'}"
    if optimizer is None and engine.driver is not None:
        optimizer = engine.driver.optimizer
    names: dict[int, str] = {}
    storages = engine.storages()
    for name, p in model.named_parameters():
        names[id(p)] = name
        if not hasattr(p, "_flat"):  # of a module around the sharded one
            held.parameters[name] = Parameter(p.numel(), p.itemsize, p.requires_grad)
            held.add("weights", p, {name: p.numel()})
            held.add("gradients", p.grad, {name: p.numel()})
            continue
        slot, unit = p._flat.layout.slots[p._index], p._flat.unit.name
        held.parameters[name] = Parameter(p.numel(), p.itemsize, p.requires_grad, slot.stop - slot.start)
        held.units[unit] = (held.units.get(unit, (0, None))[0] + p.numel(), None)
    trained = [flat for flat in engine.flats if flat.trainable]
    if any(flat.reduced or flat.arrived for flat in trained):
        given = (id(flat.parameters[index]) for flat in trained for index in flat.contributed | flat.arrived)
        held.with_gradient = {names[key] for key in given if key in names}
    if engine.driver is not None:
        held.updates = engine.driver.updates
        held.unmoved = {names[id(p)]: still for p, still in engine.driver.unmoved() if id(p) in names}
    for term in ("weights", "gradients", "master"):
        for tensor in storages.pop(term, ()):
            held.add(term, tensor)
    # States go by parameter, since one that had no gradient so far has none.
    for parameter, state in getattr(optimizer, "state", {}).items():
        for key, value in state.items():
            for tensor in _tensors(value):
                elements = {names[id(parameter)]: tensor.numel()} if tensor.dim() and id(parameter) in names else {}
                held.add(_STATE_TERMS.get(key, "other"), tensor, elements)
    for term, tensors in storages.items():
        for tensor in tensors:
            if term == "gathered":
                held.gather(tensor)
            else:
                held.add(_STATE_TERMS.get(term, "other"), tensor)


def _ddp(held: Holdings, model: DistributedDataParallel) -> None:
    held.configured = "DistributedDataParallel"
    if not model.gradient_as_bucket_view:
        size = sum(p.numel() * p.itemsize for p in model.parameters() if p.requires_grad)
        held.notes.append(
            f"DistributedDataParallel keeps buckets of the gradients besides, about {size:,} bytes a rank that cannot "
            "be read from outside and are not in the table; gradient_as_bucket_view=True does without them."
        )


def _fsdp(held: Holdings, model: nn.Module) -> dict[int, dict[str, int]]:
    """FSDP's flat parameters. Returns the local elements by name, by the id of each parameter an optimizer may hold."""
    index: dict[int, dict[str, int]] = {}
    strategies: Counter[str] = Counter()
    wrapped = {path: m for path, m in model.named_modules() if hasattr(getattr(m, "_handle", None), "_sharding_strategy")}
    for path, module in wrapped.items():
        handle = module._handle
        flat, strategy = handle.flat_param, handle._sharding_strategy.name
        strategies[strategy] += sum(flat._numels)
        names = [own_name(".".join(filter(None, (path, name)))) for name in flat._fqns]
        parts = dict(zip(names, (info.numel_in_shard or 0 for info in flat._shard_param_infos)))
        sizes = dict(zip(names, flat._numels))
        originals = dict(zip(names, flat._params or [flat] * len(names)))
        for name, parameter in originals.items():
            held.parameters[name] = Parameter(sizes[name], flat.itemsize, parameter.requires_grad)
            index[id(parameter)] = parts if parameter is flat else {name: parts[name]}
        # Set from the first forward on; until then `flat` itself is the shard.
        shard = getattr(flat, "_local_shard", None)
        held.add("weights", flat if shard is None else shard, parts)
        trained = {name: part for name, part in parts.items() if originals[name].requires_grad}
        for gradient in [flat.grad, getattr(flat, "_saved_grad_shard", None), *(p.grad for p in originals.values())]:
            if gradient is not None and held.add("gradients", gradient, {}):
                # Under no_sync it is the gradient of the whole unit.
                whole = gradient.untyped_storage().nbytes() // gradient.itemsize >= sum(sizes.values())
                held.elements["gradients"].update({name: sizes[name] for name in trained} if whole else trained)
        for attribute in ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard"):
            held.gather(getattr(flat, attribute, None))
        # The root's weights are never freed after forward: backward starts with them.
        kept = not _has_parent(path, list(wrapped)) or strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
        held.units[_label(path)] = (sum(sizes.values()), 1 if kept else None)
    if strategies:
        strategy = strategies.most_common(1)[0][0]
        held.configured = f"FSDP {strategy}"
        held.configured_stage = {"NO_SHARD": 0, "SHARD_GRAD_OP": 2, "FULL_SHARD": 3}.get(strategy)
    return index


def _fsdp2(held: Holdings, model: nn.Module) -> dict[int, Any]:
    """FSDP2's units. Returns its record of each parameter by the id of the tensor that the module shows right now."""
    records: dict[int, Any] = {}
    settings: Counter[tuple[str, int | None]] = Counter()
    states = {path: m._get_fsdp_state() for path, m in model.named_modules() if hasattr(m, "_get_fsdp_state")}
    for path, state in states.items():
        root = state._is_root if state._is_root is not None else not _has_parent(path, list(states))
        count, degree = 0, None
        for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [getattr(state, "_fsdp_param_group", None)]):
            for record in group.fsdp_params:
                shown = getattr(record._module_info.module, record._module_info.param_name)
                records[id(shown)] = record
                count += record._orig_size.numel()
            after, mesh = group.post_forward_mesh_info, group.mesh_info
            # A root without a setting of its own is kept, whatever `after` says before the first forward.
            automatic = root and getattr(state, "_auto_reshard_after_forward", False)
            if after is None or automatic:
                degree = 1
            elif after.shard_mesh_size != mesh.shard_mesh_size:
                degree = after.shard_mesh_size
            if mesh.shard_mesh_dim is None:
                setting = "FSDP2 replicate", 0
            elif automatic or degree is None:
                setting = "FSDP2 fully_shard, reshard_after_forward=True", 3
            elif degree == 1:
                setting = "FSDP2 fully_shard, reshard_after_forward=False", 2
            else:
                setting = f"FSDP2 fully_shard, reshard_after_forward={degree}", None
            if mesh.shard_mesh_dim is not None and mesh.replicate_mesh_dim is not None:
                setting = f"{setting[0]}, hybrid mesh", None
            settings[setting] += count
        held.units[_label(path)] = (count, degree)
    if settings:
        held.configured, held.configured_stage = settings.most_common(1)[0][0]
    return records


def _named(held: Holdings, model: nn.Module) -> dict[int, dict[str, int]]:
    """Parameters that the module shows under their own names, plain or DTensor. Returns what `_fsdp` does."""
    index: dict[int, dict[str, int]] = {}
    records = _fsdp2(held, model)
    flat = {id(p) for m in model.modules() for p in _flat_and_originals(m)}
    for path, shown in model.named_parameters():
        if id(shown) in flat:
            continue
        name, record = own_name(path), records.get(id(shown))
        parameter = shown if record is None else record.sharded_param
        local = {name: _local(parameter)}
        held.parameters[name] = Parameter(parameter.numel(), parameter.itemsize, parameter.requires_grad)
        index[id(shown)] = index[id(parameter)] = local
        held.add("weights", parameter, local)
        held.gather(shown)
        for gradient in (parameter.grad, shown.grad, getattr(record, "unsharded_accumulated_grad", None)):
            if gradient is not None:
                held.add("gradients", gradient, {name: _local(gradient)})
    return index


def _flat_and_originals(module: nn.Module) -> list[Tensor]:
    flat = getattr(getattr(module, "_handle", None), "flat_param", None)
    return [] if flat is None else [flat, *(flat._params or []), *(getattr(flat, "_shared_params", None) or [])]


def _deepspeed(held: Holdings, engine: Any, optimizer: Any) -> None:
    own = engine.optimizer  # None where the engine was given none
    held.configured_stage = engine.zero_optimization_stage()
    held.configured = f"DeepSpeed stage {held.configured_stage}"
    held.slack = 4
    # Stage 1 divides only what is left of the gradients after backward.
    held.gradients_whole_in_backward = getattr(own, "partition_gradients", True) is False
    for term, attributes in _DEEPSPEED.items():
        for attribute in attributes:
            for tensor in _tensors(getattr(own, attribute, None)):
                held.add(term, tensor)
    # Between micro-batches stage 2 has its share in whole parameters, of which neighbours hold the same one: no elements.
    for tensor in _tensors(getattr(own, "all_grad_tensors", None)):
        held.add("gradients", tensor, {})
    # Gradients that the optimizer collects in a buffer of its own are elements once, bytes in both places.
    collected = held.bytes["gradients"] > 0
    besides = 0
    for name, parameter in engine.module.named_parameters():
        shard, numel = getattr(parameter, "ds_tensor", None), getattr(parameter, "ds_numel", parameter.numel())
        held.parameters[name] = Parameter(numel, parameter.itemsize, parameter.requires_grad)
        held.add("weights", parameter if shard is None else shard)
        held.gather(parameter)
        held.gather(getattr(parameter, "ds_secondary_tensor", None))
        besides += held.add("gradients", parameter.grad, {} if collected else None)
    if collected and besides:
        held.notes.append(f"{besides:,} bytes of gradients are those of backward, besides the optimizer's own buffer of them.")
    _deepspeed_units(held, engine.module, own)
    index = {id(p): {} for p in engine.module.parameters()}
    for one in (own, optimizer):
        _optimizer(held, one, index)
    buckets = [vars(bucket) for bucket in getattr(own, "ipg_buckets", {}).values()]
    for tensor in [*_tensors([getattr(own, "__dict__", {}), buckets]), *engine.module.buffers()]:
        held.add("other", tensor)


def _deepspeed_units(held: Holdings, model: nn.Module, optimizer: Any) -> None:
    """Stage 3 gathers the parameters of one module at a time. Small ones stay whole for good, and others from forward
    until backward where that needs them again within so many elements, or where prefetching comes upon them
    (`__params_to_release` and `fetch_sub_module` of DeepSpeed's PartitionedParameterCoordinator)."""
    modules = {path: [p for p in m.parameters(recurse=False) if hasattr(p, "ds_tensor")] for path, m in model.named_modules()}
    offload = getattr(optimizer, "parameter_offload", optimizer)
    reuse, ahead, live = (
        getattr(offload, f"_{setting}", 0)
        for setting in ("max_reuse_distance_in_numel", "prefetch_bucket_sz", "max_available_parameters_in_numel")
    )
    reach = max(reuse, min(ahead, live))
    later, seen, persistent, kept = sum(p.ds_numel for ps in modules.values() for p in ps), set(), 0, 0
    for path, parameters in modules.items():
        later -= sum(p.ds_numel for p in parameters)
        new = [p for p in parameters if id(p) not in seen]
        seen.update(map(id, new))
        persistent += sum(p.ds_numel for p in new if p.ds_persist)
        if size := sum(p.ds_numel for p in new if not p.ds_persist):
            again = 2 * later < reach  # the modules after this one pass twice before backward needs it
            held.units[_label(path)] = (size, 1 if again else None)
            kept += again * size
    if persistent:
        held.units["what persists"] = (persistent, 1)
        held.notes.append(f"{persistent:,} elements stay whole besides their shards: stage3_param_persistence_threshold.")
    if kept:
        held.notes.append(
            f"{kept:,} elements stay whole from forward until backward: stage3_max_reuse_distance is {reuse:,}, "
            f"stage3_prefetch_bucket_size {ahead:,}."
        )


# -- The optimizer ---------------------------------------------------------------------------


def _optimizer(held: Holdings, optimizer: Any, index: dict[int, dict[str, int]]) -> None:
    """Count the states, and the parameters that the optimizer has besides the model's own."""
    if not hasattr(optimizer, "param_groups"):  # None, or DeepSpeed's stage 3 without an optimizer
        return
    # ZeroRedundancyOptimizer and DeepSpeed's hold the optimizer that does the work.
    inner = getattr(optimizer, "optim", None) or getattr(optimizer, "optimizer", None)
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        held.configured += f", ZeroRedundancyOptimizer of {type(inner).__name__}"
        held.configured_stage = 1
    lowest = min((p.itemsize for p in held.parameters.values()), default=4)
    stray = 0
    for parameter in _tensors([group["params"] for group in optimizer.param_groups]):
        if id(parameter) not in index:
            # Wider copies of the weights are masters; copies of the same width serve nobody.
            master = parameter.itemsize > lowest
            new = held.add("master" if master else "other", parameter)
            held.add("gradients", parameter.grad)
            stray += bool(new) and not master
    if stray:
        held.notes.append(
            f"The optimizer updates {stray} tensors that are not parameters of the model: it was probably made before "
            "the model was sharded, moved or replaced. Make it afterwards."
        )
    for source in filter(None, (optimizer, inner)):
        for parameter, state in getattr(source, "state", {}).items():
            names = index.get(id(parameter)) or None
            for key, value in state.items() if isinstance(state, dict) else ():
                for tensor in _tensors(value):
                    term = _STATE_TERMS.get(key, "other")
                    scalar = names is not None and _local(tensor) < sum(names.values())
                    held.add(term, tensor, {} if scalar or term == "other" else names)
