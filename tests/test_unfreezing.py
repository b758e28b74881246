"""Parameters that are frozen and unfrozen while a model trains, against plain torch on the joined batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import features
from ranks import run
from torch import nn

import zerostage
from zerostage import Precision
from zerostage.engine import engine_of


def half_frozen() -> nn.Sequential:
    """Four units: whole, frozen, half frozen, whole."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model[1].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    return model


def train(rank: int, n: int, stage: int | None, everything: bool = True) -> dict[str, Any]:
    """Eight steps in which layers thaw and freeze. `stage=None` is plain torch on the joined batch."""
    model = half_frozen()
    chosen = [p for p in model.parameters() if everything or p.requires_grad]
    optimizer = torch.optim.AdamW(chosen, lr=1e-2, eps=1e-4, weight_decay=0.1)
    if stage is not None:
        zerostage.shard(model, optimizer, stage=stage)

    def step(number: int) -> None:
        if stage is None:
            losses = [model(features(r, number)[0]).square().mean() for r in range(n)]
            torch.stack(losses).mean().backward()
        else:
            model(features(rank, number)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    step(1)
    with torch.no_grad():
        model(features(rank, 9)[0])
    model[1].requires_grad_(True)
    if not everything:
        optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 3e-3})
    step(2)
    step(3)
    model[0].requires_grad_(False)
    model[2].weight.requires_grad = True
    step(4)
    model[0].requires_grad_(True)
    model[1].bias.requires_grad = False
    step(5)
    step(6)
    if stage is None:
        return dict(model.state_dict())
    ledger = zerostage.memory(model, optimizer)
    # layer 2's weight, which thaws, is in no group of a chosen few, so it has no moments then
    held = {term: size for term, size in ledger.expected.items() if term != "gradients"}  # zero_grad let those go
    assert not everything or all(ledger.measured[term] == size for term, size in held.items()), (held, ledger.measured)
    return zerostage.full_state_dict(model, rank0_only=False)


def train_stages(rank: int, n: int, everything: bool) -> list[dict[str, Any]]:
    return [train(rank, n, stage, everything) for stage in range(4)]


@pytest.mark.parametrize("everything", [True, False], ids=["optimizer over all", "groups added later"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_B5_what_thaws_trains_and_what_freezes_stays(n: int, everything: bool) -> None:
    oracle = train(0, n, None, everything)
    for results in run(train_stages, n=n, everything=everything):
        for stage, result in enumerate(results):
            for name, value in oracle.items():
                assert torch.allclose(result[name], value, atol=1e-6, rtol=0), (stage, name)  # the mean's order
                assert torch.equal(result[name], results[0][name]), (stage, name)


def masters(rank: int, n: int, stage: int) -> dict[str, Any]:
    """A bf16 layer that thaws gets fp32 masters, gradient buffers and moments of just its own size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zerostage.shard(model, optimizer, stage=stage, precision=Precision())
    sizes = []
    for step in range(4):
        if step == 2:
            model[1].requires_grad_(True)
        zerostage.traffic(model).reset()
        model(torch.randn(2, 64).bfloat16()).square().mean().backward()
        optimizer.step()
        sizes.append(dict(zerostage.memory(model, optimizer).measured))
        optimizer.zero_grad()
        if step == 3:
            traffic = zerostage.traffic(model)
            assert all(traffic.bytes[name] == size for name, size in traffic.expected().items())
    return {"sizes": sizes, "flats": len(engine_of(model).flats)}


def test_a_thawed_layer_costs_what_the_others_cost() -> None:
    for stage in range(4):
        for result in run(masters, n=2, stage=stage):
            before, after = result["sizes"][1], result["sizes"][3]
            for term in ("gradients", "master", "exp_avg", "exp_avg_sq"):
                assert after[term] * 2 == before[term] * 3, term
            assert after["weights"] == before["weights"] and result["flats"] == 3


def disagree(rank: int, n: int, stage: int) -> str:
    model = half_frozen()
    zerostage.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    model[1].weight.requires_grad_(True)
    model[1].bias.requires_grad_(rank == 0)
    with pytest.raises(RuntimeError) as caught:
        model(features(rank, 0)[0])
    return str(caught.value)


def test_B5_ranks_that_thaw_differently_are_told() -> None:
    for stage in (0, 3):
        for message in run(disagree, n=2, stage=stage):
            assert "'1.bias' is trainable on rank 0 and frozen on rank 1: set requires_grad alike" in message


def corners(rank: int, n: int, stage: int) -> dict[str, Any]:
    model = half_frozen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zerostage.shard(model, optimizer, stage=stage)
    weight = model[1].weight
    said = {}
    # frozen again before it mattered: nothing changes
    weight.requires_grad_(True)
    weight.requires_grad_(False)
    flats = len(engine_of(model).flats)
    model(features(rank, 0)[0]).sum().backward()
    assert len(engine_of(model).flats) == flats
    # within `gathered`
    with zerostage.gathered(model):
        weight.requires_grad_(True)
        if stage == 3:
            with pytest.raises(RuntimeError) as caught:
                model(features(rank, 0)[0])
            said["inside"] = str(caught.value)
    # a graph from before the change
    loss = model(features(rank, 0)[0]).sum()
    model[2].weight.requires_grad_(True)
    model(features(rank, 1)[0])
    if stage == 3:
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        said["graph"] = str(caught.value)
    # a loss from whole weights, in no forward
    if stage == 0:
        other = half_frozen()
        zerostage.shard(other, torch.optim.SGD(other.parameters(), lr=0.1), stage=0)
        other[1].weight.requires_grad_(True)
        with pytest.raises(RuntimeError) as caught:
            other[1].weight.sum().backward()
        said["early"] = str(caught.value)
        with zerostage.gathered(other):
            loss = other[1].weight.sum()
        loss.backward()
        assert torch.equal(other[1].weight.grad, torch.ones(8, 8))
    return said


def test_corners_of_unfreezing_are_right_or_said() -> None:
    for said in run(corners, n=2, stage=3):
        assert "'1.weight' was unfrozen within a `gathered` block" in said["inside"]
        assert "were updated between this forward and its backward" in said["graph"]
    for said in run(corners, n=2, stage=0):
        assert "'1.weight' was unfrozen after the last forward" in said["early"]
