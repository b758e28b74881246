"""Small models and deterministic batches that tests on many ranks share.

The joined batch of n ranks is the concatenation of their own batches in rank order, so a
plain one-process run on it is the oracle for a data-parallel run.
"""

from __future__ import annotations

import math

import torch
from torch import nn

#: Elements; every parameter starts at a multiple of them.
ALIGN = 64


def tiny_llama(
    layers: int = 2,
    hidden: int = 32,
    vocab: int = 64,
    tie: bool = False,
    dtype: torch.dtype | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    positions: int = 128,
    attention: str = "sdpa",
    seed: int = 0,
    **config,
) -> nn.Module:
    """A random LlamaForCausalLM in training mode: the same weights for the same arguments, on every rank.

    `dtype=None` leaves fp32. `config` goes to LlamaConfig as it is. The caller's random state is kept.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = dict(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
        tie_word_embeddings=tie,
        attn_implementation=attention,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**{**shape, **config}))
    return model.to(dtype or torch.float32).train()


def mlp(
    *widths: int, bias: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0, activation: type[nn.Module] = nn.Tanh
) -> nn.Sequential:
    """Linear layers of the given widths (default 8, 16, 4) with an activation between them, seeded."""
    widths = widths or (8, 16, 4)
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for inputs, outputs in zip(widths, widths[1:]):
            layers += [nn.Linear(inputs, outputs, bias=bias, dtype=dtype), activation()]
    return nn.Sequential(*layers[:-1])


def batch(rank: int, step: int, rows: int = 2, length: int = 16, vocab: int = 64, micro: int = 0) -> dict[str, torch.Tensor]:
    """Token batch of one rank for one step and micro-batch: int64 [rows, length] `input_ids` and equal `labels`."""
    generator = torch.Generator().manual_seed(1 + rank + 1_000 * step + 1_000_000 * micro)
    tokens = torch.randint(3, vocab, (rows, length), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def joined_batch(n: int, step: int, **shape: int) -> dict[str, torch.Tensor]:
    """The batches of ranks 0 to n-1 in one: [n * rows, length]. Its mean loss is the mean of theirs."""
    parts = [batch(rank, step, **shape) for rank in range(n)]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def features(rank: int, step: int, rows: int = 4, inputs: int = 8, outputs: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Input [rows, inputs] and target [rows, outputs] of one rank and step for an `mlp`, fp32."""
    generator = torch.Generator().manual_seed(7 + rank + 1_000 * step)
    return torch.randn(rows, inputs, generator=generator), torch.randn(rows, outputs, generator=generator)


def joined_features(n: int, step: int, **shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The features of ranks 0 to n-1, concatenated in rank order."""
    xs, ys = zip(*(features(rank, step, **shape) for rank in range(n)))
    return torch.cat(xs), torch.cat(ys)


def padded_sizes(model: nn.Module, n: int) -> list[int]:
    """Elements of each unit's flat buffer: each parameter padded to 64 elements, the sum to 64 n."""
    units: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        unit = ".".join(parts[:3]) if parts[1] == "layers" else name if parameter.dim() > 1 else "root"
        units[unit] = units.get(unit, 0) + math.ceil(parameter.numel() / ALIGN) * ALIGN
    return [math.ceil(size / (ALIGN * n)) * ALIGN * n for size in units.values()]
