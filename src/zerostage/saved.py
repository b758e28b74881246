"""Weights that autograd saves for backward, kept as a place in a flat buffer instead of as memory.

Between forward and backward a divided weight has no values. What is saved is where it lies;
when backward asks for it, its unit is gathered if it is not there. This holds for every use
of a weight, also in ways of which no module hook can know: a side output, a hidden result, a
weight in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch

from zerostage.autograd import not_compiled
from zerostage.flat import Flat
from zerostage.unit import Unit


class SavedWeights:
    """The hooks that pack and unpack saved tensors; `hooks()` makes a context in which they hold."""

    def __init__(self, units: Iterable[Unit], need: Callable[[Unit], None]) -> None:
        self._need = need
        self._keep, self._give = not_compiled(self._pack), not_compiled(self._unpack)
        self._flats = {f.whole.untyped_storage()._cdata: f for unit in units for f in unit.flats if f.divided}

    def flat_of(self, tensor: torch.Tensor) -> Flat | None:
        """The divided flat in whose whole buffer `tensor` lies."""
        if tensor.layout is not torch.strided:
            return None
        try:
            return self._flats.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # a tensor without memory of its own
            return None

    def moved(self, flat: Flat, before: int) -> None:
        """Note that `flat` has a new storage in the place of the one known as `before`."""
        self._flats[flat.whole.untyped_storage()._cdata] = self._flats.pop(before)

    def exchange(self, old: Flat, parts: Iterable[Flat]) -> None:
        """Note that the weights of `old` lie in `parts` from now on."""
        if old.divided:
            del self._flats[old.whole.untyped_storage()._cdata]
            self._flats.update((part.whole.untyped_storage()._cdata, part) for part in parts)

    def start(self) -> ExitStack:
        """Let the hooks hold until the result is closed, where a forward that may be differentiated begins.

        Where other hooks hold already, theirs is the say: those of activation checkpointing
        keep no weights but compute again, and these ones are there in an outer forward.
        """
        stack = ExitStack()
        taken = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        if self._flats and torch.is_grad_enabled() and not taken and torch._C._current_graph_task_id() == -1:
            stack.enter_context(self.hooks())
        return stack

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._keep, self._give)

    def _pack(self, tensor: torch.Tensor) -> Any:
        flat = self.flat_of(tensor)
        if flat is None:
            # a node that saved its own result would hold itself, for ever where no backward frees it; and
            # with hooks, torch leaves out its own check for changes in place
            return tensor.detach(), tensor._version
        return flat, flat.generation, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved[0], torch.Tensor):
            tensor, version = saved
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected "
                    f"version {version}"
                )
            return tensor
        flat, generation, *geometry = saved
        if generation != flat.generation:
            raise RuntimeError(
                f"the weights of {flat.unit.name} were updated between this forward and its backward: run the backward before "
                "optimizer.step(), before weights are unfrozen, and on the same side of ema.applied()'s begin and end"
            )
        self._need(flat.unit)
        value = flat.whole.as_strided(*geometry)
        # a graph of this backward (create_graph=True) would save the value once more, past its unit's release
        return value.clone() if torch.is_grad_enabled() else value
