"""What stands in for weights and gradients that are not there.

A sharded weight keeps its name, its full shape and its identity, but its memory is released
while its unit is at rest; touching such memory would crash the process. So every parameter
under management has one of two classes: `Managed` while its values are there, and `Absent`
while they are not. `Absent` sees each torch operation before it runs and asks the engine:
within a forward of the model the unit is gathered, elsewhere an error says what to do.

Gradients never rest in `p.grad`: they are moved to the flat buffers as they arrive. Reading
`p.grad` gives the reduced gradient where this rank holds it whole, otherwise a `DividedGradient`
that any computation refuses, so that a habit like `torch.nn.utils.clip_grad_norm_` is
never silently wrong.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from zerostage.autograd import not_compiled

# Attributes and methods that need no values. Accessors appear as `__get__` of these.
_METADATA = {"shape", "dtype", "device", "requires_grad", "is_leaf", "grad", "grad_fn", "layout", "ndim", "names",
             "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_nested", "is_xla",
             "is_mps", "is_xpu", "is_vulkan", "is_ipu", "is_maia", "is_mtia", "_version", "retains_grad", "_base",
             "output_nr", "name", "_backward_hooks", "_post_accumulate_grad_hooks", "itemsize", "nbytes",
             "_grad_fn", "_grad", "grad_dtype", "is_sparse_csr", "_has_symbolic_sizes_strides", "_cdata"}
_METHODS = {"size", "stride", "dim", "numel", "nelement", "ndimension", "element_size", "is_floating_point",
            "is_complex", "is_contiguous", "storage_offset", "requires_grad_", "__hash__", "__len__", "register_hook",
            "register_post_accumulate_grad_hook", "get_device", "type", "is_signed", "is_inference", "is_same_size",
            "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "is_shared", "_is_view",
            "is_conj", "is_neg", "retain_grad", "untyped_storage"}  # fmt: skip


def needs_values(func: Any) -> bool:
    """False for the torch functions that read only shape, dtype and the like."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(func, "__self__", None)
        return getattr(owner, "__name__", "") not in _METADATA
    return name not in _METHODS


