"""Recomputed forwards: reentrant ones run an autograd task of their own within backward's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from models import features
from ranks import run
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerostage


class Recomputed(nn.Module):
    """Each block is checkpointed; `shared` uses the first block's weights also outside of its checkpoint."""

    def __init__(self, reentrant: bool, shared: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant, self.shared = reentrant, shared
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        if self.shared:
            x = x + self.blocks[0](x) + F.linear(x, self.blocks[0][0].weight)
        return self.last(x)


CASES = [(reentrant, shared) for reentrant in (True, False) for shared in (False, True)]


def train(rank: int, n: int, stage: int | None) -> list[dict[str, torch.Tensor]]:
    """Three steps of each case, backward from a vector; without a stage, plain torch on the batches of all ranks."""
    found = []
    for case in CASES:
        model = Recomputed(*case)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        if stage is not None:
            zerostage.shard(model, optimizer, stage=stage)
        for step in range(3):
            outputs = [model(features(r, step)[0]) for r in (range(n) if stage is None else [rank])]
            y = torch.stack(outputs).mean(0)
            y.backward(torch.ones_like(y))
            optimizer.step()
            optimizer.zero_grad()
        found.append(dict(model.state_dict() if stage is None else zerostage.full_state_dict(model, rank0_only=False)))
        if stage is not None:
            zerostage.close(model)
    return found


def at_every_stage(rank: int, n: int) -> list[list[dict[str, torch.Tensor]]]:
    return [train(rank, n, stage) for stage in range(4)]


def test_G1_G3_reentrant_checkpoints_and_weights_used_in_and_outside_of_them() -> None:
    oracle = train(0, 2, None)
    for by_stage in run(at_every_stage, n=2):
        for stage, found in enumerate(by_stage):
            for case, state, plain in zip(CASES, found, oracle):
                # 1e-6: the mean over ranks is summed in another order
                torch.testing.assert_close(state, plain, atol=1e-6, rtol=0, msg=lambda m: f"stage {stage} {case}: {m}")
