"""Buffers are not divided: rank 0's at the start, each rank's own from then on, rank 0's in the full state dict."""

from __future__ import annotations

from typing import Any

import torch
from models import features
from ranks import run
from torch import nn

import zerostage


def normed() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8))
    model.register_buffer("table", torch.arange(3, dtype=torch.float64))
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    return model


def trained(rank: int, n: int) -> list[dict[str, Any]]:
    found = []
    for stage in range(4):
        model = normed()
        model[1].running_mean.fill_(rank)  # only rank 0's start counts
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zerostage.shard(model, optimizer, stage=stage)
        for step in range(3):
            model(features(rank, step)[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({
            "own": {name: buffer.clone() for name, buffer in model.named_buffers()},
            "rank 0 only": zerostage.full_state_dict(model),
            "everywhere": zerostage.full_state_dict(model, rank0_only=False),
        })  # fmt: skip
        zerostage.close(model)
    return found


def by_hand(n: int) -> list[nn.Module]:
    """One plain model per rank, each on its own data, with the mean of their gradients."""
    models = [normed() for _ in range(n)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(3):
        for rank, model in enumerate(models):
            model(features(rank, step)[0]).square().mean().backward()
        for parameters in zip(*(model.parameters() for model in models)):
            mean = torch.stack([p.grad for p in parameters]).mean(0)
            for parameter in parameters:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return models


def test_L9_each_rank_keeps_its_running_statistics_and_rank_0_s_are_saved() -> None:
    plain = by_hand(2)
    results = run(trained, n=2)
    for stage in range(4):
        for rank, by_stage in enumerate(results):
            found = by_stage[stage]
            # 1e-6: the weights behind the statistics are summed in another order
            torch.testing.assert_close(found["own"], dict(plain[rank].named_buffers()), atol=1e-6, rtol=0)
            torch.testing.assert_close(found["everywhere"], dict(plain[0].state_dict()), atol=1e-6, rtol=0)
            saved = results[0][stage]["rank 0 only"]
            assert found["rank 0 only"].keys() == (saved.keys() if rank == 0 else set())
            assert all(torch.equal(value, saved[name]) for name, value in found["everywhere"].items())
            for name in ("1.num_batches_tracked", "4.num_batches_tracked"):
                assert saved[name].dtype == torch.int64 and saved[name] == 3
        means = [by_stage[stage]["own"]["1.running_mean"] for by_stage in results]
        assert not torch.equal(*means) and torch.equal(means[0], saved["1.running_mean"])