class DividedGradient(torch.Tensor):
    """Stands for a gradient that is divided over ranks: full shape, no values."""

    flat: Any
    index: int

    @staticmethod
    def of(flat: Any, index: int) -> DividedGradient:
        slot = flat.layout.slots[index]
        stand_in = torch.Tensor._make_wrapper_subclass(
            DividedGradient, slot.shape, dtype=flat.grad_dtype, device=flat.device
        )
        stand_in.flat, stand_in.index = flat, index
        return stand_in

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        first = args[0] if args else None
        name = getattr(func, "__name__", "")
        if name == "_amp_foreach_non_finite_check_and_unscale_":  # torch.amp.GradScaler's only work on gradients
            gradients, found_inf, inverse_scale = args
            places = [(gradient.flat, gradient.index) for gradient in gradients]
            return places[0][0].unit.engine.unscale(places, found_inf, inverse_scale)
        if isinstance(first, DividedGradient):
            if name == "zero_":
                first.flat.zero(first.index)
                return first
            if name in ("detach", "detach_"):  # zero_grad(set_to_none=False) detaches, then zeroes
                return first
            if name in ("__repr__", "__str__", "__format__"):
                return f"DividedGradient({first.flat.layout.slots[first.index].name}, {tuple(first.shape)})"
        if not needs_values(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise RuntimeError(_divided_message(args, kwargs, name))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(_divided_message(args, kwargs, str(func)))


def _find(kind: type, *containers: Any) -> Any:
    """The first object of `kind` within nested arguments, or None."""
    for item in containers:
        if isinstance(item, kind):
            return item
        if isinstance(item, dict):
            item = tuple(item.values())
        if isinstance(item, (list, tuple)) and (found := _find(kind, *item)) is not None:
            return found
    return None


def _divided_message(args: Any, kwargs: Any, operation: str) -> str:
    found = _find(DividedGradient, args, kwargs)
    name = found.flat.layout.slots[found.index].name if found is not None else "a parameter"
    return (
        f"the gradient of '{name}' is divided over the ranks (or, since a backward within no_sync, not all reduced), so "
        f"'{operation}' cannot be computed on it here. To clip by the global norm call zerostage.clip_grad_norm_(model, "
        "max_norm); to update the weights pass the optimizer to zerostage.shard(model, optimizer)"
    )


def _managed(base: type) -> dict[str, Any]:
    def get(self):
        return self._flat.visible_gradient(self._index)

    def set_(self, value):
        if value is None:
            self._flat.forget(self._index)
        elif not isinstance(value, DividedGradient):
            raise RuntimeError(
                f"cannot assign a gradient to '{self._flat.layout.slots[self._index].name}': zerostage keeps the "
                "gradients in its own buffers. Set it to None to drop it, or scale the loss instead"
            )

    def get_data(self):
        values = torch.Tensor.data.__get__(self)
        self._flat.exposed.add(self._index)  # whoever has it may write to it unseen
        return values

    def set_data(self, value):
        values = get_data(self)
        if (value.shape, value.dtype, value.device) != (values.shape, values.dtype, values.device):
            raise RuntimeError(
                f"cannot give '{self._flat.layout.slots[self._index].name}' other memory ({tuple(value.shape)} of "
                f"{value.dtype} on {value.device}): it lies in a buffer of zerostage's. Move, cast or resize the model "
                "before zerostage.shard, or give shard a precision"
            )
        if value.data_ptr() == values.data_ptr():
            return
        if self._flat.has_views(beside=1):  # `values` is one
            raise RuntimeError(
                f"an earlier `p.data` of '{self._flat.layout.slots[self._index].name}' or of a neighbour is still held, and "
                "would see the new values too, since they lie in one buffer: keep `p.data.clone()` instead"
            )
        with torch.no_grad():
            values.copy_(value)

    def get_requires_grad(self):
        return torch.Tensor.requires_grad.__get__(self)

    def set_requires_grad(self, value):
        torch.Tensor.requires_grad.__set__(self, value)
        if value:
            self._flat.unfreeze(self._index)

    def requires_grad_(self, requires_grad=True):
        set_requires_grad(self, requires_grad)
        return self

    def refuse_copy(self, *_):
        raise RuntimeError(
            f"'{self._flat.layout.slots[self._index].name}' belongs to a sharded model, which cannot be copied or pickled "
            "as it is: build a second model and load zerostage.full_state_dict(model) into it, or save that"
        )

    return {
        "grad": property(get, set_, lambda self: set_(self, None)),
        "data": property(get_data, set_data),
        "requires_grad": property(get_requires_grad, set_requires_grad),
        "requires_grad_": requires_grad_,
        "__deepcopy__": refuse_copy,
        "__reduce_ex__": refuse_copy,
        "_zerostage_base": base,
    }


class AbsentMarker:
    """Mixed into every class that `absent` makes."""

    __slots__ = ()


@cache
def managed(base: type) -> type:
    """The class of a parameter (made by the user as `base`) whose values are there."""
    body = {"__torch_function__": torch._C._disabled_torch_function_impl, **_managed(base)}
    return type(base)(base.__name__, (base,), body)


@cache
def absent(base: type) -> type:
    """The class of a parameter whose unit is at rest."""

    def torch_function(cls, func, types, args=(), kwargs=None):
        if needs_values(func):
            while (parameter := _find(AbsentMarker, args, kwargs)) is not None:
                parameter._flat.unit.touched(parameter._flat.layout.slots[parameter._index].name, func)
                if isinstance(parameter, AbsentMarker):
                    raise AssertionError(f"gathering {parameter._flat.unit.name} left its weights absent")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    body = {"__torch_function__": classmethod(not_compiled(torch_function)), **_managed(base)}
    return type(base)(base.__name__, (base, AbsentMarker), body)


def set_present(parameter: nn.Parameter, present: bool) -> None:
    base = getattr(type(parameter), "_zerostage_base", type(parameter))
    parameter.__class__ = managed(base) if present else absent(base)
