"""A tape: the operations of a piece of a model, and which tensors live when it runs forward and backward.

This is autograd's bookkeeping, written down. An operation allocates its results; a tensor goes when no later
operation reads it and none has saved it for backward. Backward goes the other way: an operation needs the
gradients of its results, allocates those of its inputs, hands out its weights' gradients, and lets go of what
it had saved. A second gradient for one tensor is added into the first.

A tape turns that into events; the engine around it adds its own (`buffers.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any


class Tensor:
    """One tensor's memory. `term` is the account it goes to; `base` the tensor that it is a view of."""

    __slots__ = ("size", "term", "needs_grad", "base")

    def __init__(self, size: int, term: str = "activations", needs_grad: bool = True, base: Tensor | None = None) -> None:
        self.size, self.term, self.needs_grad, self.base = size, term, needs_grad, base

    @property
    def storage(self) -> Tensor:
        return self.base or self


@dataclass
class Op:
    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    saves: list[Tensor]
    weight: int = 0  # elements of the weight that it uses and that is trained
    forward_temp: int = 0  # bytes that exist only while it runs
    backward_temp: int = 0
    same_grad: bool = False  # hands its result's gradient on as it is (additions, views)
    leaves: int = 0  # bytes of a gradient that its backward leaves for a later part to add to; negative: that it takes over
    overwrites: bool = False  # puts its input's gradient where the saved input was
    kept_by_policy: bool = False  # selective checkpointing keeps its results
    holds: tuple[Tensor, ...] = ()  # what local variables of the modelling code keep until it has run
    term: str = "activations"


@dataclass(frozen=True)
class Event:
    """`size` more bytes of `term`; or, with the term 'gradient', backward has made the gradient of a weight of `size` elements."""

    term: str
    size: int


