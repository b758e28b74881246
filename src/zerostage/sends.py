"""What this rank sends through torch.distributed while a block runs, whatever engine calls it.

Every collective passes torch's dispatcher, also those that C++ starts (DistributedDataParallel's
buckets, functional collectives) and those in hooks and on autograd's threads, which inherit the
dispatch modes of the thread that called backward. A mode there sees them all. Python threads and
callbacks of futures inherit nothing, so the methods of ProcessGroup bring the mode along.

Not seen: traffic that never reaches torch.distributed, such as a kernel with its own
communication, and collectives inside a captured CUDA graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, is_traceable_wrapper_subclass_type

#: Collective -> bytes that a rank sends of `size` bytes that it hands in, in a group of n. All-reduce, all-gather and
#: reduce-scatter: the least that is possible, which rings reach. Broadcast and reduce: n-1 copies move, a rank's share of them.
_SHARE: dict[str, Callable[[int, int], int]] = {
    "all-reduce": lambda size, n: 2 * size * (n - 1) // n,
    "all-gather": lambda size, n: size * (n - 1),
    "reduce-scatter": lambda size, n: size * (n - 1) // n,
    "broadcast": lambda size, n: size * (n - 1) // n,
    "reduce": lambda size, n: size * (n - 1) // n,
    "scatter": lambda size, n: size * (n - 1) // n,  # only the root hands anything in
    "gather": lambda size, n: size,
    "all-to-all": lambda size, n: size,  # its own part is taken off before
    "point-to-point": lambda size, n: size,
}
#: Operation -> collective, and which argument holds what this rank hands in.
_OPERATIONS = {
    **dict.fromkeys(("c10d::allreduce_", "c10d::allreduce_coalesced_"), ("all-reduce", 0)),
    **dict.fromkeys(("c10d::_allgather_base_", "c10d::allgather_"), ("all-gather", 1)),
    **dict.fromkeys(("c10d::allgather_coalesced_", "c10d::allgather_into_tensor_coalesced_"), ("all-gather", 1)),
    **dict.fromkeys(("c10d::_reduce_scatter_base_", "c10d::reduce_scatter_"), ("reduce-scatter", 1)),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::reduce_": ("reduce", 0),
    "c10d::scatter_": ("scatter", 1),
    "c10d::gather_": ("gather", 1),
    **dict.fromkeys(("c10d::alltoall_", "c10d::alltoall_base_"), ("all-to-all", 1)),
    "c10d::send": ("point-to-point", 0),
    **{f"_c10d_functional::all_reduce{kind}": ("all-reduce", 0) for kind in ("", "_", "_coalesced", "_coalesced_")},
    **{f"_c10d_functional::all_gather_into_tensor{kind}": ("all-gather", 0) for kind in ("", "_out", "_coalesced")},
    **{f"_c10d_functional::reduce_scatter_tensor{kind}": ("reduce-scatter", 0) for kind in ("", "_out", "_coalesced")},
    **{f"_c10d_functional::broadcast{kind}": ("broadcast", 0) for kind in ("", "_")},
    "_c10d_functional::all_to_all_single": ("all-to-all", 0),
    "_c10d_functional::isend": ("point-to-point", 0),
    "_c10d_functional::batch_p2p_ops": ("point-to-point", 3),
}
#: Operations that carry no tensor of this rank's to another.
_SILENT = ("barrier", "recv", "wait", "wrap", "check_for_nan")
#: Methods of ProcessGroup that send have one of these in their names.
_METHODS = ("reduce", "gather", "scatter", "broadcast", "alltoall", "all_to_all", "send")
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::linear")


@dataclass(frozen=True)
class Sent:
    """One call: what this rank sent in it, by the usual formulas."""

    collective: str
    ranks: int  #: of the group
    dtype: torch.dtype
    elements: int  #: that it handed in
    bytes: int  #: that it sent
    group: str  #: name of the process group
    tag: int | None = None  #: of a point-to-point message


@dataclass
class Sends:
    """What `counting` saw."""

    calls: list[Sent] = field(default_factory=list)
    #: Elements that entered matrix products and convolutions, by dtype.
    products: Counter[torch.dtype] = field(default_factory=Counter)
    #: Operations of torch.distributed that this file does not know.
    unknown: set[str] = field(default_factory=set)

    def add(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note one dispatched operation."""
        name = func._schema.name if hasattr(func, "_schema") else ""  # higher-order operators have none
        if name in _PRODUCTS:
            tensor = args[1] if name in ("aten::addmm", "aten::baddbmm") else args[0]
            self.products[tensor.dtype] += tensor.numel()
        elif name in _OPERATIONS:
            kind, place = _OPERATIONS[name]
            names = [argument.name for argument in func._schema.arguments]
            given = {**dict(zip(names, args)), **kwargs}
            self._collective(kind, given[names[place]], given)
        elif name.startswith(("c10d::", "_c10d_functional::")) and not any(word in name for word in _SILENT):
            self.unknown.add(name)

    def _collective(self, kind: str, handed: Any, given: dict[str, Any]) -> None:
        group = _group(given["process_group"] if "process_group" in given else given["group_name"])
        n = group.size()
        handed = list(_tensors(handed))
        if kind == "all-to-all":
            handed = _for_others(handed, given.get("input_split_sizes"), group)
        if kind == "gather" and group.rank() == given["root_rank"]:
            handed = []
        if "op_list" in given:
            handed = [tensor for tensor, op in zip(handed, given["op_list"]) if op == "isend"]
        for dtype in dict.fromkeys(tensor.dtype for tensor in handed):
            alike = [tensor for tensor in handed if tensor.dtype == dtype]
            size = sum(_size(tensor) for tensor in alike)
            elements = size // dtype.itemsize
            self.calls.append(Sent(kind, n, dtype, elements, _SHARE[kind](size, n), group.group_name, given.get("tag")))


def _group(given: Any) -> Any:
    if isinstance(given, str):
        return dist.distributed_c10d._resolve_process_group(given)
    return given if isinstance(given, dist.ProcessGroup) else dist.ProcessGroup.unbox(given)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, of a sparse one those of its parts."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.numel() * tensor.itemsize


def _for_others(handed: list[torch.Tensor], splits: list[int] | None, group: Any) -> list[torch.Tensor]:
    """What an all-to-all hands to other ranks: of a list all but one, of a single tensor all rows but this rank's."""
    n, rank = group.size(), group.rank()
    parts = handed if len(handed) == n > 1 else list(handed[0].split(list(splits)) if splits else handed[0].chunk(n))
    return [part for index, part in enumerate(parts) if index != rank]


class _Mode(TorchDispatchMode):
    def __init__(self, sends: Sends) -> None:
        super().__init__()
        self.sends = sends

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a DTensor first turns into plain tensors and collectives, which come here again
        self.sends.add(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[Sends]:
    """Count what this process sends while the block runs, on all threads."""
    sends = Sends()
    methods = {name: method for name, method in vars(dist.ProcessGroup).items() if any(word in name for word in _METHODS)}
    for name, method in methods.items():
        setattr(dist.ProcessGroup, name, _with_mode(method, sends))
    try:
        with _Mode(sends):
            yield sends
    finally:
        for name, method in methods.items():
            setattr(dist.ProcessGroup, name, method)


def _with_mode(method: Callable, sends: Sends) -> Callable:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(mode, _Mode) for mode in _get_current_dispatch_mode_stack()):
            return method(*args, **kwargs)
        with _Mode(sends):
            return method(*args, **kwargs)

    return call
