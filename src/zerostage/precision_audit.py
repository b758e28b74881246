"""What a training state keeps in too few bits, and how much of its updates rounding to 16 bits loses.

`look` is local to one rank, for any engine that `zerostage.audit` knows; `findings` brings
the ranks together. What is read is what is kept: a cast within a forward (autocast) leaves
no trace, except that FSDP's and FSDP2's mixed precision is known from their settings.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zerostage.division import own_name
from zerostage.mistakes import some
from zerostage.storages import _STATE_TERMS, Holdings, _flat_and_originals, _fsdp2, _inner, _tensors

#: At most about so many elements of a rank's weights are looked at.
SAMPLE = 1_000_000
#: Names that a note lists.
NAMED = 8
_TABLE = re.compile(r"inv_freq|freqs|(cos|sin)_cache|rotary|rope", re.IGNORECASE)


@dataclass(frozen=True)
class PrecisionFindings:
    """What is kept in 16 bits or fewer, and what that costs; the same on all ranks.

    Shares are between 0 and 1. An update is lost where the weight rounds to what it was. The
    shares are estimates: the update is computed from the optimizer's state and learning rate
    at this moment (Adam's m / (sqrt(v) + eps) with bias correction, or the momentum), without
    weight decay, for up to a million elements of each rank; updates of exactly 0 do not count.
    None where the state gives no update: before the first step, at a learning rate of 0, or
    with an optimizer that keeps something else.
    """

    #: Trainable weights in 16 bits that the optimizer updates with no wider copy; None where this is not known
    #: (no optimizer given, DeepSpeed).
    without_master: list[str] | None = None
    #: Their share of the trainable elements.
    without_master_share: float | None = None
    #: Parameters with a moment in 16 bits or fewer, and the share of all elements of moments that are so.
    narrow_moments: list[str] = field(default_factory=list)
    narrow_moments_share: float | None = None
    #: Parameters and running statistics of norm layers that the forward uses in 16 bits.
    narrow_norms: list[str] = field(default_factory=list)
    #: Buffers of rotary embeddings that are kept in 16 bits.
    narrow_tables: list[str] = field(default_factory=list)
    #: The share of updates that rounding loses, of weights without masters.
    lost: float | None = None
    #: The share that rounding would lose of the other weights, if they had no copy in more than 16 bits.
    would_be_lost: float | None = None
    sampled: int = 0  #: updates that the two shares are of, on all ranks together

    def notes(self) -> list[str]:
        """The findings in plain sentences."""
        notes = []
        if self.without_master:
            notes.append(
                f"{self.without_master_share:.1%} of the trainable weights are kept in 16 bits and updated without a wider "
                f"copy (no masters): {some(self.without_master, NAMED)}."
            )
        if self.lost is not None:
            notes.append(f"Rounding to 16 bits loses an estimated {self.lost:.1%} of the updates of weights without masters.")
        if self.would_be_lost is not None:
            share = f"an estimated {self.would_be_lost:.1%} of the updates would be lost"
            notes.append(f"Without a copy of the weights in more than 16 bits, {share}.")
        if self.narrow_moments:
            share = f"{self.narrow_moments_share:.1%} of the moments are kept in 16 bits or fewer"
            notes.append(f"{share}: those of {some(self.narrow_moments, NAMED)}.")
        if self.narrow_norms:
            notes.append(f"Norm layers work with 16-bit weights: {some(self.narrow_norms, NAMED)}.")
        if self.narrow_tables:
            notes.append(f"Rotary tables are cast down to 16 bits: {some(self.narrow_tables, NAMED)}; far positions get wrong angles.")
        return notes


@dataclass
class Look:
    """What one rank sees."""

    trainable: Counter[str] = field(default_factory=Counter)  #: name -> whole elements
    bare: set[str] | None = None  #: names of those without masters
    moments: int = 0  #: elements on this rank
    narrow_moments: Counter[str] = field(default_factory=Counter)  #: name, or names of a flat parameter -> elements on this rank
    norms: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    #: (updates lost, updates) of weights without masters, and of the others
    lost: dict[bool, tuple[int, int]] = field(default_factory=dict)


class _Weight(NamedTuple):
    numel: int
    used: torch.dtype  #: in forward
    trainable: bool


class _Piece(NamedTuple):
    """A tensor that the optimizer updates."""

    names: str  #: of the parameters in it
    value: Tensor
    bare: bool  #: 16 bits, and there is no wider copy
    used: torch.dtype
    state: dict[str, Any]
    group: dict[str, Any]


def look(model: nn.Module, optimizer: Any = None) -> Look:
    """What this rank sees of `model` and `optimizer`, whatever engine made them. No communication, nothing is changed."""
    from zerostage.engine import engine_of

    seen = Look()
    pieces: list[_Piece] = []
    if (engine := engine_of(model)) is not None:
        if optimizer is None and engine.driver is not None:
            optimizer = engine.driver.optimizer
        shown = [(own_name(path), p) for path, p in model.named_parameters()]
        weights = {name: _Weight(p.numel(), p.dtype, p.requires_grad) for name, p in shown}
        if engine.driver is not None:
            pieces = list(_segments(engine, {id(p): name for name, p in shown}))
            seen.bare = set()
    else:
        # DeepSpeed's optimizers keep their masters in ways of their own.
        readable = optimizer is not None and not hasattr(model, "zero_optimization_stage")
        if isinstance(model, DistributedDataParallel) or hasattr(model, "zero_optimization_stage"):
            model = model.module
        weights, index = _weights(model)
        if readable:
            pieces = list(_updated(optimizer, index, weights))
            seen.bare = set()
    seen.trainable.update({name: w.numel for name, w in weights.items() if w.trainable})
    norms = {own_name(path) for path, module in model.named_modules() if "norm" in type(module).__name__.lower()}
    seen.norms = [name for name, w in weights.items() if _narrow(w.used) and name.rpartition(".")[0] in norms]
    rotary = {own_name(path) for path, module in model.named_modules() if _TABLE.search(type(module).__name__)}
    for path, buffer in model.named_buffers():
        name = own_name(path)
        parent, _, last = name.rpartition(".")
        if _narrow(buffer.dtype) and buffer.is_floating_point():
            if parent in norms:
                seen.norms.append(name)
            elif parent in rotary or _TABLE.search(last):
                seen.tables.append(name)
    for piece in pieces:
        if piece.bare:
            seen.bare.update(piece.names.split(", "))
        for key, value in piece.state.items():
            for tensor in _tensors(value) if _STATE_TERMS.get(key) in ("exp_avg", "exp_avg_sq") else ():
                size = sum(inner.numel() for inner in _inner(tensor)) if tensor.dim() else 0
                seen.moments += size
                if size and _narrow(tensor.dtype):
                    seen.narrow_moments[piece.names] += size
    stride = 1 + sum(piece.value.numel() for piece in pieces) // SAMPLE
    for piece in pieces:
        if (found := _lost(piece, stride | 1)) is not None:  # odd: an even one would meet the same columns of each row
            before = seen.lost.get(piece.bare, (0, 0))
            seen.lost[piece.bare] = before[0] + found[0], before[1] + found[1]
    return seen


def findings(looks: list[Look]) -> PrecisionFindings:
    """What all ranks' looks say together."""
    trainable = Counter({name: size for one in looks for name, size in one.trainable.items()})
    known = [one.bare for one in looks if one.bare is not None]
    bare = [name for name in trainable if any(name in names for names in known)] if known else None
    moments = sum(one.moments for one in looks)
    narrow = sum((one.narrow_moments for one in looks), Counter())
    named = dict.fromkeys(name for names in narrow for name in names.split(", "))
    counts = {kind: [sum(part) for part in zip(*(one.lost.get(kind, (0, 0)) for one in looks))] for kind in (True, False)}
    shares = {kind: lost / updates if updates else None for kind, (lost, updates) in counts.items()}
    return PrecisionFindings(
        without_master=bare,
        without_master_share=sum(trainable[name] for name in bare) / max(1, sum(trainable.values())) if known else None,
        narrow_moments=list(named),
        narrow_moments_share=sum(narrow.values()) / moments if moments else None,
        narrow_norms=list(dict.fromkeys(name for one in looks for name in one.norms)),
        narrow_tables=list(dict.fromkeys(name for one in looks for name in one.tables)),
        lost=shares[True],
        would_be_lost=shares[False],
        sampled=sum(updates for _, updates in counts.values()),
    )


def _narrow(dtype: torch.dtype) -> bool:
    return dtype.itemsize < 4


# -- Where the weights, and what the optimizer updates, are found ----------------------------


def _segments(engine: Any, names: dict[int, str]) -> Iterator[_Piece]:
    """This rank's parts of the parameters of a zerostage engine."""
    driver = engine.driver
    groups = {id(p): group for group in driver.optimizer.param_groups for p in group["params"]}
    for flat, segments in driver.segments.items():
        bare = _narrow(flat.dtype) and not flat.master_dtype.itemsize > flat.dtype.itemsize
        for segment in segments:
            p = segment.parameter
            if id(p) in groups and id(p) in names:
                state = driver.optimizer.state.get(p, {})
                yield _Piece(names[id(p)], segment.master, bare, flat.dtype, state, groups[id(p)])


def _weights(model: nn.Module) -> tuple[dict[str, _Weight], dict[int, str]]:
    """The weights by name, and the names by the id of each tensor that an optimizer may hold for them."""
    weights: dict[str, _Weight] = {}
    index: dict[int, str] = {}
    flats: set[int] = set()
    for path, module in model.named_modules():
        handle = getattr(module, "_handle", None)
        if not hasattr(handle, "_sharding_strategy"):
            continue
        flat = handle.flat_param
        flats |= {id(p) for p in _flat_and_originals(module)}
        names = [own_name(".".join(filter(None, (path, name)))) for name in flat._fqns]
        index[id(flat)] = ", ".join(names)
        originals = flat._params or [flat] * len(names)
        for name, size, original in zip(names, flat._numels, originals):
            weights[name] = _Weight(size, handle._fwd_bwd_param_dtype or flat.dtype, original.requires_grad)
            if original is not flat:
                index[id(original)] = name
    records = _fsdp2(Holdings(), model)
    for path, shown in model.named_parameters():
        if id(shown) in flats:
            continue
        name, record = own_name(path), records.get(id(shown))
        kept = shown if record is None else record.sharded_param
        used = kept.dtype if record is None else getattr(record, "param_dtype", None) or kept.dtype  # set by the first forward
        weights[name] = _Weight(getattr(kept, "ds_numel", kept.numel()), used, kept.requires_grad)
        index[id(shown)] = index[id(kept)] = name
    return weights, index


def _updated(optimizer: Any, index: dict[int, str], weights: dict[str, _Weight]) -> Iterator[_Piece]:
    """The tensors that `optimizer` updates: the model's own, or copies of them that it was given instead."""
    # ZeroRedundancyOptimizer and other wrappers hold the optimizer that does the work.
    optimizer = getattr(optimizer, "optim", None) or getattr(optimizer, "optimizer", None) or optimizer
    for group in optimizer.param_groups:
        for number, p in enumerate(group["params"]):
            state = optimizer.state.get(p, {})
            if id(p) not in index:
                yield _Piece(f"tensor {number} of the optimizer", p, False, torch.bfloat16, state, group)
                continue
            masters = [value for key, value in state.items() if _STATE_TERMS.get(key) == "master" and isinstance(value, Tensor)]
            value = next((master for master in masters if master.dtype.itemsize > p.dtype.itemsize), p)
            used = weights[index[id(p)].split(", ")[0]].used
            yield _Piece(index[id(p)], value, value is p and _narrow(p.dtype), used, state, group)


# -- What rounding loses ---------------------------------------------------------------------


def _lost(piece: _Piece, stride: int) -> tuple[int, int] | None:
    """How many of the sampled updates leave the 16-bit weight as it was, and how many updates that are not 0 there are."""
    states = {_STATE_TERMS[key]: value for key, value in piece.state.items() if key in _STATE_TERMS and isinstance(value, Tensor)}
    if piece.state.get("max_exp_avg_sq") is not None:
        states["exp_avg_sq"] = piece.state["max_exp_avg_sq"]
    adam = "betas" in piece.group and {"exp_avg", "exp_avg_sq"} <= states.keys()
    if not adam and "momentum_buffer" not in piece.state:
        return None
    weight, first, second = (_sample(t, stride) for t in (piece.value, states["exp_avg"], states.get("exp_avg_sq")))
    # Where an engine shows whole weights at this moment, their parts cannot be told apart.
    if weight.shape != first.shape:
        return None
    lr = float(piece.group["lr"]) * (-1 if piece.group.get("maximize") else 1)
    if adam:
        # Without a step count there is no telling how far the moments have warmed up: take them for warm.
        step = float(piece.state.get("step", 0))
        corrections = [1 - float(beta) ** step if step else 1.0 for beta in piece.group["betas"]]
        update = lr * (first / corrections[0]) / ((second / corrections[1]).sqrt() + piece.group["eps"])
    else:
        update = lr * first
    rounding = piece.used if _narrow(piece.used) else torch.bfloat16
    before = weight.to(rounding)
    given = update != 0
    lost = given & ((before.float() - update).to(rounding) == before)
    return int(lost.sum()), int(given.sum())


def _sample(tensor: Tensor | None, stride: int) -> Tensor:
    """Every `stride`-th element that this rank holds of `tensor`, in fp32."""
    parts = [] if tensor is None else [inner.detach().reshape(-1)[::stride].float() for inner in _inner(tensor)]
    return torch.cat(parts) if parts else torch.empty(0)
