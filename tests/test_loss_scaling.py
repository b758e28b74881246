"""torch.amp.GradScaler beside a sharded optimizer: the decision to skip is everybody's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import features, mlp
from ranks import run
from torch import nn

import zerostage
from zerostage import Precision


def train(rank: int, n: int, stage: int | None, fused: bool | None) -> tuple[list[float], dict[str, Any]]:
    """Five clipped steps; in the third the very last element of the gradient is infinite on the last rank."""
    model = mlp(8, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, fused=fused)
    if stage is not None:
        zerostage.shard(model, optimizer, stage=stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(5):
        handle = None
        if step == 2 and (stage is None or rank == n - 1):
            handle = model[2].bias.register_hook(lambda g: g.index_fill(0, torch.tensor([3]), float("inf")))
        mine = range(n) if stage is None else [rank]
        loss = torch.stack([model(features(r, step)[0]).square().mean() for r in mine]).mean()
        scaler.scale(loss).backward()
        if handle is not None:
            handle.remove()
        scaler.unscale_(optimizer)
        if stage is None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        else:
            zerostage.clip_grad_norm_(model, 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, model.state_dict() if stage is None else zerostage.full_state_dict(model, rank0_only=False)


def train_stages(rank: int, n: int, fused: bool | None) -> list[tuple[list[float], dict[str, Any]]]:
    return [train(rank, n, stage, fused) for stage in range(4)]


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_F7_every_rank_skips_and_halves_its_scale(n: int, fused: bool | None) -> None:
    scales, oracle = train(0, n, None, fused)
    assert scales[2] == scales[1] / 2
    for results in run(train_stages, n=n, fused=fused):
        for stage, (found, state) in enumerate(results):
            assert found == scales, stage
            for name, value in oracle.items():
                assert torch.allclose(state[name], value, atol=1e-6, rtol=0), (stage, name)  # the mean's order
                assert torch.equal(state[name], results[0][1][name])


def half(rank: int, n: int, stage: int) -> dict[str, Any]:
    """fp16 weights with fp32 gradients and masters; the step without an explicit unscale_."""
    model = mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    precision = Precision(weights=torch.float16, gradients=torch.float32)
    zerostage.shard(model, optimizer, stage=stage, precision=precision)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(3):
        scaler.scale(model(features(rank, step)[0].half()).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return zerostage.full_state_dict(model, rank0_only=False)


def test_half_precision_is_the_same_at_every_stage_and_moves() -> None:
    results = [run(half, n=2, stage=stage)[0] for stage in range(4)]
    start = mlp(8, 16, 4).half().state_dict()
    for name in start:
        assert all(torch.equal(result[name], results[0][name]) for result in results)
        assert not torch.equal(results[0][name], start[name])
