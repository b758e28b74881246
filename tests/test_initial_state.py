"""Models that only rank 0 has built with values: the others, on the meta device, get rank 0's weights and buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import batch, tiny_llama
from ranks import run
from torch import nn

import zerostage


class Rotary(nn.Module):
    """A table that no checkpoint holds, a counter that one does, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10_000 ** (torch.arange(0, 8, 2) / 8), persistent=False)
        self.register_buffer("seen", torch.tensor(3))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.inv_freq)


def build(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    with torch.device("meta" if rank else "cpu"):
        return nn.Sequential(Rotary(), Rotary())


def poisoned(rank: int, n: int, stage: int) -> dict[str, Any]:
    empty = torch.empty_like
    torch.empty_like = lambda *a, **k: empty(*a, **k).fill_(torch.nan) if a[0].is_floating_point() else empty(*a, **k)
    try:  # what is not written shows
        model = build(rank)
        zerostage.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    finally:
        torch.empty_like = empty
    assert model(torch.ones(2, 4)).isfinite().all()
    return {**dict(model.named_buffers()), **zerostage.full_state_dict(model, rank0_only=False)}


def test_J5_buffers_come_from_rank_zero() -> None:
    oracle = build(0)
    expected = {**dict(oracle.named_buffers()), **oracle.state_dict()}
    for stage in range(4):
        for found in run(poisoned, n=3, stage=stage):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in expected.items())


def from_folder(rank: int, n: int, stage: int, folder: str) -> tuple[float, dict[str, Any]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    if rank == 0:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    zerostage.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    loss = model(**batch(rank, 0)).loss.item()
    return loss, zerostage.full_state_dict(model, rank0_only=False)


def test_L12_every_rank_starts_from_the_file(tmp_path: Path) -> None:
    plain = tiny_llama(tie=True, seed=5)
    plain.save_pretrained(tmp_path)
    for stage in (0, 3):
        for rank, (loss, state) in enumerate(run(from_folder, n=2, stage=stage, folder=str(tmp_path))):
            assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
            assert loss == plain(**batch(rank, 0)).loss.item()


def reversed_roles(rank: int, n: int) -> str:
    model = build(1 - rank)
    with pytest.raises(ValueError) as caught:
        zerostage.shard(model)
    return str(caught.value)


def test_values_on_another_rank_than_zero_are_refused() -> None:
    for message in run(reversed_roles, n=2):
        assert "is on the meta device on rank 0 but not on rank 1: give rank 0 the values" in message
