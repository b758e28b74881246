"""What the engine costs does not grow: per unit with the number of units, per rank with the number of ranks.

Time is CPU time of the process, which a busy machine changes little; of several rounds the least counts.
"""

from __future__ import annotations

import time

import pytest
import torch
from models import ALIGN, padded_sizes
from ranks import run
from torch import nn

import zerostage
from bench import scaling, task
from zerostage.engine import engine_of

#: 2M parameters: padding may be a part of that here, since it is counted to the byte.
SHAPE = dict(
    num_hidden_layers=2, hidden_size=256, intermediate_size=704, num_attention_heads=4, num_key_value_heads=2, vocab_size=1024
)
WORLDS = (8, 512, 1024)


def in_worlds(rank: int, n: int) -> dict[int, dict]:
    return {ranks: scaling.world(ranks, rounds=4, shape=SHAPE) for ranks in WORLDS}


@pytest.fixture(scope="module")
def worlds() -> dict[int, dict]:
    return run(in_worlds, n=1, group=False)[0]


@pytest.mark.parametrize("ranks", WORLDS)
def test_bytes_at_rest_follow_the_formula_for_any_number_of_ranks(worlds: dict, ranks: int) -> None:
    sizes = padded_sizes(task.model(**SHAPE), ranks)
    for stage, figures in worlds[ranks].items():
        moments = {"master": 4, "exp_avg": 4, "exp_avg_sq": 4}
        formula = {term: sum(bytes * size // ranks for size in sizes) for term, bytes in moments.items()}
        formula["weights"] = sum(2 * size // (ranks if stage == 3 else 1) for size in sizes)
        formula["gradients"] = sum(2 * size // (ranks if stage >= 2 else 1) for size in sizes)
        formula["buffers"] = figures["expected"]["buffers"]
        for account in ("expected", "measured"):
            assert {term: figures[account].get(term) for term in formula} == formula, (stage, account)
        assert figures["walked"] == sum(formula.values()), stage


def test_no_more_is_gathered_or_in_flight_with_more_ranks(worlds: dict) -> None:
    sizes = {ranks: max(padded_sizes(task.model(**SHAPE), ranks)) for ranks in WORLDS}
    for ranks, stages in worlds.items():
        for stage, figures in stages.items():
            # units of 2 bytes an element: at stage 3 two units' weights; of gradients what is received, and from
            # stage 2 on one that backward fills and one under way
            units = {1: 1, 2: 3, 3: 5}[stage]
            root = 2 * 2 * ALIGN * ranks  # the last norm, whose padded weights stay, twice at most
            assert figures["passing"] <= units * 2 * sizes[ranks] + root, (ranks, stage)


@pytest.mark.parametrize("stage", scaling.STAGES)
def test_the_engine_takes_no_longer_with_more_ranks(worlds: dict, stage: int) -> None:
    """The same weights pass through, so the same work: 64 times the ranks may cost what the fake group's copies do.

    Those are a call for each rank and collective, within torch: up to half of what 8 ranks take.
    Something in Python that is done for each rank takes several times as much.
    """
    few, many = (_beyond(worlds[ranks][stage]) for ranks in (8, 512))
    assert worlds[512][stage]["skipped"] == 0
    assert many < 2.5 * few, (few, many)


def test_the_first_step_takes_no_longer_with_more_ranks(worlds: dict) -> None:
    """In it the ranks agree about the order of units; comparing each with each would take seconds."""
    for stage, figures in worlds[1024].items():
        assert figures["first"] < 3 * worlds[8][stage]["first"] + 0.1, stage


def _beyond(figures: dict) -> float:
    """CPU seconds of a step beyond plain compute."""
    step, alone = (min(seconds["cpu"] for seconds in figures[kind]) for kind in ("step", "compute"))
    return step - alone


def per_unit(rank: int, n: int) -> tuple[float, float]:
    found = scaling.units((8, 64), rounds=4, steps=1)
    return tuple(_beyond(found[count]) / found[count]["units"] for count in (8, 64))


def test_a_unit_costs_the_same_among_many() -> None:
    """Twice is allowed: many units' weights leave the caches between their uses."""
    for few, many in run(per_unit, n=2, timeout=100):
        assert few > 0
        assert many < 2 * few, (few, many)


def step_seconds(rank: int, n: int, units: int) -> float:
    """Python time of a step whose tensors are too small to matter, per unit."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(units)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zerostage.shard(model, optimizer, stage=3)
    assert len(engine_of(model).units) == units
    x = torch.ones(1, 4)
    times = []
    for _ in range(12):
        started = time.process_time()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time() - started)
    return sorted(times)[2] / units  # a low quantile: other work on the machine only adds


def test_the_cost_per_unit_does_not_grow() -> None:
    few, some, many = (run(step_seconds, n=1, units=units)[0] for units in (4, 32, 128))
    assert many < 2 * some and many < 2 * few, (few, some, many)
    few, some, many = (max(run(step_seconds, n=2, units=units)) for units in (4, 32, 128))
    # over gloo two more threads share the clock of the process
    assert many < 2 * some and many < 2 * few, (few, some, many)
