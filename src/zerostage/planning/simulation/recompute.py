"""Activation checkpointing, and the loss by chunks, for a model that is to be simulated."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zerostage.division import repeated_blocks
from zerostage.mistakes import InputError
from zerostage.planning.simulation import kernels  # noqa: F401  (it defines torch.ops.zerostage.attention)

_PRODUCT = torch.ops.aten.mm.default  # not addmm: a linear layer with a bias is made again
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}
#: Attributes of a transformers config by which some families scale their logits in ways of their own.
_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")


def use_checkpointing(model: nn.Module, kind: str) -> None:
    """Have each block of `model` recomputed in backward: 'none', 'selective' or 'full' as in `Run.checkpointing`.

    selective: as torchtitan's 'op' policy (torchtitan/distributed/activation_checkpoint.py), of the matrix products of a
    block the outputs of the first, third, fifth, ... are kept, and those of attention.
    """
    if kind == "none":
        return
    settings: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        settings["context_fn"] = lambda: create_selective_checkpoint_contexts(_every_other_product())
    enable = getattr(model, "activation_checkpointing_enable", None) or getattr(model, "gradient_checkpointing_enable", None)
    if enable is not None:  # transformers, which has renamed it
        try:
            enable(settings)
        except ValueError as error:
            raise InputError(f"no activation checkpointing: {str(error).splitlines()[0]}; use checkpointing none") from None
        return
    blocks = repeated_blocks(model)
    if not blocks:
        raise InputError("the model has no list of blocks of one class to checkpoint; use checkpointing none")
    for _, block in blocks:
        block.forward = partial(checkpoint, block.forward, **settings)


def _every_other_product() -> Any:
    counts: Counter[bool] = Counter()  # of products so far, in the forward and in its repetition

    def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = function in _ATTENTION or function is torch.ops.zerostage.attention.default
        if function is _PRODUCT:
            counts[context.is_recompute] += 1
            kept = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def use_chunked_loss(model: nn.Module, chunks: int, head_too: bool) -> None:
    """Have a transformers causal LM compute its loss, in fp32, for one of `chunks` parts of its tokens at a time.

    head_too: the logits, too, only of a part at a time, made again in backward. Otherwise those of all tokens are there, in
    the weights' dtype. Its forward then takes input_ids and labels and returns the loss alone. Raises InputError for other
    models.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    body = getattr(model, "base_model", model)
    if head is None or body is model:
        raise InputError(f"a chunked loss needs a transformers causal LM; {type(model).__name__} is none: use loss whole")
    config = model.config.get_text_config()
    if scales := [name for name in _SCALES if getattr(config, name, 1) not in (None, 1, 1.0)]:
        raise InputError(f"a chunked loss is not simulated for a model with scaled logits ({scales[0]}): use loss whole")
    cap = getattr(config, "final_logit_softcapping", None)

    def logits_of(hidden: Tensor) -> Tensor:
        logits = head(hidden)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels, reduction="sum")

    def part(hidden: Tensor, labels: Tensor) -> Tensor:
        return loss_of(logits_of(hidden), labels)

    def forward(input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        rows = body(input_ids=input_ids, **kwargs).last_hidden_state.flatten(0, 1)
        following = F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        rows = rows if head_too else logits_of(rows)
        for piece, wanted in zip(rows.chunk(chunks), following.chunk(chunks)):
            total = total + (checkpoint(part, piece, wanted, use_reentrant=False) if head_too else loss_of(piece, wanted))
        return total / following.numel()

    model.forward = forward
