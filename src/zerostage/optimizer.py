"""The user's torch optimizer, run over this rank's slices of the masters, unit by unit.

The optimizer object stays the user's: its class, its `param_groups` over the model's
parameters and its hooks are untouched, and LR schedulers go on driving it. A pre-hook of
its `step` does the work on this rank's slices and then lets the original step run over
nothing. `optimizer.state[p]` holds the state of this rank's part of p: one-dimensional
tensors, padded as in `layout.py`.

No fp32 copy of all gradients exists at any time: a piece at a time is widened, used to
update master and moments, and the weights are written back. While a unit's updated weights
are being sent, the next unit is updated.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zerostage.autograd import not_compiled
from zerostage.collectives import Pending, World, piece_size, proceed
from zerostage.elementwise import bare_copy, check_elementwise, states_per_element
from zerostage.flat import Flat
from zerostage.mistakes import some
from zerostage.norm import not_finite, own_finite
from zerostage.schedule import Schedule

log = logging.getLogger("zerostage")

_ADAM = (torch.optim.Adam, torch.optim.AdamW)


class Segment:
    """This rank's part of one parameter: what the optimizer sees in the parameter's place."""

    def __init__(self, flat: Flat, index: int, start: int, stop: int) -> None:
        base = flat.bounds[3][0]
        self.flat, self.index = flat, index
        self.start, self.stop = start, stop  # in the whole buffer
        self.slice = slice(start - base, stop - base)  # in the optimizer's slice
        self.master = nn.Parameter(flat.master[self.slice], requires_grad=flat.master.is_floating_point())

    @property
    def parameter(self) -> nn.Parameter:
        return self.flat.parameters[self.index]

    def cut(self, value: Any, name: str, whole: bool) -> Any:
        """This rank's part of a state entry that was made for the whole parameter; other entries as they are.

        whole: what to take it for where the parameter and this rank's part of it have one shape.
        """
        slot = self.flat.layout.slots[self.index]
        if not isinstance(value, torch.Tensor):
            return value
        of_whole = tuple(value.shape) == slot.shape and value.dim() > 0
        if value.shape == self.master.shape and not (of_whole and whole):
            return value.to(self.master.device, copy=True)
        if of_whole:
            part = torch.zeros(self.stop - self.start, dtype=value.dtype, device=self.master.device)
            first, last = self.start - slot.start, min(self.stop - slot.start, slot.numel)
            if first < last:
                part[: last - first].copy_(value.flatten()[first:last])
            return part
        if value.numel() == 1:
            return value.clone()
        raise ValueError(
            f"the optimizer state '{name}' of '{slot.name}' has shape {tuple(value.shape)}; expected "
            f"{tuple(self.master.shape)} (this rank's part) or {slot.shape} (the whole parameter)"
        )


class Driver:
    """Runs `optimizer` on the segments of all trainable flats."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: Schedule, world: World, check_places: Callable[[], None]
    ) -> None:
        check_elementwise(optimizer)
        self.check_places = check_places
        self.optimizer, self.schedule, self.world = optimizer, schedule, world
        self.segments: dict[Flat, list[Segment]] = {}
        self._of: dict[int, Segment] = {}
        for flat in schedule.flats:
            if flat.trainable:
                self.include(flat)
        self._managed = {id(p) for flat in schedule.flats for p in flat.parameters}
        self.known_norm: tuple[Any, float] | None = None
        self.reserved: dict[Flat, torch.Tensor] = {}  # what states will take that the first step makes
        self.calls = self.updates = 0  # steps so far, and those of them that were not skipped
        self._first: dict[Segment, int] = {}  # a mark of each segment's weights before the first update
        self._parked: list[list[Any]] | None = None
        self._inner = bare_copy(optimizer)
        self._adopt_state(dict(optimizer.state), whole=True)
        optimizer.skipped, optimizer.skipped_steps = False, 0
        if hasattr(optimizer, "_step_supports_amp_scaling"):
            optimizer._step_supports_amp_scaling = False  # a GradScaler shall unscale before the step, as for others
        self._loading: Any = None
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def include(self, flat: Flat) -> None:
        """Update the parameters of `flat` from now on."""
        self.segments[flat] = [Segment(flat, *part) for part in flat.layout.segments(*flat.bounds[3])]
        self._of |= {id(segment.parameter): segment for segment in self.segments[flat]}

    @property
    def flats(self) -> list[Flat]:
        return [flat for flat in self.schedule.flats if flat.trainable]

    # State

    def _adopt_state(self, states: dict[Any, dict[str, Any]], whole: bool) -> None:
        """Take over state entries of parameters, whole ones or this rank's parts."""
        self.optimizer.state.clear()
        self._inner.state.clear()
        for parameter, state in states.items():
            segment = self._of.get(id(parameter))
            if segment is not None and state:
                self._set_state(segment, {name: segment.cut(value, name, whole) for name, value in state.items()})

    def state_of(self, segment: Segment) -> dict[str, Any]:
        """The optimizer's state of a segment; {} where there is none yet."""
        return self._inner.state.get(segment.master, {})

    def adopt(self, states: Iterable[tuple[Segment, dict[str, Any]]]) -> None:
        """Give segments state of their own length ({}: none), step counts where the optimizer looks for them."""
        group_of = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        for segment, state in states:
            self._inner.state.pop(segment.master, None)
            self.optimizer.state.pop(segment.parameter, None)
            group = group_of.get(id(segment.parameter), {})
            on_device = group.get("capturable") or group.get("fused") or type(self.optimizer) in _ADAM and _may_fuse(group)
            place = segment.master.device if on_device else torch.device("cpu")
            if state:
                scalars = {k: v.to(place) for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() == 0}
                self._set_state(segment, {**state, **scalars})

    def _set_state(self, segment: Segment, state: dict[str, Any]) -> None:
        self._inner.state[segment.master] = state
        self.optimizer.state[segment.parameter] = state

    @not_compiled
    def _before_load(self, optimizer: Any, state_dict: dict[str, Any]) -> None:
        self._loading = state_dict["state"]

    @not_compiled
    def _after_load(self, optimizer: Any) -> None:
        # torch casts loaded state to the parameters' dtype, which would round fp32 moments
        order = [p for group in self.optimizer.param_groups for p in group["params"]]
        values = (value for state in self._loading.values() for value in state.values())
        whole = any(isinstance(value, torch.Tensor) and value.dim() > 1 for value in values)  # parts have one dimension
        self._adopt_state({order[i]: state for i, state in self._loading.items()}, whole)
        self._loading = None

    def state_tensors(self) -> dict[str, list[torch.Tensor]]:
        """The optimizer's state on this rank by name, without scalars."""
        result: dict[str, list[torch.Tensor]] = {}
        for master, state in self._inner.state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.numel() == master.numel() and value.dim() > 0:
                    result.setdefault(name, []).append(value)
        return result

    def reserve(self) -> None:
        """Hold the memory that gradients and states will take, until the first step makes the states."""
        sizes = {
            id(p): states_per_element(self.optimizer, group, p.device)
            for group in self.optimizer.param_groups
            for p in group["params"]
        }
        for flat, segments in self.segments.items():
            flat.ensure_grad()
            missing = [s for s in segments if not self._inner.state.get(s.master)]
            size = sum(s.master.numel() * sizes.get(id(s.parameter), 0) for s in missing)
            self.reserved[flat] = torch.zeros(size, dtype=flat.master.dtype, device=flat.device)

    def unmoved(self) -> list[tuple[nn.Parameter, bool]]:
        """For each parameter that this rank updates a part of, whether that has the bits of before the first update (`_mark`)."""
        return [(s.parameter, mark == _mark(s.flat.step_weights[s.slice])) for s, mark in self._first.items()]

    # The step

    @not_compiled
    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        self._unpark()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = (optimizer, lambda: loss), {}
        with torch.no_grad():
            self._step()
        self._parked = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = []
        return args, kwargs

    @not_compiled
    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._unpark()

    def _unpark(self) -> None:
        if self._parked is not None:
            for group, parameters in zip(self.optimizer.param_groups, self._parked):
                group["params"] = parameters
            self._parked = None

    def _step(self) -> None:
        self._refuse_if_not_ready()
        self.calls += 1
        used = self._agree()
        if self.world.notes is not None:
            self.world.notes.steps = self.calls
        if used is None:
            return
        if not self.updates:
            self._first = {s: _mark(f.step_weights[s.slice]) for f, segments in self.segments.items() for s in segments}
        self.updates += 1
        groups = {id(p): i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        sending: list[tuple[Iterator[Pending], Pending]] = []
        # a small unit last, whose collective has no update to hide behind
        for unit in sorted(self.schedule.units, key=lambda unit: -unit.nbytes):
            for flat in unit.flats:
                if flat.trainable:
                    flat.absorb_changes()
                    chosen = [s for s in self.segments[flat] if (flat, s.index) in used and id(s.parameter) in groups]
                    with self.world.span("optimizer", unit.name):
                        self._update(flat, chosen, groups)
                    flat.updated()
            sending = proceed(sending, block=False)
            for flat in unit.flats:
                if flat.trainable:
                    sending += proceed([(flat.publish(), Pending())])
        while sending:
            sending = proceed(sending)

    def _refuse_if_not_ready(self) -> None:
        for number, group in enumerate(self.optimizer.param_groups):
            if any(id(p) not in self._managed for p in group["params"]):
                raise ValueError(
                    f"parameter group {number} has a parameter that the model did not have when it was sharded: put new "
                    "parameters into the model before zerostage.shard"
                )
        self.check_places()
        self.schedule.refuse_averaged("optimizer.step()")
        held = [unit.name for unit in self.schedule.units if unit.pinned]
        if held:
            raise RuntimeError(f"optimizer.step() within `gathered` of {held[0]}: leave the block before the step")
        self.schedule.refuse_unreduced("optimizer.step()")

    def _agree(self) -> set[tuple[Flat, int]] | None:
        """What all ranks decide together: None to skip the step, else the parameters that have a gradient anywhere.

        A parameter without a gradient on every rank is left alone, as torch leaves one whose
        `grad` is None: no decay, no momentum, no step count.
        """
        versions = tuple(flat.version for flat in self.flats)
        if self.known_norm is not None and self.known_norm[0] == versions:
            finite = self.known_norm[1] - self.known_norm[1] == 0.0
        else:
            with self.world.span("optimizer", "are all gradients finite"):
                finite = own_finite(self.flats)
        proposals = self.schedule.proposals()
        places = [(flat, index) for flat in self.flats for index in range(len(flat.parameters))]
        votes = [not finite, any(p is not None for p in proposals), *(index in flat.contributed for flat, index in places)]
        votes = self.world.vote(votes, "optimizer.step")
        if votes[1]:
            self.schedule.adopt(self.world.collect_objects(proposals, "the order of units"))
        self.optimizer.skipped = bool(votes[0])
        if votes[0]:
            self.optimizer.skipped_steps += 1
            self._report_skip()
            return None
        return {place for place, vote in zip(places, votes[2:]) if vote}

    def _report_skip(self) -> None:
        found = self.world.collect_objects(not_finite(self.flats), "gradients that are not finite")
        parts = [f"{kind} in '{name}' (slice of rank {r})" for r, mine in enumerate(found) for name, kind in mine]
        message = (
            f"step {self.calls} skipped on all ranks, weights and optimizer state unchanged: the gradient has "
            f"{some(parts)} ({self.optimizer.skipped_steps} skipped so far)"
        )
        log.log(logging.WARNING if self.world.rank == 0 else logging.DEBUG, message)

    def _update(self, flat: Flat, segments: list[Segment], groups: dict[int, int]) -> None:
        if not segments:
            return
        self.reserved.pop(flat, None)
        gradient = flat.settled_grad()
        for number, group in enumerate(self.optimizer.param_groups):
            chosen = [s for s in segments if groups[id(s.parameter)] == number]
            if not chosen:
                continue
            if type(self.optimizer) in _ADAM and _may_fuse(group):
                self._fused_adam(flat, chosen, group, gradient)
            else:
                self._plain(flat, chosen, group, gradient)

    def _plain(self, flat: Flat, segments: list[Segment], group: dict[str, Any], gradient: torch.Tensor) -> None:
        """One call of the optimizer's own step for this flat."""
        for segment in segments:
            segment.master.grad = gradient[segment.slice].to(flat.master.dtype)
        self._inner.param_groups = [{**group, "params": [s.master for s in segments]}]
        self._inner.step()
        for segment in segments:
            segment.master.grad = None
            if segment.parameter not in self.optimizer.state:
                self.optimizer.state[segment.parameter] = self._inner.state[segment.master]
            if flat.has_master:
                flat.step_weights[segment.slice].copy_(segment.master)

    def _fused_adam(self, flat: Flat, segments: list[Segment], group: dict[str, Any], gradient: torch.Tensor) -> None:
        """Adam in pieces that stay in the cache from the gradient's widening to the weight's rounding."""
        decoupled = group.get("decoupled_weight_decay", type(self.optimizer) is torch.optim.AdamW)
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
        for segment in segments:
            state = self._inner.state[segment.master]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
                for name in names:
                    state[name] = torch.zeros_like(segment.master, requires_grad=False)
                self.optimizer.state[segment.parameter] = state
            state["step"] += 1
            held = (flat.master, gradient, flat.step_weights)
            terms = [t[segment.slice] for t in held] + [state[name] for name in names]
            for master, grad, weight, *moments in zip(*(t.split(piece_size(flat.device)) for t in terms)):
                kernel(
                    [master],
                    [grad.to(master.dtype)],
                    *([moment] for moment in moments),
                    *([[]] if len(moments) == 2 else []),
                    [state["step"]],
                    lr=group["lr"],
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    amsgrad=group["amsgrad"],
                    maximize=group["maximize"],
                )
                if flat.has_master:
                    weight.copy_(master)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _mark(values: torch.Tensor) -> int:
    """A checksum of the bits of at most a million of the values, spread over all."""
    sample = values[:: 1 + values.numel() // 1_000_000].contiguous()
    return zlib.crc32(sample.view(torch.uint8).cpu().numpy())


def _may_fuse(group: dict[str, Any]) -> bool:
    """Whether the user left the choice of implementation open or asked for the fused one."""
    return group.get("fused") is not False and not (
        group.get("foreach") or group.get("differentiable") or group.get("capturable")
    )
