"""A weight that embedding and head share, while each of them is a unit of its own."""

from __future__ import annotations

from typing import Any

import torch
from models import batch, joined_batch, tiny_llama
from ranks import run
from torch import nn

import zerostage


def train(rank: int, n: int, stage: int | None) -> dict[str, Any]:
    model = tiny_llama(tie=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if stage is not None:
        units = [type(model.model.layers[0]), model.model.embed_tokens, model.lm_head]
        zerostage.shard(model, optimizer, stage=stage, units=units)
    norms = []
    for step in range(5):
        model(**(joined_batch(n, step) if stage is None else batch(rank, step))).loss.backward()
        if stage is None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        else:
            norms.append(zerostage.clip_grad_norm_(model, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, Any] = {"norms": torch.stack(norms)}
    if stage is None:
        return found | {"state": dict(model.state_dict())}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    found["state"] = zerostage.full_state_dict(model, rank0_only=False)
    found["counted"] = zerostage.audit(model, optimizer).parameters
    found["momentum"] = sum(state["momentum_buffer"].numel() for state in optimizer.state.values())
    found["trained"] = len({id(p) for group in optimizer.param_groups for p in group["params"]})
    zerostage.close(model)
    return found


def at_every_stage(rank: int, n: int) -> list[dict[str, Any]]:
    return [train(rank, n, stage) for stage in range(4)]


def test_A2_a_tied_weight_in_two_units_is_one_parameter() -> None:
    oracle = train(0, 2, None)
    plain = list(tiny_llama(tie=True).parameters())
    numel = sum(p.numel() for p in plain)  # the tied weight once, which is 2048 of them
    results = run(at_every_stage, n=2)
    for stage in range(4):
        for found in (by_stage[stage] for by_stage in results):
            # 1e-6: the mean over ranks is summed in another order; norms are sums of some 20,000 squares
            torch.testing.assert_close(found["state"], oracle["state"], atol=1e-6, rtol=0)
            torch.testing.assert_close(found["norms"], oracle["norms"], atol=0, rtol=1e-5)
            assert (found["counted"], found["trained"]) == (numel, len(plain))
        held = sum(by_stage[stage]["momentum"] for by_stage in results) // (1 if stage else 2)
        assert numel <= held < numel + 2048  # there is padding, but no second copy
