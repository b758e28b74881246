"""Where a DeepSpeed checkpoint has its masters and optimizer states: in flat tensors of the ranks, or in a file for each.

`shapes` has a dict from name to shape for each flat tensor: one for each parameter group at stages 1 and 2, at stage 3
one for each of DeepSpeed's sub-groups.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch

from zerostage.checkpoint.damage import DamagedError
from zerostage.checkpoint.deepspeed_folder import Folder
from zerostage.checkpoint.foreign_file import is_opaque, open_file
from zerostage.checkpoint.source import MASTER

Shapes = list[dict[str, tuple[int, ...]]]


def of_rank(folder: Folder, rank: int) -> dict[str, Any]:
    """What the rank's file has of the optimizer; of a universal checkpoint what its ranks share."""
    found = open_file(folder.optimizer(rank))
    if not folder.universal and isinstance(found, dict):
        found = found.get("optimizer_state_dict")
    if not isinstance(found, dict):
        raise DamagedError(f"{folder.optimizer(rank)} has no state of DeepSpeed's optimizer: use another checkpoint")
    return found


def degree(held: dict[str, Any]) -> int:
    """Over how many ranks the state was divided."""
    count = held.get("partition_count", 1)
    return max(count) if isinstance(count, list) else count


class Shards:
    """Of the ranks' own files; `first` is what is in rank 0's. `groups` is as Source has it."""

    def __init__(self, folder: Folder, first: dict[str, Any], shapes: Shapes, ranks: int) -> None:
        self._split = "fp32_flat_groups" in first  # stage 3: each parameter over the ranks; else all of a group end to end
        self._ranks = ranks
        self._flats: list[list[dict[str, torch.Tensor]]] = [[] for _ in shapes]  # by flat tensor, rank and term
        self._place: dict[str, tuple[int, int]] = {}  # of each parameter the flat tensor, and the first element in it
        self._numel: dict[str, int] = {}
        for rank in range(ranks):
            held = first if rank == 0 else of_rank(folder, rank)
            if degree(held) != ranks or ("fp32_flat_groups" in held) != self._split:
                other = f"{folder.optimizer(0).name}, whose run had {ranks} ranks"
                raise ValueError(f"{folder.optimizer(rank)} is of another run than {other}: use another checkpoint")
            self._add(folder, rank, held)
        paddings = first.get("param_alignment_paddings") or [[0] * len(flat) for flat in shapes]
        for number, flat in enumerate(shapes):
            at = 0
            for (name, shape), padding in zip(flat.items(), paddings[number]):
                numel = self._numel[name] = math.prod(shape)
                self._place[name] = number, at
                at += math.ceil(numel / ranks) if self._split else numel + padding
            sizes = [held[MASTER].numel() for held in self._flats[number]]
            if min(sizes) < at if self._split else sum(sizes) < at:
                raise ValueError(
                    f"{folder.path} has {sizes} elements on its ranks in flat tensor {number}, and its {len(flat)} parameters "
                    f"take {at} {'on each' if self._split else 'together'}: state on NVMe and that of MiCS cannot be read"
                )
        self._ends = [list(accumulate(held[MASTER].numel() for held in flat)) for flat in self._flats]
        base = _base(first)
        self._scalars = [_scalars(first, number) for number in range(len(shapes))]
        self.groups = _groups(base.get("param_groups") if isinstance(base, dict) else None, shapes, folder)

    def _add(self, folder: Folder, rank: int, held: dict[str, Any]) -> None:
        masters = held.get("fp32_flat_groups" if self._split else "single_partition_of_fp32_groups")
        if not isinstance(masters, list) or len(masters) != len(self._flats):
            groups = len(self._flats)
            what = f"{folder.optimizer(rank)} has no flat fp32 tensor for each of {groups} groups"
            raise ValueError(f"{what}: its form is not known, use another checkpoint")
        paddings = held.get("group_paddings") or [0] * len(masters)
        for number, master in enumerate(masters):
            numel = master.numel()
            whole = numel if self._split else numel + paddings[number]
            terms = {MASTER: master.reshape(-1)}
            for key, value in _state(held, number).items():
                # Of one value per element, with or without the padding at the end.
                if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() in (numel, whole):
                    terms[key] = value
            if rank and (missing := self._flats[number][0].keys() - terms.keys()):
                lacks = f"lacks {', '.join(sorted(missing))} of group {number}, which rank 0 has"
                raise ValueError(f"{folder.optimizer(rank)} {lacks}: use another checkpoint")
            self._flats[number].append(terms)

    def terms(self, number: int) -> dict[str, torch.dtype]:
        """The dtype of each term of the parameters in flat tensor `number`."""
        return {term: value.dtype for term, value in self._flats[number][0].items()}

    def scalars(self, number: int) -> dict[str, Any]:
        """The optimizer's numbers that these parameters share."""
        return self._scalars[number]

    def parts(self, term: str, name: str, start: int, stop: int) -> Iterator[torch.Tensor]:
        """The tensors that make up elements [start, stop) of the parameter, in order."""
        number, first = self._place[name]
        flats = self._flats[number]
        each = math.ceil(self._numel[name] / self._ranks)
        while start < stop:
            if self._split:
                rank, at = divmod(start, each)
                count = min(each - at, stop - start)
                at += first
            else:
                rank = bisect_right(self._ends[number], first + start)
                at = first + start - (self._ends[number][rank - 1] if rank else 0)
                count = min(self._ends[number][rank] - first - start, stop - start)
            yield flats[rank][term][at : at + count]
            start += count


