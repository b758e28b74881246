"""The same weights, bit for bit, at every partition, prefetch and division into units."""

from __future__ import annotations

import pytest
import torch
from models import batch, tiny_llama
from ranks import run
from torch import nn

import zerostage
from zerostage import Partition, Precision

#: One bit that differs in any of these steps stays in the weights, and the order of units is known after the first.
STEPS, MICRO = 8, 2


def partitions(n: int) -> dict[str, Partition]:
    named = {f"stage {stage}": Partition.from_stage(stage, n) for stage in range(4)}
    if n == 4:
        named["hybrid (2, 2, 2)"] = Partition.hybrid(2)
        named["hybrid (4, 4, 2)"] = Partition.node_local_weights(4, 2)
        named["odd (4, 2, 1)"] = Partition(4, 2, 1)
    return named


def train(rank: int, n: int, partition: Partition, steps: int = STEPS, **options) -> dict[str, torch.Tensor]:
    """Weights after `steps` steps of clipped AdamW in bf16 with fp32 masters and two micro-batches a step."""
    local_only = options.pop("no_sync", False)
    model = tiny_llama(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    zerostage.shard(model, optimizer, partition=partition, **options)
    norms = []
    for step in range(steps):
        for micro in range(MICRO):
            tokens = batch(rank, step, micro=micro)
            if local_only and micro + 1 < MICRO:
                with zerostage.no_sync(model):
                    (model(**tokens).loss / MICRO).backward()
            else:
                (model(**tokens).loss / MICRO).backward()
        norms.append(zerostage.clip_grad_norm_(model, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    state = zerostage.full_state_dict(model, rank0_only=False)
    zerostage.close(model)
    return state | {"norms": torch.stack(norms)}


def train_everywhere(rank: int, n: int, variants: dict, **options) -> dict[str, dict[str, torch.Tensor]]:
    return {name: train(rank, n, **{**options, **variant}) for name, variant in variants.items()}


def assert_all_equal(results: list[dict[str, dict[str, torch.Tensor]]]) -> None:
    name, reference = next(iter(results[0].items()))
    for rank, by_variant in enumerate(results):
        for variant, state in by_variant.items():
            for key, value in state.items():
                assert torch.equal(value, reference[key]), f"{key}: '{variant}' on rank {rank} differs from '{name}'"


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_partition_gives_the_same_bits(n: int) -> None:
    variants = {name: {"partition": partition} for name, partition in partitions(n).items()}
    results = run(train_everywhere, n=n, timeout=240, variants=variants, steps=20 if n == 2 else STEPS)
    assert_all_equal(results)
    start = tiny_llama(dtype=torch.bfloat16).state_dict()
    assert all(not torch.equal(start[k], v) for k, v in results[0]["stage 0"].items() if k in start)


def test_every_partition_gives_the_same_bits_on_eight_ranks() -> None:
    named = {f"stage {stage}": Partition.from_stage(stage, 8) for stage in range(4)}
    named |= {"hybrid (4, 4, 4)": Partition.hybrid(4), "hybrid (8, 8, 2)": Partition.node_local_weights(8, 2)}
    results = run(train_everywhere, n=8, timeout=240, variants={k: {"partition": p} for k, p in named.items()}, steps=3)
    assert_all_equal(results)


@pytest.mark.parametrize("n", [2, 4])
def test_no_sync_gives_the_same_bits_at_every_partition(n: int) -> None:
    variants = {name: {"partition": partition} for name, partition in partitions(n).items()}
    assert_all_equal(run(train_everywhere, n=n, timeout=240, variants=variants, steps=4, no_sync=True))


def test_prefetch_and_units_do_not_change_the_bits() -> None:
    stage3 = Partition.from_stage(3, 2)
    variants = {f"prefetch {depth}": {"prefetch": depth} for depth in (0, 1, 2)}
    variants |= {
        "one unit": {"units": []},
        "attention and mlp": {"units": ["model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.1"]},
        "every linear": {"units": [nn.Linear]},
    }
    assert_all_equal(run(train_everywhere, n=2, timeout=240, variants=variants, partition=stage3))


def test_full_precision_gives_the_same_bits() -> None:
    variants = {name: {"partition": partition} for name, partition in partitions(4).items()}
    assert_all_equal(run(train_everywhere, n=4, timeout=240, variants=variants, steps=3, precision=Precision.full()))
