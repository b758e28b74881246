"""When each unit is gathered, freed and reduced: the hooks on the model, the order, the prefetch.

A *pass* is one walk through the units: a forward of the model, or a backward. In each pass
every unit is gathered once, in the order of `Order`, whether or not this rank's computation
uses it. So ranks whose data skip a module still take part in its collectives, and the
traffic is the same every step. A unit that is needed later than the next one in order makes
the units in between be gathered (and freed) first; one that is needed again, or that comes
in another order than the recorded one, is gathered out of order, which is right as long as
all ranks do the same. The order is recorded, and corrected after each step by `agree`.

Reductions follow the same rule: they are issued in one order on all ranks, each as soon as
its unit and all units before it are complete.

Overlap: while a unit computes, the next `prefetch` units are being gathered and the last
reduction is under way. At most 1 + prefetch units are gathered at a time, besides resident
ones. On CUDA buffers are allocated and freed on the compute stream, which waits for each
collective before it touches its buffer; the collectives run on NCCL's own stream, which
waits for the compute stream when they are issued. So no buffer needs `record_stream`.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from zerostage.autograd import accumulates, explain_fullgraph, in_backward, not_compiled, tensors_in, transformed, will_run
from zerostage.collectives import Pending, World, proceed
from zerostage.flat import Flat
from zerostage.order import Order, Pass, agree
from zerostage.saved import SavedWeights
from zerostage.unit import State, Unit, gradients_bound


class Call:
    """One forward of a unit: for frozen weights, whether backward is between its output and its inputs."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.inputs = self.running = False
        self.saving = ExitStack()


