"""Partitions that leave replicas: terms that several ranks, or all of them, hold whole."""

from __future__ import annotations

import pytest
import torch
from models import features, mlp
from ranks import run
from torch import nn

import zerostage
from zerostage import Partition


def partitions(n: int) -> list[Partition]:
    return [Partition.hybrid(1), Partition(2, 1, 1), *([Partition.hybrid(2), Partition(2, 2, 1)] if n == 4 else [])]


def train(rank: int, n: int, partition: Partition | None) -> dict[str, torch.Tensor]:
    model = mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if partition is not None:
        zerostage.shard(model, optimizer, partition=partition)
    for step in range(3):
        batches = [features(r, step) for r in (range(n) if partition is None else [rank])]
        torch.stack([nn.functional.mse_loss(model(x), y) for x, y in batches]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = dict(model.state_dict() if partition is None else zerostage.full_state_dict(model, rank0_only=False))
    if partition is not None:
        zerostage.close(model)
    return state


def under_each(rank: int, n: int) -> list[dict[str, torch.Tensor]]:
    return [train(rank, n, partition) for partition in partitions(n)]


@pytest.mark.parametrize("n", [2, 4])
def test_L8_replicas_average_their_gradients_also_where_nothing_is_divided(n: int) -> None:
    oracle = train(0, n, None)
    first, *others = run(under_each, n=n)
    for partition, state, *rest in zip(partitions(n), first, *others):
        # 1e-6: the mean over ranks is summed in another order
        torch.testing.assert_close(state, oracle, atol=1e-6, rtol=0, msg=lambda m: f"{partition}: {m}")
        assert all(torch.equal(other[name], value) for other in rest for name, value in state.items()), partition
