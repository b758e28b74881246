"""When units are gathered and reduced, in which order, and what happens when ranks disagree."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from models import batch, mlp, tiny_llama
from ranks import run
from torch import nn

import zerostage
from zerostage import collectives, notes
from zerostage.engine import engine_of


@contextmanager
def impatient() -> Iterator[None]:
    """Ranks compare notes, and are called deadlocked, sooner than they would be in a real run (after 3 and 10 s)."""
    with patch.object(notes, "STALL", 0.5), patch.object(collectives, "STALL", 0.5), patch.object(notes, "DEADLOCK", 2.0):
        yield


def watch(model: nn.Module) -> list[tuple[str, str]]:
    schedule = engine_of(model).schedule
    schedule.events = []
    return schedule.events


def one_step_events(rank: int, n: int, prefetch: int) -> list[tuple[str, str]]:
    model = tiny_llama(layers=4, vocab=512)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zerostage.shard(model, optimizer, stage=3, prefetch=prefetch)
    events: list[tuple[str, str]] = []
    for step in range(2):
        events = watch(model)
        blocks = list(model.model.layers)
        handles = [
            block.register_forward_pre_hook(lambda m, a, name=f"model.layers.{i}": events.append(("compute", name)))
            for i, block in enumerate(blocks)
        ]
        model(**batch(rank, step, vocab=512)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for handle in handles:
            handle.remove()
    return events


def test_the_next_unit_is_being_gathered_while_one_computes() -> None:
    for events in run(one_step_events, n=2, prefetch=1):
        for i in range(3):
            issued = events.index(("gather", f"model.layers.{i + 1}"))
            assert issued < events.index(("compute", f"model.layers.{i}"))
            # not earlier than needed: the unit before the one that computes has been freed by then
            assert i == 0 or events.index(("free", f"model.layers.{i - 1}")) < issued
        backward = events[events.index(("free", "root")) :]
        for i in range(3, 0, -1):
            issued = backward.index(("gather", f"model.layers.{i - 1}"))
            assert issued < backward.index(("reduce", f"model.layers.{i}"))
            assert issued < backward.index(("free", f"model.layers.{i}"))


def test_without_prefetch_nothing_is_gathered_early() -> None:
    for events in run(one_step_events, n=2, prefetch=0):
        for kind, unit in events:
            if kind == "gather":
                place = events.index((kind, unit))
                assert events[place + 1] == ("ready", unit)


def most_gathered(rank: int, n: int, prefetch: int) -> tuple[float, int]:
    """How many of 12 equal blocks have memory for their whole weights, at most and after the step."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(12)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zerostage.shard(model, optimizer, stage=3, prefetch=prefetch)
    units = engine_of(model).units
    assert len(units) == 12 and len({unit.nbytes for unit in units}) == 1
    seen: list[float] = []

    def look(*_: Any) -> None:
        held = sum(flat.whole.untyped_storage().nbytes() for flat in engine_of(model).flats)
        seen.append(held / units[0].nbytes)

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_pre_hook(look)
            module.register_forward_hook(look)
            module.register_full_backward_pre_hook(look)
            module.register_full_backward_hook(look)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    for _ in range(2):
        model(torch.ones(2, 16, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    most = max(seen)
    look()
    return most, seen[-1]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_I2_at_most_one_and_the_prefetched_units_are_gathered(prefetch: int) -> None:
    assert run(most_gathered, n=2, prefetch=prefetch) == [(1 + prefetch, 0)] * 2


class Branches(nn.Module):
    """Blocks of one shape, run in an order that the caller chooses; `order` lists block numbers."""

    def __init__(self, blocks: int = 4, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for number in order:
            x = torch.tanh(self.blocks[number](x))
        return x.square().sum()


def ordered(rank: int, n: int, orders: list[list[list[int]]], stage: int | None = 3, joined: bool = False) -> Any:
    """Train with, for each step, one order of blocks per rank. `joined` is the plain one-process run."""
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not joined:
        zerostage.shard(model, optimizer, stage=stage)
    gathers = []
    for step, by_rank in enumerate(orders):
        inputs = [torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(n)]
        if joined:
            loss = sum(model(x, order) for x, order in zip(inputs, by_rank)) / n
        else:
            events = watch(model)
            loss = model(inputs[rank], by_rank[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not joined:
            gathers.append([unit for kind, unit in events if kind == "gather"])
    state = model.state_dict() if joined else zerostage.full_state_dict(model, rank0_only=False)
    return {"state": state, "gathers": gathers}


def assert_equals_plain(orders: list[list[list[int]]], n: int = 2) -> list[Any]:
    oracle = ordered(0, n, orders, joined=True)
    results = []
    for stage in range(4):
        results = run(ordered, n=n, orders=orders, stage=stage)
        for result in results:
            for name, value in oracle["state"].items():
                assert torch.allclose(result["state"][name], value, atol=1e-6, rtol=0), (stage, name)
    return results


def test_an_order_that_differs_from_the_definition_is_learned() -> None:
    orders = [[[2, 0, 3, 1]] * 2] * 3
    results = assert_equals_plain(orders)
    for result in results:
        first, *later = result["gathers"]
        assert all(gathers == later[0] and len(gathers) == 8 for gathers in later)
        assert later[0][:4] == [f"blocks.{i}" for i in (2, 0, 3, 1)]
        assert later[0][4:] == [f"blocks.{i}" for i in (1, 3, 0, 2)]


def test_the_order_may_change_from_step_to_step() -> None:
    assert_equals_plain([[order] * 2 for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 2, 0], [0, 1, 2, 3])])


def test_C2_modules_that_only_some_ranks_use() -> None:
    for result in assert_equals_plain([[[0, 1, 2, 3], [0, 3]], [[1, 2], [0, 1, 3]], [[0, 1, 2, 3], [2]]]):
        assert all(len(gathers) == 8 for gathers in result["gathers"])  # the same collectives, used or not
    assert_equals_plain([[[0, 3], [0, 1, 2, 3], [3]], [[0, 1, 2, 3], [1], [2]]], n=3)


def crossed(rank: int, n: int, stage: int) -> str:
    model, order = Branches(blocks=2), [[0, 1], [1, 0]][rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zerostage.shard(model, optimizer, stage=stage)
    x = torch.ones(3, 8)
    loss = model(x, order)
    assert torch.equal(loss, Branches(blocks=2)(x, order))  # each got the weights of its own module
    loss.backward()
    with pytest.raises(zerostage.OrderError, match="rank 0 ran 'blocks.0', rank 1 ran 'blocks.1'"):
        optimizer.step()
    started = time.monotonic()
    with impatient(), pytest.raises(zerostage.OrderError) as caught:
        ordered(rank, n, [[[0, 1, 2, 3], [0, 2, 1, 3]]] * 2, stage=stage)
    assert time.monotonic() - started < 10
    return str(caught.value)


def test_C3_ranks_that_run_modules_in_different_orders_are_told() -> None:
    for message in run(crossed, n=2, stage=3):
        assert "rank 0 ran 'blocks.1', rank 1 ran 'blocks.2'" in message


def one_rank_forgets(rank: int, n: int, what: str) -> str:
    model = mlp(8, 16, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zerostage.shard(model, optimizer, stage=3, units=[nn.Linear])
    x = torch.ones(2, 8)
    with impatient(), pytest.raises((zerostage.OrderError, RuntimeError)) as caught:
        for step in range(3):
            model(x).sum().backward()
            if what == "clip" and not (rank == 1 and step == 1):
                zerostage.clip_grad_norm_(model, 1.0)
            if not (what == "step" and rank == 1 and step == 1):
                optimizer.step()
            optimizer.zero_grad()
    return str(caught.value)


@pytest.mark.parametrize("what", ["clip", "step"])
def test_a_rank_that_leaves_out_a_call_is_found_out(what: str) -> None:
    messages = run(one_rank_forgets, n=2, what=what, timeout=60)
    assert any("rank 0 waits for" in m and "rank 1 waits for" in m for m in messages), messages


def shapes_of(model: nn.Module) -> list[tuple]:
    return [(name, tuple(p.shape), p.requires_grad, p.numel(), p.dtype) for name, p in model.named_parameters()]


def shapes_at_every_stage(rank: int, n: int) -> list[list[tuple]]:
    found = []
    for stage in range(4):
        model = tiny_llama()
        model.model.norm.requires_grad_(False)
        zerostage.shard(model, stage=stage)
        found.append(shapes_of(model))
    return found


def test_D7_names_and_shapes_are_the_same_on_all_ranks() -> None:
    plain = tiny_llama()
    plain.model.norm.requires_grad_(False)
    assert run(shapes_at_every_stage, n=3) == [[shapes_of(plain)] * 4] * 3


def touched(rank: int, n: int) -> dict[str, Any]:
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zerostage.shard(model, optimizer, stage=3)
    weight = model.model.layers[0].mlp.up_proj.weight
    said = {}
    for name, use in {
        "sum": lambda: weight.sum(),
        "add": lambda: weight + 1,
        "data": lambda: weight.data,
        "detach": lambda: weight.detach(),
        "item": lambda: model.model.norm.weight[0].item(),
        "state_dict": lambda: model.state_dict(),
        "submodule": lambda: model.model.layers[0].mlp.up_proj(torch.ones(1, 32)),
        "init": lambda: nn.init.normal_(weight),
        "foreach": lambda: torch._foreach_norm([weight]),
    }.items():
        with pytest.raises(RuntimeError) as caught:
            use()
        said[name] = str(caught.value)
    assert "up_proj" in repr(model) and isinstance(weight, nn.Parameter)
    return {"said": said, "shapes": shapes_of(model)}


def test_D7_a_weight_at_rest_keeps_its_shape_and_says_what_to_do() -> None:
    for result in run(touched, n=3):
        assert result["shapes"] == shapes_of(tiny_llama())
        for name, message in result["said"].items():
            assert "is divided over 3 ranks" in message and "zerostage.gathered(model)" in message, (name, message)


class HeadByHand(nn.Module):
    """Uses the embedding's weight functionally, and a block's weight in the loss, outside their modules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        logits = nn.functional.linear(x, self.embed.weight)
        return logits.logsumexp(-1).mean() + self.blocks[1].weight.square().sum()


def functional_use(rank: int, n: int, stage: int | None) -> dict[str, torch.Tensor]:
    model = HeadByHand()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if stage is not None:
        zerostage.shard(model, optimizer, stage=stage)
    for step in range(3):
        tokens = [batch(r, step)["input_ids"] for r in range(n)]
        loss = sum(map(model, tokens)) / n if stage is None else model(tokens[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict() if stage is None else zerostage.full_state_dict(model, rank0_only=False)


def test_weights_used_outside_their_module_are_gathered_for_the_forward_and_its_backward() -> None:
    oracle = functional_use(0, 2, None)
    for stage in range(4):
        for state in run(functional_use, n=2, stage=stage):
            for name, value in oracle.items():
                assert torch.allclose(state[name], value, atol=1e-6, rtol=0), (stage, name)


def two_models(rank: int, n: int) -> str:
    models = [mlp(8, 16, 4) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers):
        zerostage.shard(model, optimizer, stage=2)
        model(torch.ones(2, 8)).sum().backward()
    with impatient(), pytest.raises((zerostage.OrderError, RuntimeError)) as caught:
        for optimizer in optimizers if rank == 0 else optimizers[::-1]:
            optimizer.step()
    return str(caught.value)


def test_models_stepped_in_different_orders_are_found_out() -> None:
    messages = run(two_models, n=2, timeout=60)
    assert any("of each model in the same order" in message for message in messages), messages
