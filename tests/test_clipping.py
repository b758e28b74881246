"""The global norm and clipping by it: each element once, the same at every stage, together with accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import features, mlp
from ranks import run
from torch import nn

import zerostage
from zerostage import Partition


class TwoParts(nn.Module):
    """A gradient of 2 for each of 16 and of 9 elements: parts of norm 8 and 6."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(16, 1, bias=False), nn.Linear(9, 1, bias=False)

    def forward(self) -> torch.Tensor:
        return self.large(torch.full((16,), 2.0)) + self.small(torch.full((9,), 2.0))


def norm_of_ten(rank: int, n: int) -> dict[Any, float]:
    partitions = [Partition.from_stage(stage, n) for stage in range(4)] + [Partition.hybrid(1), Partition(2, 1, 1)]
    partitions += [Partition.hybrid(2), Partition(4, 2, 1)] if n == 4 else []
    found = {}
    for partition in partitions:
        model = TwoParts()
        zerostage.shard(model, torch.optim.SGD(model.parameters(), lr=1.0), partition=partition, units=[nn.Linear])
        model().backward()
        found[partition] = float(zerostage.clip_grad_norm_(model, 1e9))
        zerostage.close(model)
    return found


@pytest.mark.parametrize("n", [2, 4])
def test_F2_what_is_held_by_several_ranks_counts_once(n: int) -> None:
    for found in run(norm_of_ten, n=n):
        assert set(found.values()) == {10.0}, found


def clipped_run(rank: int, n: int, dtype: torch.dtype, steps: int) -> list[torch.Tensor]:
    by_stage = []
    for stage in range(4):
        model = mlp(8, 16, 16, 4, dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        zerostage.shard(model, optimizer, stage=stage)
        norms = []
        for step in range(steps):
            x, y = features(rank, step)
            nn.functional.mse_loss(model(x.to(dtype)).float(), y).backward()
            if stage == 0:
                by_hand = torch.stack([p.grad.double().square().sum() for p in model.parameters()]).sum().sqrt()
            norms.append(zerostage.clip_grad_norm_(model, 0.1))
            if stage == 0:  # summed in fp64 here too, so that only the rounding to fp32 differs
                assert torch.allclose(norms[-1].double(), by_hand, rtol=1e-7, atol=0)
            optimizer.step()
            optimizer.zero_grad()
        by_stage.append(torch.stack(norms))
        zerostage.close(model)
    return by_stage


def test_F4_norms_of_a_clipped_run_are_the_same_at_every_stage() -> None:
    for dtype, steps in ((torch.bfloat16, 20), (torch.float32, 5)):
        results = run(clipped_run, n=4, dtype=dtype, steps=steps)
        reference = results[0][0]
        assert reference.min() > 0.1  # every step is clipped
        for by_stage in results:
            assert all(torch.equal(norms, reference) for norms in by_stage)
    model = mlp(8, 16, 16, 4)
    torch.stack([nn.functional.mse_loss(model(x), y) for x, y in (features(r, 0) for r in range(4))]).mean().backward()
    plain = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert torch.allclose(reference[0], plain, rtol=1e-6, atol=0)  # fp64 sums against fp32 ones


GRID = [(accumulation, clip) for accumulation in (1, 3) for clip in (None, 0.1)]


def accumulated_and_clipped(rank: int, n: int, stage: int | None) -> dict[Any, dict[str, torch.Tensor]]:
    """Three steps for each cell of the grid; without a stage, plain torch on the batches of all ranks."""
    found = {}
    for accumulation, clip in GRID:
        model = mlp(8, 16, 16, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if stage is not None:
            zerostage.shard(model, optimizer, stage=stage)
        for step in range(3):
            for micro in range(accumulation):
                batches = [features(r, 10 * step + micro) for r in (range(n) if stage is None else [rank])]
                losses = [nn.functional.mse_loss(model(x), y) for x, y in batches]
                (torch.stack(losses).mean() / accumulation).backward()
            if clip and stage is None:
                assert nn.utils.clip_grad_norm_(model.parameters(), clip) > clip
            elif clip:
                zerostage.clip_grad_norm_(model, clip)
            optimizer.step()
            optimizer.zero_grad()
        state = model.state_dict() if stage is None else zerostage.full_state_dict(model, rank0_only=False)
        found[accumulation, clip] = dict(state)
        if stage is not None:
            zerostage.close(model)
    return found


def at_every_stage(rank: int, n: int) -> list[dict[Any, dict[str, torch.Tensor]]]:
    return [accumulated_and_clipped(rank, n, stage) for stage in range(4)]


@pytest.mark.parametrize("n", [1, 2])
def test_F10_accumulation_and_clipping_together(n: int) -> None:
    oracle = accumulated_and_clipped(0, n, None)
    for by_stage in run(at_every_stage, n=n):
        for stage, found in enumerate(by_stage):
            for cell in GRID:
                # 1e-6: the mean over ranks is summed in another order
                what = f"stage {stage}, {cell}: "
                torch.testing.assert_close(found[cell], oracle[cell], atol=1e-6, rtol=0, msg=lambda m: what + m)
