"""The model and tokenizer of a Hugging Face folder, and the optimizer's parameter groups."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

import zerostage
from zerostage.mistakes import InputError
from zerostage.train.config import TrainConfig


def load_tokenizer(folder: Path):
    """The tokenizer of `folder`."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{folder} has no usable tokenizer: {reason}") from None


def build(folder: Path, config: TrainConfig) -> nn.Module:
    """The causal language model of `folder`, without values: on the meta device.

    They are read after `zerostage.shard`, so that no rank ever holds more than its own.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.from_pretrained(folder)
    settings.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    model.config.architectures = [type(model).__name__]  # for the copies that are saved
    if config.activation_checkpointing:
        # transformers renamed it; the older name warns where the newer is there.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        try:
            enable({"use_reentrant": False})
        except ValueError as error:
            raise InputError(f"activation_checkpointing: {error} Leave it off for this model") from None
    return model


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Fused AdamW; norms and biases, which have fewer than two dimensions, without weight decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def save(model: nn.Module, tokenizer, folder: str, rank: int) -> str:
    """Write whole weights with config and tokenizer as a Hugging Face folder; every rank takes part, rank 0 writes.

    The folder is written beside its place and renamed, so that it is never half there. Returns it.
    """
    final = Path(folder)
    partial = final.with_name(f"{final.name}.partial-{os.getpid()}")
    zerostage.save_weights(model, partial)
    if rank > 0:
        return folder
    model.config.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if final.exists():
        final.rename(final.with_name(f"{final.name}.old-{os.getpid()}"))
    partial.rename(final)
    return folder
