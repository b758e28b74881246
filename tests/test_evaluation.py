"""Forwards that train nothing, at any time: before, between and after steps, and within one."""

from __future__ import annotations

from typing import Any

import torch
from models import features
from ranks import run
from torch import nn

import zerostage


class Net(nn.Module):
    """Blocks that differ in training and evaluation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * (1.5 if self.training else 1.0)
        return x


def train(rank: int, stage: int, evaluate: bool) -> dict[str, torch.Tensor]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    zerostage.shard(model, optimizer, stage=stage)

    def look() -> None:
        if evaluate:
            model.eval()
            with torch.inference_mode():
                model(features(rank, 90)[0])
            model.train()

    look()
    for step in range(2):
        loss = model(features(rank, step)[0]).square().mean()
        look()
        loss.backward()
        look()
        optimizer.step()
        look()
        optimizer.zero_grad()
    look()
    state = zerostage.full_state_dict(model, rank0_only=False)
    zerostage.close(model)
    return state


def with_and_without(rank: int, n: int) -> list[tuple[dict, dict]]:
    return [(train(rank, stage, True), train(rank, stage, False)) for stage in range(4)]


def test_N1_inference_mode_before_and_between_steps_changes_nothing() -> None:
    for by_stage in run(with_and_without, n=2):
        for looked, plain in by_stage:
            assert all(torch.equal(looked[name], value) for name, value in plain.items())


def looking(rank: int, n: int) -> list[dict[str, Any]]:
    """Outputs of the model at various times, beside those of a plain model with its weights."""
    found = []
    x = features(rank, 90)[0]
    for stage in range(4):
        model, plain = Net(), Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        seen: dict[str, Any] = {}

        def look(when: str) -> None:
            plain.load_state_dict(zerostage.full_state_dict(model, rank0_only=False))
            for training in (True, False):
                with torch.no_grad():
                    seen[f"{when}, training {training}"] = model.train(training)(x), plain.train(training)(x)
            model.train()

        # as a callback's hook would, that a trainer calls when its step is over
        optimizer.register_step_post_hook(lambda *_: look("in a hook of the step"))
        zerostage.shard(model, optimizer, stage=stage)
        look("before training")
        for step in range(2):
            loss = model(features(rank, step)[0]).square().mean()
            look("after a forward")
            loss.backward()
            look("after a backward")
            optimizer.step()
            look("after a step")
            optimizer.zero_grad()
        look("after training")
        found.append(seen)
        zerostage.close(model)
    return found


def test_D4_the_model_can_be_called_at_any_time() -> None:
    for by_stage in run(looking, n=2):
        for seen in by_stage:
            assert len(seen) == 12
            for when, (ours, plain) in seen.items():
                assert torch.equal(ours, plain) and torch.equal(ours, by_stage[0][when][0]), when
