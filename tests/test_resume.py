"""A run that is saved with state dicts and taken up again equals the uninterrupted one, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import torch
from models import features
from ranks import run
from torch import nn

import zerostage


class Ghost(nn.Module):
    """One trainable parameter is used under no_grad only: it never has a gradient, and so no optimizer state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.ghost = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        with torch.no_grad():
            shift = self.ghost * 0.5
        return self.second(x + shift)


def start(stage: int, weights: Any = None, state: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Ghost()
    if weights:
        model.load_state_dict(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    zerostage.shard(model, optimizer, stage=stage)
    if state:
        optimizer.load_state_dict(state)
    return model, optimizer


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> dict[str, torch.Tensor]:
    for step in steps:
        x, y = features(rank, step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = zerostage.full_state_dict(model, rank0_only=False)
    zerostage.close(model)
    return state


def interrupted(rank: int, n: int, stage: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {"whole": go_on(*start(stage), rank, range(6))}
    for at in (0, 3):
        model, optimizer = start(stage)
        weights = go_on(model, optimizer, rank, range(at))
        state = copy.deepcopy(optimizer.state_dict())
        found["has state", at] = {name for name, p in model.named_parameters() if p in optimizer.state}
        found["resumed", at] = go_on(*start(stage, weights, state), rank, range(at, 6))
    return found


def test_C4_a_parameter_without_state_resumes_also_before_the_first_step() -> None:
    ghost = Ghost().ghost.detach()
    for stage in range(4):
        results = run(interrupted, n=2, stage=stage)
        for found in results:
            assert not found["has state", 0] and "ghost" not in found["has state", 3]
            assert torch.equal(found["whole"]["ghost"], ghost)
            for at in (0, 3):
                resumed = found["resumed", at]
                assert all(torch.equal(resumed[name], value) for name, value in found["whole"].items()), (stage, at)
        names = {name for name, _ in Ghost().named_parameters()}
        assert set.union(*(found["has state", 3] for found in results)) == names - {"ghost"}
