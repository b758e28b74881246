"""A flat: parameters of one dtype laid end to end in a buffer, and this rank's slices of their training state.

Parameters are views of the buffer. Where weights are divided, the whole buffer exists only
while its unit is gathered: its storage is resized to nothing and back, so that it keeps the
identity that the parameters, and what autograd may have saved of them, refer to.

Gradients pass through a flat in three forms. `local` is this rank's own gradient of the
whole flat, filled as backward produces it. `grad` is what the partition keeps: its own part
is reduced over all ranks. Where every rank keeps whole gradients the two share one buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerostage import guard
from zerostage.collectives import Pending, World, tree_sum
from zerostage.layout import Layout
from zerostage.precision import Precision

if TYPE_CHECKING:
    from zerostage.unit import Unit


class Flat:
    """Parameters of one dtype laid end to end, and this rank's slices of their training state.

    Elements are counted in the whole buffer: `bounds[level]` is the interval that this rank
    holds after `level` divisions (1 weights, 2 gradients, 3 optimizer, 4 this rank's alone).
    """

    def __init__(
        self,
        index: int,
        unit: Unit,
        parameters: Sequence[nn.Parameter],
        names: Sequence[tuple[str, ...]],
        precision: Precision | None,
        world: World,
        optimized: bool,
    ) -> None:
        self.index, self.unit, self.world = index, unit, world
        self.parameters = list(parameters)
        self.layout = Layout([(n, p.shape) for n, p in zip(names, parameters)], world.size)
        self.device = world.device
        self.names = list(names)
        self.sources = [parameter.dtype for parameter in parameters]  # of the values from which the weights were made
        self.trainable = parameters[0].requires_grad
        self.dtype = precision.weights if precision else parameters[0].dtype
        self.grad_dtype = precision.gradients if precision else None
        self.master_dtype = precision.master if precision and self.trainable and optimized else self.dtype
        partition = world.partition
        self.bounds = [partition.interval(level, world.rank, world.size, self.layout.numel) for level in range(5)]

        #: weights that this rank holds at rest; the whole buffer where weights are not divided
        self.shard = torch.empty(0, dtype=self.dtype, device=self.device)
        self.whole = self.shard
        #: the optimizer's slice in a wider dtype, or the same elements of `shard` where none is kept
        self.master = self.shard
        #: the trained weights, while others are in their place (`show`)
        self.aside: torch.Tensor | None = None
        self.grad: torch.Tensor | None = None
        self.local: torch.Tensor | None = None
        self._held: torch.Tensor | None = None
        self.exposed: set[int] = set()  # slots whose `p.data` somebody has asked for
        self.arrived: set[int] = set()  # slots whose gradient is in `local`
        self.kept: set[int] = set()  # slots whose gradient is in `grad`
        self.contributed: set[int] = set()  # those of them to which this rank's backward has added
        self.unfrozen: dict[int, Any] = {}  # slots of a frozen flat that shall be trained, and the hooks that wait for that
        self._stale: set[int] = set()  # slots whose part of `grad` was dropped and not yet zeroed
        self.reduced = False  # whether `grad` holds anything
        self.reducing = False
        self._flying = 0  # bytes in `local` and received parts
        self.version = 0  # counts the changes of `grad`
        self.generation = 0  # counts the updates of the weights

    # Weights

    def fill(self, values: Sequence[torch.Tensor], missing: bool = False) -> None:
        """Give the parameters `values`, as rank 0 has them. They become views of the flat buffer.

        missing: no rank has values yet, so there are none to send.
        """
        source = torch.zeros(self.layout.numel, dtype=self.master_dtype, device=self.device)
        for slot, value in zip(self.layout.slots, values):
            if not value.is_meta:
                source[slot.start : slot.start + slot.numel].view(slot.shape).copy_(value)
        if not missing:
            self.world.broadcast(source, f"the initial values of {self.unit.name}")
        self.whole = source.to(self.dtype)
        first, last = self.bounds[3]
        if self.has_master:
            self.master = source[first:last].clone()
        for index, (view, parameter) in enumerate(zip(self._views(), self.parameters)):
            if parameter.device != self.device:
                # a parameter cannot change its device in place; one on the meta device has nothing to lose
                empty = torch.empty(0, dtype=self.dtype, device=self.device)
                torch.utils.swap_tensors(parameter, nn.Parameter(empty, requires_grad=parameter.requires_grad))
            guard.set_present(parameter, True)
            torch.Tensor.data.__set__(parameter, view)  # no view to autograd: writing the buffer changes no saved weight
            parameter._flat, parameter._index = self, index
        self.shard = self.whole
        if self.divided:
            first, last = self.bounds[1]
            self.mine = self.whole[first:last]
            self.shard = self.mine.clone()
            self.whole.untyped_storage().resize_(0)
        if not self.has_master:
            self.master = self.step_weights
        self.note_versions()

    def _views(self) -> list[torch.Tensor]:
        return [self.whole[s.start : s.start + s.numel].view(s.shape) for s in self.layout.slots]

    def count_uses(self) -> None:
        self._uses = _uses(self.whole)

    def has_views(self, beside: int = 0) -> bool:
        """Whether more tensors than the engine's own and `beside` share the whole buffer's memory."""
        return _uses(self.whole) > self._uses + beside

    def renew(self) -> None:
        """Leave the gathered buffer to those who hold views of it, and go on with another one."""
        held = self.whole
        self.whole = torch.empty(0, dtype=self.dtype, device=self.device)
        self.whole.set_(torch.UntypedStorage(self.nbytes, device=self.device), 0, (self.layout.numel,))
        self.whole.copy_(held)
        first, last = self.bounds[1]
        self.mine = self.whole[first:last]
        for view, parameter in zip(self._views(), self.parameters):
            torch.Tensor.data.__set__(parameter, view)

    @property
    def divided(self) -> bool:
        """Whether a rank at rest holds less than the whole weights."""
        return self.world.partition.weights > 1

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates a copy of the weights in another dtype, and not the weights themselves."""
        return self.master_dtype != self.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weights."""
        return self.layout.numel * self.dtype.itemsize

    @property
    def step_weights(self) -> torch.Tensor:
        """The part of `shard` that this rank's optimizer updates."""
        return _part(self.shard, self.bounds[1], self.bounds[3])

    def gather(self) -> Pending:
        """Allocate the whole buffer and start to fill it. At rest before, complete once awaited."""
        what = f"the weights of {self.unit.name}"
        with self.world.span("gather", what):
            self.whole.untyped_storage().resize_(self.nbytes)
            self.world.gathered.change(self.nbytes)
            self.mine.copy_(self.shard)
        return self.world.teams[0].gather(self.whole, what, self.index)

    def release(self) -> None:
        self.world.gathered.change(-self.whole.untyped_storage().nbytes())
        self.whole.untyped_storage().resize_(0)

    def unfreeze(self, index: int) -> None:
        """Note that a frozen parameter shall be trained; `unfreezing.regroup` sees to it before the next forward."""
        if not self.trainable and index not in self.unfrozen:
            self.unfrozen[index] = self.parameters[index].register_post_accumulate_grad_hook(_refuse_early_gradient)

    def changed(self) -> list[int]:
        """Slots whose parameter may have been written to by hand since this was last noted."""
        return [i for i, p in enumerate(self.parameters) if p._version != self._versions[i] or i in self.exposed]

    def absorb_changes(self) -> None:
        """Where weights are whole, a user may have changed them: let the masters of what differs follow."""
        if self.divided or not self.has_master or self.aside is not None:
            return
        changed = set(self.changed())
        base = self.bounds[3][0]
        for index, first, last in self.layout.segments(*self.bounds[3]) if changed else ():
            if index in changed:
                self.follow(slice(first - base, last - base))
        self.note_versions()

    def follow(self, part: slice = slice(None)) -> None:
        """Give masters in `part` of the optimizer's slice the weights' values; one that its weight still shows stays."""
        master, weights = self.master[part], self.step_weights[part]
        torch.where(master.to(self.dtype) == weights, master, weights.to(self.master_dtype), out=master)

    def note_versions(self) -> None:
        self._versions = [parameter._version for parameter in self.parameters]
        self.exposed.clear()

    def updated(self) -> None:
        """There are new weights, which a graph made before must not use."""
        self.generation += 1
        if not self.divided:
            torch.autograd.graph.increment_version(self.parameters)
            self.note_versions()

    def write_back(self) -> None:
        """Make the gathered values, changed by hand, the ones that this rank keeps and trains."""
        if self.divided:
            self.shard.copy_(self.mine)
        if self.has_master:
            self.follow()
        self.note_versions()

    def publish(self) -> Iterator[Pending]:
        """Hand updated weights to the ranks that hold them too: one collective a level, outermost first."""
        for level in (2, 1):
            team = self.world.teams[level]
            if team.size > 1:
                part = _part(self.shard, self.bounds[1], self.bounds[level])
                yield team.gather(part, f"the updated weights of {self.unit.name}", self.index)

    # Other weights in the place of the trained ones, for a while

    def set_aside(self) -> None:
        """Keep this rank's trained weights for `put_back`."""
        self.aside = self.shard.clone()

    def show(self, values: torch.Tensor) -> Iterator[Pending]:
        """Have `values`, of which this rank has the optimizer's slice, as weights on all ranks. After `set_aside`."""
        self.step_weights.copy_(values)
        self.updated()
        yield from self.publish()

    def put_back(self) -> None:
        """Undo what `set_aside` and `show` did. Needs no other rank, which may have failed."""
        if self.aside is not None:
            self.shard.copy_(self.aside)
            self.aside = None
            self.updated()

    # Gradients

    def ensure_grad(self) -> torch.Tensor:
        """The kept gradients' buffer, made when backward comes to it and let go with the last gradient in it."""
        if self.grad is None:
            first, last = self.bounds[2]
            self.grad = torch.empty(last - first, dtype=self.grad_dtype, device=self.device)
        return self.grad

    @property
    def step_grad(self) -> torch.Tensor:
        """The gradients that this rank's optimizer reads."""
        return _part(self.ensure_grad(), self.bounds[2], self.bounds[3])

    @property
    def own_grad(self) -> torch.Tensor:
        """The gradients that no other rank counts as its own: over all ranks, each element once."""
        return _part(self.ensure_grad(), self.bounds[2], self.bounds[4])

    def take(self, index: int, gradient: torch.Tensor) -> None:
        """Copy or add one parameter's gradient, as backward made it, into `local`."""
        if self.local is None:
            self._open_local()
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        slot = self.layout.slots[index]
        view = self.local[slot.start : slot.start + slot.numel].view(slot.shape)
        if index in self.arrived:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self.arrived.add(index)

    def _open_local(self) -> None:
        if self.world.partition.gradients == 1:
            self.local = self.ensure_grad()
            if self.reduced:
                # the buffer is about to receive this rank's next gradients: set aside what has been summed
                self._settle()
                self._held = self.own_grad.clone()
        else:
            self.local = torch.empty(self.layout.numel, dtype=self.grad_dtype, device=self.device)
            self._fly(self.local.nbytes)
        for first, last in self.layout.padding():
            self.local[first:last].zero_()

    def reduce(self) -> Iterator[Pending]:
        """Average `local` over all ranks and add it to `grad`. Yields each collective for the caller to await."""
        if self.local is None:
            self._open_local()
        for index, slot in enumerate(self.layout.slots):
            if index not in self.arrived:
                self.local[slot.start : slot.stop].zero_()
        self.kept.update(range(len(self.parameters)))  # another rank may have added to any of them
        self.contributed |= self.arrived
        self.arrived.clear()
        self.reducing = True
        if self.reduced:
            self._settle()
        what = f"the gradients of {self.unit.name}"
        buffer, self.local = self.local, None
        add = self._held if self._held is not None else self.own_grad if self.reduced else None
        teams = [team for team in self.world.teams if team.size > 1] or self.world.teams[:1]
        for team in teams:
            pending, parts = team.exchange(buffer, what, self.index)
            received = buffer.nbytes // team.size * (team.size - 1)
            self._fly(received)
            yield pending
            with self.world.span("reduce", what):
                if team is teams[-1]:
                    tree_sum(parts, self.own_grad, self.world.size, add)
                else:
                    wide = torch.promote_types(buffer.dtype, torch.float32)
                    buffer = torch.empty(buffer.numel() // team.size, dtype=wide, device=self.device)
                    tree_sum(parts, buffer)
            self._fly(-received)
        del buffer, parts
        self._fly(-self._flying)
        self._held = None
        self._stale.clear()
        self.reduced = True
        self.version += 1
        if self.world.teams[3].size > 1:
            yield self.world.teams[3].gather(self.step_grad, what, self.index)
        self.reducing = False

    def _fly(self, by: int) -> None:
        self._flying += by
        self.world.in_flight.change(by)

    def visible_gradient(self, index: int) -> torch.Tensor | None:
        """What `p.grad` shows: None, the gradient where it is whole and in one piece here, or a stand-in."""
        if index not in self.kept | self.arrived:
            return None
        if self.world.partition.optimizer > 1 or self._held is not None:
            return guard.DividedGradient.of(self, index)
        slot = self.layout.slots[index]
        return self.grad[slot.start : slot.start + slot.numel].view(slot.shape)

    def forget(self, index: int) -> None:
        """Drop one parameter's gradient, as `p.grad = None` asks for."""
        if index in self.kept or index in self.arrived:
            self.kept.discard(index)
            self.contributed.discard(index)
            self.arrived.discard(index)
            self._stale.add(index)
            if not self.kept and not self.arrived:
                self.drop_gradients()

    def zero(self, index: int) -> None:
        """Set one parameter's gradient to zero: it still has one."""
        slot = self.layout.slots[index]
        if self.local is not None:
            self.local[slot.start : slot.stop].zero_()
        self._zero_kept(index)
        self.version += 1

    def drop_gradients(self) -> None:
        self.kept.clear()
        self.contributed.clear()
        self.arrived.clear()
        self._stale.clear()
        self.grad = self.local = self._held = None
        self._fly(-self._flying)
        self.reduced = self.reducing = False
        self.version += 1

    def _settle(self) -> None:
        """Zero what was forgotten beside gradients that stay."""
        for index in self._stale:
            self._zero_kept(index)
        self._stale.clear()

    def _zero_kept(self, index: int) -> None:
        kept, (base, end) = (self.step_grad, self.bounds[3]) if self._held is None else (self._held, self.bounds[4])
        slot = self.layout.slots[index]
        first, last = max(slot.start, base), min(slot.stop, end)
        if first < last:
            kept[first - base : last - base].zero_()

    def settled_grad(self) -> torch.Tensor:
        """`step_grad`, with forgotten parts zero."""
        self._settle()
        return self.step_grad


def _part(buffer: torch.Tensor, bounds: tuple[int, int], part: tuple[int, int]) -> torch.Tensor:
    """The elements of interval `part` in a buffer that holds interval `bounds`."""
    return buffer[part[0] - bounds[0] : part[1] - bounds[0]]


def _refuse_early_gradient(parameter: nn.Parameter) -> None:
    torch.Tensor.grad.__set__(parameter, None)
    raise RuntimeError(
        f"'{parameter._flat.layout.slots[parameter._index].name}' was unfrozen after the last forward of the model and has "
        "no gradient buffer before the next one: compute the loss in a forward of the model, or within zerostage.gathered"
    )


def _uses(tensor: torch.Tensor) -> int:
    """How many tensors share this one's storage."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
