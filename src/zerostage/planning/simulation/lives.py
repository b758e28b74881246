"""The life of every storage while a program runs: when it comes, by how much it grows or shrinks, when it goes, and whose it is.

Sees tensors through torch's dispatch, so real and fake ones alike; memory that a kernel takes and gives back inside
itself is not seen. Whose a storage is may be known only later than its birth (that of the optimizer's state at the end of
the first step), so lives are written down as they happen and made into `Track`s at the end.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerostage.planning.memory.track import Track

#: Whose a storage is that the engine makes, by module and function ('' stands for any other function of the module).
_ENGINE = {
    "zerostage.flat": {"ensure_grad": "gradients", "_open_local": "reduce", "reduce": "reduce"},
    "zerostage.collectives": {"": "reduce"},
    "zerostage.optimizer": {"": "optimizer_temporaries"},
    "zerostage.norm": {"": "optimizer_temporaries"},
}
#: Frames to look at, from an operation to the function of the engine that called it.
_DEPTH = 24


class Lives(TorchDispatchMode):
    """Records all storages that come while it is active, until each goes.

    granule: sizes are rounded up to a multiple of it (512 bytes in torch's allocator for CUDA).
    whose: the term of a storage that the engine has not made, from the tensor with which it came.
    """

    def __init__(self, granule: int, whose: Callable[[torch.Tensor], str]) -> None:
        super().__init__()
        self.granule, self.whose = granule, whose
        self._alive: dict[int, list[Any]] = {}  # by address: number, size, and a reference that tells its end
        self._terms: list[str] = []  # by number
        #: a life's number and the change of its size; or a moment's name and phase ('' begins a new track)
        self._log: list[tuple[Any, Any]] = []

    # Recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._see(result)
        elif isinstance(result, (tuple, list)):
            for item in result:
                if isinstance(item, torch.Tensor):
                    self._see(item)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._alive:
            return
        number, size = len(self._terms), self._rounded(storage.nbytes())
        self._terms.append(_engine_term() or self.whose(tensor))
        self._alive[address] = [number, size, weakref.ref(storage, lambda _: self._end(address))]
        self._log.append((number, size))

    def _end(self, address: int) -> None:
        number, size, _ = self._alive.pop(address)
        self._log.append((number, -size))

    def _rounded(self, size: int) -> int:
        return -(-size // self.granule) * self.granule

    def __enter__(self) -> Any:
        original = self._resize = torch.UntypedStorage.resize_

        # the engine frees and takes back gathered weights in this way, past torch's dispatch
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if life := self._alive.get(storage._cdata):
                self._log.append((life[0], self._rounded(size) - life[1]))
                life[1] = self._rounded(size)
            return result

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*exception)

    def mark(self, at: str, phase: str) -> None:
        self._log.append((at, phase))

    def begin(self) -> None:
        """What follows belongs to a new track."""
        self._log.append(("", ""))

    def belongs(self, term: str, tensors: Iterable[torch.Tensor]) -> None:
        """Have the storages of `tensors` count for `term`, from their births on."""
        for tensor in tensors:
            if life := self._alive.get(tensor.untyped_storage()._cdata):
                self._terms[life[0]] = term

    # Reading

    def tracks(self) -> list[Track]:
        """One track for each call of `begin`; each starts with what is alive then."""
        tracks = [Track()]
        for what, change in self._log:
            if isinstance(what, int):
                tracks[-1].change(self._terms[what], change)
            elif what:
                tracks[-1].mark(what, change)
            else:
                after = Track()
                after.now.update(tracks[-1].now)
                after.highest.update(tracks[-1].now)
                after.total = tracks[-1].total
                tracks.append(after)
        return tracks[1:]


def _engine_term() -> str | None:
    """The term of what the engine is making at this moment; None while it makes nothing."""
    frame: Any = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return None
        module = frame.f_globals.get("__name__", "")
        if module.startswith("zerostage.") and not module.startswith("zerostage.planning."):
            functions = _ENGINE.get(module, {})
            return functions.get(frame.f_code.co_name) or functions.get("")
        frame = frame.f_back
    return None
