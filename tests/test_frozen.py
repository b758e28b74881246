"""Parameters without a gradient are left alone: no decay, no momentum, no step count, as in torch where `grad` is None."""

from __future__ import annotations

from typing import Any

import torch
from models import features
from ranks import run
from torch import nn

import zerostage


class Prototypes(nn.Module):
    """Layers, one of which is out of use for the first steps, and one that no forward ever uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.never = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, layers: int) -> torch.Tensor:
        for layer in self.layers[:layers]:
            x = torch.tanh(layer(x))
        return self.head(x)


STEPS = 5
#: What is done to the third layer: its gradient dropped in some steps, or the layer left out of them.
WAYS: dict[str, tuple[set[int], set[int]]] = {
    "None in the first three steps": ({0, 1, 2}, set()),
    "None in between": ({2, 3}, set()),
    "unused in the first three forwards": (set(), {0, 1, 2}),
}


def trained(rank: int, n: int, stage: int | None) -> dict[str, dict[str, Any]]:
    """Weights and step counts after five steps in each way; without a stage, plain torch on all ranks' batches."""
    found = {}
    for way, (dropped, unused) in WAYS.items():
        model = Prototypes()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)
        if stage is not None:
            zerostage.shard(model, optimizer, stage=stage)
        for step in range(STEPS):
            batches = [features(r, step) for r in (range(n) if stage is None else [rank])]
            losses = [nn.functional.mse_loss(model(x, 2 if step in unused else 3), y) for x, y in batches]
            torch.stack(losses).mean().backward()
            if step in dropped:
                for parameter in model.layers[2].parameters():
                    parameter.grad = None
            optimizer.step()
            optimizer.zero_grad()
        counts = {name: int(optimizer.state[p]["step"]) for name, p in model.named_parameters() if optimizer.state.get(p)}
        state = model.state_dict() if stage is None else zerostage.full_state_dict(model, rank0_only=False)
        found[way] = {"weights": dict(state), "counts": counts}
        if stage is not None:
            zerostage.close(model)
    return found


def at_every_stage(rank: int, n: int) -> list[dict[str, dict[str, Any]]]:
    return [trained(rank, n, stage) for stage in range(4)]


def test_B8_a_gradient_of_None_means_no_update_at_all() -> None:
    oracle = trained(0, 2, None)
    results = run(at_every_stage, n=2)
    start = Prototypes().state_dict()
    for stage in range(4):
        for way, plain in oracle.items():
            for by_stage in results:
                weights = by_stage[stage][way]["weights"]
                # 1e-6: the mean over ranks is summed in another order, and fused AdamW rounds differently
                torch.testing.assert_close(weights, plain["weights"], atol=1e-6, rtol=0, msg=lambda m: f"{stage} {way}: {m}")
                assert torch.equal(weights["never.weight"], start["never.weight"])
            # a rank has the states of the parameters that it updates a part of
            counts = results[0][stage][way]["counts"] | results[1][stage][way]["counts"]
            assert counts == plain["counts"] and counts["layers.2.bias"] < STEPS and "never.bias" not in counts