class Schedule:
    """The hooks that make a plain forward and backward gather, free and reduce units."""

    def __init__(self, model: nn.Module, units: list[Unit], world: World, prefetch: int) -> None:
        self.units, self.world, self.prefetch = units, world, prefetch
        self._place = {unit: place for place, unit in enumerate(units)}
        inside = {unit: {inner for module in unit.modules for inner in module.modules()} for unit in units}
        self._around = {unit: [u for u in units if u is unit or not inside[u].isdisjoint(unit.modules)] for unit in units}
        self.forward_order = Order(units)
        # a unit with several places is needed early in backward and complete late
        self.backward_order = Order(sorted(units[::-1], key=lambda unit: not unit.resident))
        self.reduce_order = Order(units[::-1])
        self._orders = (self.forward_order, self.backward_order, self.reduce_order)
        self.divided = any(unit.divided for unit in units)
        self.sync = True
        self.before_forward: Any = lambda: None  # what the engine has to do first
        self.events: list[tuple[str, str]] | None = None  # what happened, in order, when someone listens
        self._window = 0  # units gathered or on their way, resident ones apart
        self._walk: Pass | None = None  # the pass under way
        self._depth = 0  # forwards of the model under way
        self.saved = SavedWeights(units, self._need_saved)
        self._saving = ExitStack()  # the context in which the forward under way saves tensors
        self._touched: list[Unit] = []  # units that are needed throughout the next backward
        self._used: set[Unit] = set()  # what the forwards before the next backward have needed
        self._backward_done = False  # since the last forward
        self._in_session = False  # a backward is under way
        self._task: Any = lambda: None  # what autograd will call at its end
        self._accumulates = False  # it produces gradients for parameters, or reduces those of a backward before it
        self._unreduced = False  # the last one was within no_sync
        self._expected: set[tuple[Unit, int]] = set()  # units looked at, by autograd task
        self._waits: dict[Unit, set[tuple[Flat, int]]] = {}  # by unit: gradients that this backward will still produce
        self._running: dict[Unit, int] = {}  # by unit: calls that backward has entered and not left
        self._calls: list[Call] = []  # forwards of units under way, innermost last
        self._complete: set[Unit] = set()  # units whose gradients are complete, not yet reduced
        self._reduced: list[Unit] = []  # units whose reduction this backward has issued
        self._inflight: list[tuple[Iterator[Pending], Pending]] = []
        self._allowed = 0  # bytes of gradients in flight, in this backward
        self._handles: list[Any] = []
        world.help = partial(_help, weakref.ref(self))
        self._hook(model)

    @property
    def flats(self) -> list[Flat]:
        return [flat for unit in self.units for flat in unit.flats]

    def record(self, event: str, unit: Unit) -> None:
        if self.events is not None:
            self.events.append((event, unit.name))
        if event == "ready" and self.world.timeline is not None:
            self.world.timeline.ready.append((unit.name, time.time_ns()))

    # Hooks

    def _hook(self, model: nn.Module) -> None:
        for unit in self.units:
            unit.on_touch = self._touch
            if unit.divided:
                for module in unit.modules:
                    self._handles += [
                        module.register_forward_pre_hook(self._before(unit), prepend=True, with_kwargs=True),
                        module.register_forward_hook(self._after(unit), always_call=True),
                    ]
            for flat in unit.flats:
                self._hook_gradients(flat)
        # outermost: before every unit's hook, which the same module may carry, and after it
        self._handles.append(model.register_forward_pre_hook(self._begin_forward, prepend=True))
        self._handles.append(model.register_forward_hook(self._end_forward, always_call=True))

    def _hook_gradients(self, flat: Flat) -> None:
        for index, parameter in enumerate(flat.parameters if flat.trainable else ()):
            hook = self._gradient_hook(flat.unit, flat, index)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def exchange(self, old: Flat, parts: list[Flat]) -> None:
        """Go on with `parts` in the place of a frozen flat, whose unit holds them already."""
        self.saved.exchange(old, parts)
        for flat in parts:
            self._hook_gradients(flat)

    def _before(self, unit: Unit) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if transformed():
                self._refuse_transform()
            call = Call(unit)
            self._calls.append(call)
            self.need(unit)
            self._watch_inputs(call, args, kwargs)
            call.saving = self.saved.start()

        return not_compiled(before)

    def _after(self, unit: Unit) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if not self._calls or self._calls[-1].unit is not unit:
                return  # another hook raised before ours had its turn
            call = self._calls.pop()
            call.saving.close()
            if any(self.saved.flat_of(tensor) is not None for tensor in tensors_in(output)):
                self._make_resident(unit)  # what it returns is a view of its weights
            if torch.is_grad_enabled():
                watched = self._watch_outputs(unit, call, output)
                if not watched and output is not None and unit.trained:
                    self._keep_for_backward(unit)
            if in_backward():
                return  # a recomputed forward: the backward that asked for it needs the weights next
            if unit.state is State.GATHERED and not unit.pinned and not (unit.resident and self._depth):
                self.release(unit)
                self._fill()

        return not_compiled(after)

    @not_compiled
    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        if in_backward():
            return
        if transformed():
            self._refuse_transform()
            return
        if self._depth == 0:
            if self.world.notes is not None:
                self.world.notes.recovered()
            self._abandon_backward()
            self._release_all()
            self.before_forward()
            if self._backward_done:
                self._used, self._backward_done = set(), False
            self._walk = Pass(self.forward_order.units, self.forward_order.learned)
            self.forward_order.seen = {}
            self._saving = self.saved.start()
        self._depth += 1

    @not_compiled
    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward() or transformed() or not self._depth:
            return
        self._depth -= 1
        if self._depth:
            return
        self._saving.close()
        if output is not None:
            if self._walk is not None:
                self._walk.learned = True  # nothing comes later in this pass that might still use a unit
            self._finish_walk()
        else:
            explain_fullgraph()
            if self.world.notes is not None and (error := sys.exc_info()[1]) is not None:
                self.world.notes.raised(f"{type(error).__name__}: {error} (in a forward)")
        for unit, uses in self.forward_order.seen.items():
            if uses > 1:  # from now on gathered once a pass, like the others
                self._make_resident(unit)
        self._walk = None
        outputs = list(tensors_in(output))
        for flat in {flat for tensor in outputs if (flat := self.saved.flat_of(tensor)) is not None}:
            self._leave_memory(flat)
        self._release_all()
        if torch.is_grad_enabled():
            for tensor in outputs:
                # an input that is handed back, too: where this rank has skipped all modules
                if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                    tensor.register_hook(self._begin_backward)

    def _refuse_transform(self) -> None:
        if self.divided:
            raise RuntimeError(
                "torch.func transforms (grad, vmap, jvp, ...) cannot go through weights that are divided: keep them whole "
                "(stages 0 to 2), or transform a plain copy of the model with zerostage.full_state_dict(model, "
                "rank0_only=False) in torch.func.functional_call"
            )

    # Gathering

    def need(self, unit: Unit) -> None:
        """Have `unit`'s weights, and its followers' on the way."""
        if not unit.divided:
            return
        if in_backward():
            self._start_session()
            self.backward_order.visit(unit)
        else:
            self._used.add(unit)
            if self._depth:
                self.forward_order.visit(unit)
        walk = self._walk
        if walk is not None and walk.ahead(unit):
            while walk.next() is not unit:
                self._skip(walk)
            self._advance(walk)
        elif unit.state is State.AT_REST:
            self._gather(unit)
        if unit.state is State.GATHERING:
            unit.arrive()
        self.record("ready", unit)
        if in_backward():  # after the gather, whose turn these reductions would else pass over
            self._reduce_ready()
        self._fill()

    def _advance(self, walk: Pass) -> None:
        unit = walk.next()
        walk.cursor += 1
        if unit.state is State.AT_REST:
            self._gather(unit)

    def _skip(self, walk: Pass) -> None:
        """Take part in gathering a unit that this rank has not used where its turn was."""
        unit = walk.next()
        self._advance(walk)
        kept = unit.pinned or unit.resident or unit in self._touched  # may be needed later in the pass
        if walk.learned and unit.state is State.GATHERING and not kept:
            unit.arrive()
            self.release(unit)

    def _gather(self, unit: Unit) -> None:
        self.record("gather", unit)
        unit.gather()
        self._window += not unit.resident

    def _fill(self) -> None:
        """Start gathering the units that come next, as far as memory allows."""
        walk = self._walk
        while walk is not None and self.prefetch and walk.next() is not None:
            if self._window >= 1 + self.prefetch:
                return
            self._advance(walk)

    def _finish_walk(self) -> None:
        """Take part in gathering the units that only other ranks may have used."""
        while self._walk is not None and self._walk.next() is not None:
            self._skip(self._walk)

    def release(self, unit: Unit) -> None:
        self.record("free", unit)
        unit.release()
        self._window -= not unit.resident

    def _release_all(self) -> None:
        for unit in self.units:
            if unit.divided and not unit.pinned and unit.state is not State.AT_REST:
                if unit.state is State.GATHERING:
                    unit.arrive()
                self.release(unit)

    def _make_resident(self, unit: Unit) -> None:
        if not unit.resident:
            unit.resident = True
            self._window -= unit.state is not State.AT_REST

    def _touch(self, unit: Unit, parameter: str, function: Any) -> None:
        if not self._depth and not in_backward():
            raise RuntimeError(
                f"the weight '{parameter}' is divided over {self.world.partition.weights} ranks and was used by "
                f"'{getattr(function, '__name__', function)}' on rank {self.world.rank} outside a forward of the model, where "
                "its values are not here. Use it within `with zerostage.gathered(model):` on every rank"
            )
        self.need(unit)
        self._make_resident(unit)

    def _keep_for_backward(self, unit: Unit) -> None:
        """Have the unit throughout the next backward: no hook will tell when it is needed."""
        if unit not in self._touched:
            self._touched.append(unit)

    def _need_saved(self, unit: Unit) -> None:
        """Backward asks for a weight of `unit`. If no hook announced it, none may tell when it is done with it."""
        if unit.state is not State.GATHERED:
            if in_backward():
                self._start_session()
                self._keep_for_backward(unit)
            self.need(unit)

    def _leave_memory(self, flat: Flat) -> None:
        """Somebody keeps views of gathered weights: let them have the memory, and take a new one."""
        before = flat.whole.untyped_storage()._cdata
        flat.renew()
        self.saved.moved(flat, before)

    # Backward

    def _watch_outputs(self, unit: Unit, call: Call, output: Any) -> bool:
        def before_backward(gradient: torch.Tensor) -> None:
            self.need(unit)
            self._expect(unit)
            if call.inputs and not call.running:
                call.running = True
                self._running[unit] = self._running.get(unit, 0) + 1

        found = [tensor for tensor in tensors_in(output) if tensor.requires_grad and not tensor.is_leaf]
        for tensor in found:
            tensor.register_hook(not_compiled(before_backward))
        return bool(found)

    def _watch_inputs(self, call: Call, args: Any, kwargs: Any) -> None:
        """Frozen weights produce no gradient that tells when backward is done with them; the inputs' do."""
        unit = call.unit
        if not torch.is_grad_enabled() or not unit.frozen:
            return
        inputs = [t for t in (*tensors_in(args), *tensors_in(kwargs)) if t.requires_grad]
        if inputs:
            call.inputs = True

            def after_backward(gradients: Any) -> None:
                if call.running:
                    call.running = False
                    self._running[unit] = self._running.get(unit, 1) - 1
                    self._maybe_done(unit)

            torch.autograd.graph.register_multi_grad_hook(inputs, not_compiled(after_backward), mode="all")

    @not_compiled
    def _begin_backward(self, gradient: torch.Tensor) -> None:
        """The first hook of a backward that starts from the model's outputs: autograd's outermost task."""
        if not transformed():
            self._start_session()

    def _start_session(self) -> None:
        if self._in_session and self._task() is not None:
            return
        self._open_session(accumulates())
        # autograd drops its callbacks when a backward raises: then the session is a dead one's
        callback = partial(self._end_backward)
        self._task = weakref.ref(callback, partial(_backward_dropped, weakref.ref(self)))
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        del callback
        # where a weight may have been used apart from its module, no hook tells when backward comes to that
        for unit in self.backward_order.units:
            if unit.divided and (unit.resident or unit in self._touched):
                self.need(unit)

    def _open_session(self, accumulates: bool) -> None:
        self._abandon_backward()
        self._in_session = self._backward_done = True
        trained = (p for unit in self.units for flat in unit.flats if flat.trainable for p in flat.parameters)
        self._accumulates = accumulates and (self._unreduced or any(parameter.requires_grad for parameter in trained))
        if self._accumulates:
            self._unreduced = not self.sync
        self._expected, self._waits, self._complete, self._reduced = set(), {}, set(), []
        self._allowed = gradients_bound(self.units, self.world.partition)
        self.backward_order.seen, self.reduce_order.seen = {}, {}
        self._walk = Pass(self.backward_order.units, self.backward_order.learned) if self.divided else None

    def take_part(self, model: nn.Module, backward: bool) -> None:
        """Do this rank's share of the other ranks' next forward and backward, without a batch of its own."""
        self._begin_forward(model, ())
        self._end_forward(model, (), ())
        if backward:
            self._open_session(True)
            self._end_backward()

    def _expect(self, unit: Unit) -> None:
        """Find out which of the unit's gradients autograd's task under way will produce.

        Reentrant checkpointing runs a task of its own, within the backward's, for each
        checkpointed piece.
        """
        key = unit, torch._C._current_graph_task_id()
        if key in self._expected:
            return
        self._expected.add(key)
        waits = self._waits.setdefault(unit, set())
        for flat in unit.flats:
            if flat.trainable:
                waits.update((flat, i) for i, p in enumerate(flat.parameters) if p.requires_grad and will_run(p))

    def _gradient_hook(self, unit: Unit, flat: Flat, index: int) -> Any:
        # autograd's own memory holds the hook, where the garbage collector cannot see a cycle
        weak = weakref.ref(self), weakref.ref(unit), weakref.ref(flat)

        def hook(parameter: nn.Parameter) -> None:
            schedule, unit, flat = (reference() for reference in weak)
            gradient = torch.Tensor.grad.__get__(parameter)  # autograd's own field, behind the managed one
            if gradient is not None:
                schedule._take(unit, flat, index, gradient)
                torch.Tensor.grad.__set__(parameter, None)

        return not_compiled(hook)

    def _take(self, unit: Unit, flat: Flat, index: int, gradient: torch.Tensor) -> None:
        """Move a gradient that backward has completed to its flat."""
        self._start_session()
        self._expect(unit)
        if flat.reducing:
            self._drain()
        with self.world.span("reduce", flat.layout.slots[index].name):
            flat.take(index, gradient)
        self._waits[unit].discard((flat, index))
        self._maybe_done(unit)

    def _maybe_done(self, unit: Unit) -> None:
        """Free a unit that backward is done with, and reduce its gradients."""
        if self._waits.get(unit):
            return
        if unit.divided and unit.state is State.GATHERED and not unit.pinned and not self._running.get(unit):
            if not (unit in self._touched or unit.resident and unit.frozen):
                self.release(unit)
                self._fill()
        if any(flat.arrived for flat in unit.flats) and unit not in self._complete:
            self.reduce_order.visit(unit)
            self._complete.add(unit)
            self._reduce_ready()

    def _reduce_ready(self) -> None:
        """Issue the reductions whose turn has come.

        A unit that no forward has needed on this rank adds nothing, and other ranks may wait
        for that.
        """
        order = self.reduce_order.units
        while self.sync and self._accumulates and len(self._reduced) < len(order):
            unit = order[len(self._reduced)]
            if unit not in self._complete and (unit in self._used or not unit.divided):
                return
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        self._reduced.append(unit)
        # a rank that skips a unit must not wait for its reduction before the others can have gathered it
        while self._walk is not None and any(self._walk.ahead(around) for around in self._around[unit]):
            # one around it that this rank uses is needed later: gathered now, it must stay
            (self._advance if self._walk.next() in self._used else self._skip)(self._walk)
        flats = [flat for flat in unit.flats if flat.trainable]
        if not flats:
            return
        self.record("reduce", unit)
        if not self._has_room(unit):
            self._step_inflight()
        for flat in flats:
            self._inflight += proceed([(flat.reduce(), Pending())])

    def _has_room(self, unit: Unit) -> bool:
        """Whether `unit` can be reduced beside what is under way within the bound that the ledger states.

        There must be room for what it receives and for the gradients of the unit that backward
        comes to next. So a small unit between large ones, a last norm for example, makes nobody wait.
        """
        following = self.reduce_order.units[len(self._reduced) : len(self._reduced) + 1] if self.world.partition.gradients > 1 else []
        needed = sum(u.gradient_bytes for u in (unit, *following))
        return self.world.in_flight.now + needed <= self._allowed

    def _step_inflight(self) -> None:
        """Bring each reduction under way one collective further."""
        inflight, self._inflight = self._inflight, []
        self._inflight = proceed(inflight)

    def _drain(self) -> None:
        while self._inflight:
            self._step_inflight()

    @not_compiled
    def _end_backward(self) -> None:
        """Every gradient of this backward is there: reduce the rest, on every rank the same."""
        try:
            if self.sync and self._accumulates:
                if self._walk is not None and not self._walk.learned:
                    # others may need weights before they reduce what comes first here: gather all, waiting for none
                    self._finish_walk()
                for unit in self.reduce_order.units[len(self._reduced) :]:
                    self._reduce(unit)
                self._drain()
                for unit in self.reduce_order.units:  # what arrived after its unit's reduction
                    if any(flat.arrived for flat in unit.flats):
                        self._reduce(unit)
            self._drain()
            self._finish_walk()
        finally:
            self._end_session()

    def _end_session(self) -> None:
        self._in_session = False
        self._walk = None
        self._touched = []
        self._expected, self._waits, self._running = set(), {}, {}
        self._release_all()

    def _abandon_backward(self) -> None:
        """Forget a backward that ended in an exception."""
        if self._in_session:
            inflight, self._inflight = self._inflight, []
            for _, pending in inflight:
                pending.wait()  # it may still write to a buffer
            for unit in self.units:
                for flat in unit.flats:
                    flat.drop_gradients()
            self._end_session()

    # Between steps

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    def settle(self) -> None:
        """Let go of what a backward that ended in an exception has left gathered: it may be of older weights."""
        if self.world.notes is not None:
            self.world.notes.recovered()
        if self._task() is None:
            self._abandon_backward()

    def refuse_unreduced(self, call: str) -> None:
        """Raise where gradients of a backward within no_sync still wait for one outside it."""
        if any(flat.local is not None and flat.arrived for flat in self.flats):
            raise RuntimeError(
                f"{call} after a backward within no_sync only: its gradients have not been reduced. "
                "Run the last backward before it outside no_sync"
            )

    @not_compiled
    def hold(self, units: list[Unit]) -> None:
        """Gather units and keep them until `let_go`."""
        self.settle()
        for unit in units:
            if unit.divided:
                unit.pinned += 1
                if unit.state is State.AT_REST:
                    self._gather(unit)
        for unit in units:
            if unit.state is State.GATHERING:
                unit.arrive()

    @not_compiled
    def let_go(self, units: list[Unit]) -> None:
        for unit in units:
            if unit.divided:
                unit.pinned -= 1
                if not unit.pinned and unit.state is State.GATHERED:
                    for flat in unit.flats:
                        if flat.has_views():
                            self._leave_memory(flat)
                    self.release(unit)

    def refuse_averaged(self, what: str) -> None:
        """Raise where other weights than the trained ones are shown."""
        for flat in self.flats:
            if flat.aside is not None:
                raise RuntimeError(
                    f"{what} within ema.applied(), where '{flat.layout.slots[0].name}' and the others have their averaged "
                    "values: leave the block first"
                )

    def proposals(self) -> list[list[int] | None]:
        """For each kind of work, the order that this rank saw where it differs from the recorded one."""
        return [order.proposal(self._place) for order in self._orders]

    def adopt(self, everyone: list[list[list[int] | None]]) -> None:
        """Record the orders that the ranks propose. Raises OrderError when two ranks' forwards contradict."""
        agree([orders[0] for orders in everyone], [unit.name for unit in self.units])
        for order, seen in zip(self._orders, zip(*everyone)):
            longest = max((s for s in seen if s), key=len, default=None)
            if longest is not None:
                order.adopt([self.units[place] for place in longest])

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _help(weak: Any, needed: int) -> None:
    """Issue gathers up to number `needed`, for which another rank waits while this one waits for a reduction.

    Orders that are not yet learned may have a unit's reduction before a gather that it depends on elsewhere.
    """
    schedule = weak()
    walk = schedule._walk if schedule is not None else None
    while walk is not None and walk.next() is not None and schedule.world.gathers.issued < needed:
        schedule._advance(walk)


def _backward_dropped(weak: Any, task: Any) -> None:
    """Autograd forgot the callback of a backward: it has been called, or the backward raised."""
    schedule = weak()
    if schedule is not None and schedule._in_session and schedule._task is task and schedule.world.notes is not None:
        schedule.world.notes.raised("an exception in its backward")
