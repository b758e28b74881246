"""More than one backward before a step, and backward through a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from models import features, mlp
from ranks import run
from torch import nn

import zerostage

#: A case runs forward and backward over the ranks whose data this process has, `n` in all.
Case = Callable[[nn.Module, Iterable[int], int, int], None]


def one_forward_two_backwards(model: nn.Module, ranks: Iterable[int], n: int, step: int) -> None:
    y = torch.stack([model(features(r, step)[0]) for r in ranks]).mean(0)
    y[0].sum().backward(retain_graph=True)
    y[1].sum().backward()


def two_pairs(model: nn.Module, ranks: Iterable[int], n: int, step: int) -> None:
    for part in (step, step + 50):
        torch.stack([model(features(r, part)[0]).square().mean() for r in ranks]).mean().backward()


def gradient_penalty(model: nn.Module, ranks: Iterable[int], n: int, step: int) -> None:
    """The critic's loss of WGAN-GP (Gulrajani et al., 2017)."""
    losses = []
    for r in ranks:
        real, fake = features(r, step)[0], features(r, step + 50)[0]
        between = torch.lerp(real, fake, 0.3).requires_grad_()
        (gradient,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        losses.append(model(fake).mean() - model(real).mean() + 10 * (gradient.norm(dim=1) - 1).square().mean())
    torch.stack(losses).mean().backward()


CASES: dict[Case, Callable[[], nn.Module]] = {
    one_forward_two_backwards: lambda: mlp(8, 16, 4),
    two_pairs: lambda: mlp(8, 16, 4),
    gradient_penalty: lambda: mlp(8, 16, 1),
}


def train(rank: int, n: int, case: Case, stage: int | None) -> dict[str, torch.Tensor]:
    model = CASES[case]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if stage is not None:
        zerostage.shard(model, optimizer, stage=stage, units=[nn.Linear])
    for step in range(3):
        case(model, range(n) if stage is None else [rank], n, step)
        optimizer.step()
        optimizer.zero_grad()
    state = dict(model.state_dict() if stage is None else zerostage.full_state_dict(model, rank0_only=False))
    if stage is not None:
        zerostage.close(model)
    return state


def at_every_stage(rank: int, n: int, case: Case) -> list[dict[str, torch.Tensor]]:
    return [train(rank, n, case, stage) for stage in range(4)]


def assert_equals_plain(case: Case) -> None:
    oracle = train(0, 2, case, None)
    for by_stage in run(at_every_stage, n=2, case=case):
        for stage, state in enumerate(by_stage):
            # 1e-6: the mean over ranks is summed in another order
            torch.testing.assert_close(state, oracle, atol=1e-6, rtol=0, msg=lambda m: f"stage {stage}: {m}")


def test_O2_gradients_of_several_backwards_add_up() -> None:
    assert_equals_plain(one_forward_two_backwards)
    assert_equals_plain(two_pairs)


def test_O4_gradient_penalty() -> None:
    assert_equals_plain(gradient_penalty)
