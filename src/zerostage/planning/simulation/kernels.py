"""What the kernels of the target machine allocate, as operations that run under torch's FakeTensorMode on a CPU.

There, torch itself would fall back to the attention that stores all scores. `attention` puts what the machine would run
in the place of `scaled_dot_product_attention`, whoever calls it. The operations have shapes and no values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zerostage.mistakes import InputError

_torchs = F.scaled_dot_product_attention


@torch.library.custom_op("zerostage::attention", mutates_args=())
def _attention(query: Tensor, key: Tensor, value: Tensor, efficient: bool) -> tuple[Tensor, Tensor]:
    """Attention that keeps no scores: output [batch, heads, sequence, head_dim] and fp32 log-sum-exp [batch, heads, sequence].

    What is allocated follows torch's aten/src/ATen/native/transformers/cuda: flash_attn/flash_api.cpp (mha_fwd, mha_bwd) and,
    for `efficient`, attention.cu and attention_backward.cu.
    """
    raise NotImplementedError("this operation has shapes and no values: it is for simulation")


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, efficient: bool) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = query.shape
    # laid out as [batch, sequence, heads, head_dim], so that the model's transposition back needs no copy
    out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
    return out, query.new_empty(batch, heads, _up(length, 32) if efficient else length, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *saved, ctx.efficient = inputs
    ctx.save_for_backward(*saved, *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    query, key, value, _, _ = ctx.saved_tensors
    batch, heads, length, width = query.shape
    long, wide = (length, width) if ctx.efficient else (_up(length, 128), _up(width, 32))
    rows = query.new_empty(batch, heads, long, dtype=torch.float32)  # sums of gradient x output
    # the gradient of the queries is summed in fp32
    wide_sum = query.new_empty(batch, heads, long, wide, dtype=torch.float32)
    results = [_like(tensor) for tensor in (query, key, value)]
    if key.shape[1] != heads:  # one gradient for each query head, added up at the end
        each = [tensor.new_empty(batch, tensor.shape[2], heads, tensor.shape[3]) for tensor in (key, value)]
        del each
    del rows, wide_sum
    return *results, None


_attention.register_autograd(_backward, setup_context=_save)


def _like(tensor: Tensor) -> Tensor:
    batch, heads, length, width = tensor.shape
    return tensor.new_empty(batch, length, heads, width).transpose(1, 2)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _on_gpu(kernel: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    if kernel == "efficient" and key.shape[1] != query.shape[1]:  # it knows no grouped queries: keys and values are repeated
        times = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(times, 1) for tensor in (key, value))
    return torch.ops.zerostage.attention(query, key, value, kernel == "efficient")[0]


def _on_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float, causal: bool, scale: Any, grouped: bool
) -> Tensor:
    """torch's own on a CPU: asked, on small real tensors, which kernel it would take."""
    with unset_fake_temporarily():
        shapes = [(1, t.shape[1], 2, t.shape[3]) for t in (query, key, value)]
        small = [torch.empty(shape, dtype=query.dtype, requires_grad=query.requires_grad) for shape in shapes]
        small_mask = None if mask is None else torch.ones(1, 1, 2, 2, dtype=mask.dtype)
        choice = torch._fused_sdp_choice(*small, small_mask, dropout, causal, scale=scale, enable_gqa=grouped)
    if choice != torch.nn.attention.SDPBackend.FLASH_ATTENTION.value:
        return _torchs(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, dropout, causal, attn_mask=mask, scale=scale)[0]


@contextmanager
def kernels_of(kernel: str) -> Iterator[None]:
    """Attention and dropout as the target has them: `kernel` is 'flash' or 'efficient' on a GPU, 'cpu' for what torch does there.

    Functions are replaced for a while: a mode of torch's would not hold for what backward computes again.
    """

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: Any = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if kernel == "cpu":
            return _on_cpu(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return _on_gpu(kernel if attn_mask is None else "efficient", query, key, value)

    def drop(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if training and 0 < p < 1 and not inplace:
            return torch.native_dropout(input, p, True)[0]  # on a GPU the mask is kept as bytes, on a CPU in the input's dtype
        return dropout(input, p, training, inplace)

    replaced: list[tuple[Any, str, Any]] = [(F, "scaled_dot_product_attention", attend)]
    dropout = F.dropout
    if kernel != "cpu":
        replaced.append((F, "dropout", drop))
    if masking := sys.modules.get("transformers.masking_utils"):
        # it looks in the positions for packed sequences, makes a mask for them, and takes any that it cannot read for packed
        replaced.append((masking, "find_packed_sequence_indices", lambda positions: None))
    before = [getattr(module, name) for module, name, _ in replaced]
    for module, name, function in replaced:
        setattr(module, name, function)
    try:
        yield
    finally:
        for (module, name, _), function in zip(replaced, before):
            setattr(module, name, function)


def use_attention(model: nn.Module, kernel: str) -> None:
    """Have a transformers model use `kernel`: 'eager' its own code, 'flash' or 'efficient' the operation here.

    Also where its own choice would be another (soft caps and windows, which flash attention has too). Others are left alone.
    """
    if not hasattr(model, "set_attn_implementation") or kernel == "cpu":
        return
    name = kernel
    if kernel != "eager":
        from transformers import AttentionInterface, AttentionMaskInterface

        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
            return _on_gpu(kernel, query, key, value).transpose(1, 2), None

        # without the word "flash", by which transformers knows kernels of its own
        name = "zerostage_" + {"flash": "simulated", "efficient": "simulated_repeating"}[kernel]
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    try:
        model.set_attn_implementation(name)
    except ValueError as error:
        raise InputError(f"the model cannot use {kernel} attention: {str(error).splitlines()[0]}") from None
    if kernel != "eager" and model.config._attn_implementation != name:
        raise InputError(f"{type(model).__name__} has attention of its own and cannot use {kernel}: give --attention eager")