class Universal:
    """Of a universal checkpoint, which has a file for each parameter and state; `first` is in the file that all share."""

    def __init__(self, folder: Folder, first: dict[str, Any], shapes: Shapes, ranks: int) -> None:
        self._folder = folder
        self._numel = {name: math.prod(shape) for flat in shapes for name, shape in flat.items()}
        self._terms: list[dict[str, torch.dtype]] = []
        self._scalars: list[dict[str, Any]] = []
        for number, flat in enumerate(shapes):
            states = folder.states(next(iter(flat), ""))
            states = [state for state in states if state not in ("fp32", "step")]
            for name in flat:
                if missing := {"fp32", *states}.difference(folder.states(name)):
                    file = folder.state(name, min(missing))
                    raise DamagedError(f"{file} is missing: restore the file, or use another checkpoint")
            # All of a group share their dtypes and their step, and the files may be very many.
            name = next(iter(flat), "")
            files = {MASTER: "fp32", **{state: state for state in states}} if flat else {}
            self._terms.append({term: self._open(name, file).dtype for term, file in files.items()})
            scalars = _scalars(first, number)
            if (file := folder.state(name, "step")).exists():
                scalars["step"] = _step(open_file(file))
            self._scalars.append(scalars)
        self.groups = _groups(first.get("param_groups"), shapes, folder)

    def _open(self, name: str, state: str) -> torch.Tensor:
        file = self._folder.state(name, state)
        value = open_file(file)
        value = value["param"] if isinstance(value, dict) and "param" in value else value
        if not isinstance(value, torch.Tensor) or value.numel() != self._numel[name]:
            raise DamagedError(f"{file} does not have the {self._numel[name]} elements of '{name}': use another checkpoint")
        return value.reshape(-1)

    def terms(self, number: int) -> dict[str, torch.dtype]:
        return self._terms[number]

    def scalars(self, number: int) -> dict[str, Any]:
        return self._scalars[number]

    def parts(self, term: str, name: str, start: int, stop: int) -> Iterator[torch.Tensor]:
        # Not kept open: a process may map some 65,000 files, and a model can have more parameters than that.
        yield self._open(name, "fp32" if term == MASTER else term)[start:stop]


def _base(held: dict[str, Any]) -> Any:
    """What the optimizer within DeepSpeed's gave as its state_dict: at stage 3 under another key."""
    return held.get("optimizer_state_dict" if "fp32_flat_groups" in held else "base_optimizer_state") or {}


def _state(held: dict[str, Any], number: int) -> dict[str, Any]:
    base = _base(held)
    return base[number] if isinstance(base, list) else base.get("state", {}).get(number, {})


def _scalars(held: dict[str, Any], number: int) -> dict[str, Any]:
    """The numbers in the state of flat tensor `number`, with 'step' wherever the optimizer keeps it (FusedAdam: in its group)."""
    state, base = _state(held, number), _base(held)
    found = {k: v for k, v in state.items() if isinstance(v, (int, float)) or isinstance(v, torch.Tensor) and not v.dim()}
    groups = (base.get("param_groups") if isinstance(base, dict) else None) or held.get("param_groups") or []
    own = [group["step"] for group in groups if "step" in group and number in group["params"]]
    steps = [found.get("step"), *own, held.get("base_optimizer_state_step")]
    if (step := next((step for step in steps if step is not None), None)) is not None:
        found["step"] = _step(step)
    return found


def _step(value: Any) -> torch.Tensor:
    """In the form of torch's optimizers."""
    return torch.tensor(float(value), dtype=torch.float32)


def _groups(groups: list[dict[str, Any]] | None, shapes: Shapes, folder: Folder) -> list[dict[str, Any]] | None:
    if groups is None:
        return None
    found = []
    for number, group in enumerate(groups):
        settings = {key: value for key, value in group.items() if key not in ("params", "step")}
        for key, value in settings.items():
            if is_opaque(value):
                what = f"{folder.path} has {key} = {value} in parameter group {number}"
                raise ValueError(f"{what}: only numbers and tensors are read")
        found.append({**settings, "names": [name for flat in group["params"] for name in shapes[flat]]})
    return found