@dataclass
class Tape:
    """Operations in the order of forward, from `start` (a tensor that exists before) to the last one's results."""

    start: Tensor | None = None
    ops: list[Op] = field(default_factory=list)
    _played: dict[tuple, list[Event]] = field(default_factory=dict)

    def events(self, kind: str, *arguments: Any) -> list[Event]:
        """What `forward`, `recompute` or `backward` yields, kept for the next block that is like this one."""
        key = (kind, *arguments)
        if key not in self._played:
            self._played[key] = _short(list(getattr(self, kind)(*arguments)))
        return self._played[key]

    def op(
        self, name: str, inputs: list[Tensor], sizes: list[int], *, saves: str | list[Tensor] = "",
        term: str | None = None, needs_grad: bool | None = None, **rest,
    ) -> Tensor:  # fmt: skip
        """Append an operation and return its first result. `saves`: tensors, or 'in', 'out', 'in out'."""
        needs = any(t.needs_grad for t in inputs) or bool(rest.get("weight")) if needs_grad is None else needs_grad
        term = term or (inputs[0].term if inputs else "activations")
        outputs = [Tensor(size, term, needs) for size in sizes]
        if isinstance(saves, str):
            saves = [t for word, part in (("in", inputs), ("out", outputs)) if word in saves.split() for t in part]
        self.ops.append(Op(name, inputs, outputs, list(saves) if needs else [], term=term, **rest))
        return outputs[0]

    def views(self, name: str, x: Tensor, sizes: list[int]) -> list[Tensor]:
        """Views of x: they share its memory, and backward puts their gradients into one of x's size."""
        outputs = [Tensor(size, x.term, x.needs_grad, x.storage) for size in sizes]
        self.ops.append(Op(name, [x], outputs, [], term=x.term))
        return outputs

    @property
    def end(self) -> Tensor:
        return self.ops[-1].outputs[0]

    def forward(self, save: str = "all", keep_start: bool = False, there: frozenset[int] | set[int] = frozenset()) -> Iterator[Event]:
        """Events of a forward. save: 'all', 'policy' (what selective checkpointing keeps) or 'nothing'.

        The result stays for whoever comes next. keep_start: checkpointing keeps the start. there: results that exist.
        """
        last = {id(t.storage): i for i, op in enumerate(self.ops) for t in (*op.inputs, *op.holds)}
        kept = self._kept(save)
        if keep_start and self.start is not None:
            kept.add(id(self.start))
        end = id(self.end)
        born = {id(self.start)} if self.start is not None else set()
        for i, op in enumerate(self.ops):
            made = sum(t.size for t in op.outputs if id(t) not in there and t.base is None)
            yield Event(op.term, made + op.forward_temp)
            if op.forward_temp:
                yield Event(op.term, -op.forward_temp)
            born.update(id(t) for t in op.outputs if t.base is None)
            for t in {id(t.storage): t.storage for t in (*op.inputs, *op.outputs, *op.holds)}.values():
                if id(t) in born and last.get(id(t), i) == i and id(t) not in kept and id(t) != end:
                    yield Event(t.term, -t.size)
                    born.discard(id(t))

    def recompute(self, kept: str) -> Iterator[Event]:
        """Events of a forward within backward, which saves all; what the first one has `kept` is there already.

        It ends as soon as the last saved tensor is there (checkpoint's early stop), so the result is not made again.
        """
        yield from self.forward("all", keep_start=True, there=self._kept(kept))
        yield Event(self.end.term, -self.end.size)

    def backward(self, upstream: bool = True, free_start: bool = True) -> Iterator[Event]:
        """Events of the backward after a forward that saved all.

        upstream: the gradient of the result is there already (the piece after this one made it); it is let go of
        here. The start's gradient, if it needs one, is made and stays. free_start: so the start itself goes, if saved.
        """
        holders = Counter(id(t.storage) for op in self.ops for t in op.saves)
        grads: dict[int, list] = {}  # by tensor: its gradient, maybe shared: [size, tensors, term]
        if upstream:
            grads[id(self.end)] = [self.end.size, 1, self.end.term]
        for op in reversed(self.ops):
            mine = [grads.pop(id(t)) for t in op.outputs if id(t) in grads]
            wanted = [t for t in op.inputs if t.needs_grad]
            done: list[tuple[str, int]] = [(op.term, op.backward_temp)]
            made: list[tuple[str, int]] = [(op.term, op.backward_temp)]
            if op.overwrites:
                for t in wanted:
                    grads[id(t)] = [t.size, 1, t.term]
            elif op.same_grad and mine:
                for t in wanted:
                    if id(t) not in grads:
                        mine[0][1] += 1
                        grads[id(t)] = mine[0]
            else:
                for t in wanted:
                    made.append((t.term, t.size))
                    if id(t) in grads:
                        done.append((t.term, t.size))  # added into the one that is there
                    else:
                        grads[id(t)] = [t.size, 1, t.term]
            yield from (Event(term, size) for term, size in made if size)
            if op.leaves < 0:  # autograd adds the gradient that was left into memory of its own
                yield Event("reduce", -2 * op.leaves)
                yield Event("reduce", 3 * op.leaves)
            if op.weight:
                yield Event("gradient", op.weight)
            if op.leaves > 0:
                yield Event("reduce", op.leaves)
            for grad in mine:
                grad[1] -= 1
                if not grad[1]:
                    done.append((grad[2], grad[0]))
            for t in (t.storage for t in op.saves) if not op.overwrites else ():
                holders[id(t)] -= 1
                if not holders[id(t)] and (free_start or t is not self.start):
                    yield Event(t.term, -t.size)
            yield from (Event(term, -size) for term, size in done if size)

    def _kept(self, save: str) -> set[int]:
        if save == "all":
            return {id(t.storage) for op in self.ops for t in op.saves}
        if save == "policy":
            return {id(t.storage) for op in self.ops if op.kept_by_policy for t in op.outputs}
        return set()

    def saved(self, save: str = "all") -> int:
        """Bytes that a forward leaves behind for backward, the start left out."""
        kept = {id(t): t for op in self.ops for t in (*op.saves, *op.outputs) if t is not self.start and t.base is None}
        return sum(t.size for key, t in kept.items() if key in self._kept(save))


def _short(events: list[Event]) -> list[Event]:
    """The same rises, falls and highest points, between gradients, in as few events as there are terms."""
    found: list[Event] = []
    piece: list[Event] = []
    for event in (*events, Event("gradient", 0)):
        if event.term != "gradient":
            piece.append(event)
            continue
        totals = list(accumulate(e.size for e in piece))
        top = max(range(len(piece)), key=totals.__getitem__) + 1 if piece and max(totals) > 0 else 0
        for part in (piece[:top], piece[top:]):
            sums: Counter[str] = Counter()
            for e in part:
                sums[e.term] += e.size
            found += [Event(term, size) for term, size in sorted(sums.items(), key=lambda item: item[1]) if size]
        piece = []
        if event.size:
            found.append(event)
    return found
