"""Ranks with different numbers of batches, and generation that ends at different lengths."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from models import batch, features, tiny_llama
from ranks import run
from torch import nn

import zerostage

COUNTS = [3, 5, 1, 0]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def join(rank: int, n: int, stage: int | None, kind: str) -> dict[str, Any]:
    """Train until the last rank is out of batches; the means are over all n ranks, those without one included."""
    model = build()
    optimizer = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4),
    }[kind](model.parameters())
    if stage is None:
        for step in range(max(COUNTS[:n])):
            (sum(model(features(r, step)[0]).square().mean() for r in range(n) if step < COUNTS[r]) / n).backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(model.state_dict())
    zerostage.shard(model, optimizer, stage=stage)
    own = [features(rank, step)[0] for step in range(COUNTS[rank])]
    evaluated = 0
    for x in zerostage.together(model, own, uneven="join"):
        if x is None:
            zerostage.take_part(model)
        else:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for x in zerostage.together(model, iter(own), uneven="join"):
        with torch.inference_mode():
            if x is None:
                zerostage.take_part(model, backward=False)
            else:
                model(x)
                evaluated += 1
    assert evaluated == COUNTS[rank]
    return zerostage.full_state_dict(model, rank0_only=False)


def join_stages(rank: int, n: int) -> dict[tuple[str, int], dict[str, Any]]:
    return {(kind, stage): join(rank, n, stage, kind) for kind in ("sgd", "adamw") for stage in range(4)}


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_K2_ranks_without_a_batch_join_the_others(n: int) -> None:
    oracles = {kind: join(0, n, None, kind) for kind in ("sgd", "adamw")}
    for results in run(join_stages, n=n):
        for (kind, stage), state in results.items():
            for name, value in oracles[kind].items():
                assert torch.allclose(state[name], value, atol=1e-6, rtol=0), (kind, stage, name)  # the mean's order
                assert torch.equal(state[name], results[kind, 0][name])


def stop(rank: int, n: int, stage: int, sized: bool) -> tuple[int, list[str]]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zerostage.shard(model, optimizer, stage=stage)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("zerostage").addHandler(handler)
    own = [features(rank, step)[0] for step in range(5 - rank)]
    steps = 0
    for x in zerostage.together(model, own if sized else iter(own)):
        model(x).sum().backward()
        optimizer.step()
        steps += 1
    logging.getLogger("zerostage").removeHandler(handler)
    return steps, records


def test_K2_stopping_together_says_what_was_dropped() -> None:
    for stage in (0, 3):
        for sized, dropped in ((True, "2 of rank 0, 1 of rank 1"), (False, "1 or more of rank 0, 1 or more of rank 1")):
            results = run(stop, n=3, stage=stage, sized=sized)
            assert [steps for steps, _ in results] == [3, 3, 3]
            assert results[0][1] == [
                f"stopped after 3 batches on every rank: ranks [2] have no more; dropped: {dropped}"
            ]
            assert not results[1][1]


def joined_memory(rank: int, n: int) -> tuple[int, int]:
    """Taking part gathers one unit after the other, too, once a step has shown their order."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zerostage.shard(model, optimizer, stage=3)
    for step in range(2):
        if rank and step:
            zerostage.take_part(model)
        else:
            model(features(rank, 0)[0]).sum().backward()
        optimizer.step()
    ledger = zerostage.memory(model, optimizer)
    return ledger.peak["engine"], ledger.peak["bound"]


def test_taking_part_keeps_the_bound_of_memory() -> None:
    for peak, bound in run(joined_memory, n=2):
        assert peak <= bound


def accumulate(rank: int, n: int, stage: int) -> dict[str, Any]:
    """The last micro-batch of a step is missing on rank 1, and the first ones are not reduced."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    zerostage.shard(model, optimizer, stage=stage)
    with zerostage.no_sync(model):
        model(features(rank, 0)[0]).square().mean().backward()
    if rank == 1:
        zerostage.take_part(model)
    else:
        model(features(rank, 1)[0]).square().mean().backward()
    optimizer.step()
    return zerostage.full_state_dict(model, rank0_only=False)


def test_K2_a_missing_micro_batch_keeps_the_others() -> None:
    model = build()
    (sum(model(features(r, s)[0]).square().mean() for r, s in ((0, 0), (1, 0), (0, 1))) / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    for stage in range(4):
        for state in run(accumulate, n=2, stage=stage):
            for name, value in model.state_dict().items():
                assert torch.allclose(state[name], value, atol=1e-6, rtol=0), (stage, name)  # the mean's order


def generate(rank: int, n: int, stage: int | None, who: int | None = None) -> list[torch.Tensor]:
    who = rank if who is None else who
    model = tiny_llama(layers=2, vocab=64, hidden=16)
    if stage is not None:
        zerostage.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    prompt, outputs = batch(who, 9)["input_ids"], []
    for length in (2 + 3 * who, 8 - 3 * who):
        outputs.append(model.generate(prompt, max_new_tokens=length, do_sample=False, eos_token_id=None))
        # the token that this rank gives third ends it here
        third = int(outputs[0][0, prompt.shape[1] + 1])
        outputs.append(model.generate(prompt[:1], max_new_tokens=8, do_sample=False, eos_token_id=third, pad_token_id=0))
        if stage is not None:
            model(**batch(rank, 1)).loss.backward()
    return outputs


def test_D3_generation_ends_at_different_lengths() -> None:
    alone = [generate(0, 1, None, who) for who in range(2)]
    for stage in (0, 3):
        for rank, outputs in enumerate(run(generate, n=2, stage=stage)):
            assert len({output.shape[1] for output in outputs}) > 1
            assert all(torch.equal(a, b) for a, b in zip(outputs, alone[rank]))


def test_another_policy_is_refused() -> None:
    model = build()
    zerostage.shard(model)
    with pytest.raises(ValueError, match="uneven is 'pad'; it must be 'stop' or 'join'"):
        next(zerostage.together(model, [1], uneven="pad"))
    with pytest.raises(ValueError, match="not sharded"):
        next(zerostage.together(build(), [1]))
