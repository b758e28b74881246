"""A file of torch.save that another program wrote: its tensors, and nothing of it is run."""

from __future__ import annotations

import codecs
import pickle
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from zerostage.checkpoint.damage import DamagedError


class Opaque:
    """What stands for an object of a class that is not read; `args` are those that it was made from."""

    def __init__(self, *args: Any, **_: Any) -> None:
        self.args = args

    def __new__(cls, *args: Any, **_: Any) -> Opaque:
        made = super().__new__(cls)
        made.args = args
        return made

    def _ignore(self, *_: Any) -> None:
        """A pickle fills an object by its state, its items or its elements."""

    __setstate__ = __setitem__ = append = extend = add = update = _ignore

    def __repr__(self) -> str:
        return f"<a {type(self).__module__}.{type(self).__name__} that was not read>"


def open_file(path: Path) -> Any:
    """The object in the file; its tensors are mapped, so that of a tensor only the bytes that are used get read.

    Only containers, numbers and tensors come out; any other object is an `Opaque`, whether its class is installed or not.
    Raises DamagedError, naming the file, where it is missing, truncated or altered.
    """
    try:
        with open(path, "rb") as file:
            mapped = file.read(4) == b"PK\x03\x04"  # torch's older form, which some engines write on request, cannot be mapped
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing: restore the file, or use another checkpoint") from None
    try:
        # weights_only=True would refuse the whole file for one defaultdict that a user put into it. The unpickler given
        # here makes nothing but what _KNOWN has, so it is no less safe: no name in the file is imported or called.
        return torch.load(path, map_location="cpu", mmap=mapped, weights_only=False, pickle_module=_PICKLE)
    except Exception as error:
        why = str(error).strip().split("\n")[0]
        raise DamagedError(f"{path} is truncated, altered, or no file of torch.save ({why}): use another checkpoint") from error


def is_opaque(value: Any) -> bool:
    """Whether it stands for something that was not read: an object, a class or a function."""
    return isinstance(value, Opaque) or isinstance(value, type) and issubclass(value, Opaque)


def _stand_in(module: str, name: str) -> type[Opaque]:
    return type(name, (Opaque,), {"__module__": module})


def _attribute(owner: Any, name: str) -> type[Opaque]:
    """In the place of getattr, by which a pickle names methods, nested classes and, of some Pythons, members of enums."""
    return _stand_in(getattr(owner, "__name__", "?"), name)


def _bare(data: torch.Tensor, *_: Any) -> torch.Tensor:
    return data


def _untyped(make: Any, _kind: Any, args: tuple, _state: Any) -> torch.Tensor:
    """A tensor without the class and the attributes that it had."""
    return make(*args)


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("__builtin__", "getattr"): _attribute,
    ("builtins", "getattr"): _attribute,
    ("__builtin__", "set"): set,
    ("builtins", "set"): set,
    ("_codecs", "encode"): codecs.encode,  # how protocol 2 writes bytes
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch._utils", "_rebuild_tensor"): torch._utils._rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): _bare,
    ("torch._utils", "_rebuild_parameter_with_state"): _bare,
    ("torch._tensor", "_rebuild_from_type_v2"): _untyped,
    **{("torch", str(dtype).split(".")[1]): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if (module.removeprefix("numpy.").removeprefix("_"), name) == ("core.multiarray", "scalar"):
            return _numpy_scalar
        return _stand_in(module, name)


def _numpy_scalar(dtype: Opaque, data: Any) -> Any:
    """A NumPy number as Python's, since schedulers leave learning rates as such; dtype is that of its type string ('f8')."""
    kind, size = str(dtype.args[0])[:1], str(dtype.args[0])[1:]
    if not isinstance(data, bytes) or len(data) != int(size if size.isdigit() else -1):
        return Opaque(dtype, data)
    if kind == "f" and len(data) in (2, 4, 8):
        return torch.frombuffer(bytearray(data), dtype={2: torch.float16, 4: torch.float32, 8: torch.float64}[len(data)]).item()
    return int.from_bytes(data, "little", signed=kind == "i") if kind in "iu" else Opaque(dtype, data)


def _load(file: Any, **options: Any) -> Any:
    return _Unpickler(file, **options).load()


_PICKLE = SimpleNamespace(Unpickler=_Unpickler, load=_load, __name__=__name__)
