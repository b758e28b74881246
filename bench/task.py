"""The work that every engine does: the same model, batches and optimizer settings.

A Llama of 43.8M parameters, micro-batches of 2 x 128 random tokens, AdamW. bf16 compute, fp32 masters and moments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ROWS, LENGTH, VOCABULARY = 2, 128, 8192
SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=12,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=LENGTH,
    tie_word_embeddings=False,
    use_cache=False,
)
OPTIMIZER = dict(lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def model(**shape: int) -> nn.Module:
    """The model with random fp32 weights, the same on every rank. `shape` changes its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **shape})).train()


def describe() -> dict[str, Any]:
    """The work in plain values, for the bench's output."""
    parameters = sum(parameter.numel() for parameter in model().parameters())
    return {"parameters": parameters, "batch": [ROWS, LENGTH], "model": SHAPE, "AdamW": OPTIMIZER}


def batch(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Random int64 tokens [ROWS, LENGTH]; they repeat every 4 steps, so that losses fall."""
    generator = torch.Generator().manual_seed(1 + rank + 1000 * (step % 4))
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}

