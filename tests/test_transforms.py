"""torch.func transforms over a sharded model: right where weights are whole, refused where they are divided."""

from __future__ import annotations

import pytest
import torch
from models import features, mlp
from ranks import run
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

import zerostage


def compute(model: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, values, (x,)).square().mean()

    per_sample = vmap(grad(loss), (None, 0))(parameters, x)
    return {
        **grad(loss)(parameters, x),
        **{f"per sample {name}": value for name, value in per_sample.items()},
        "jvp": jvp(model, (x,), (torch.ones_like(x),))[1],
        "jacrev": jacrev(model)(x[0]),
        "hessian": hessian(lambda x: model(x).sum())(x[0]),
    }


def transforms(rank: int, n: int, stage: int) -> None:
    model, plain = mlp(8, 16, 4), mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zerostage.shard(model, optimizer, stage=stage)
    x = features(rank, 0)[0]
    for (name, found), expected in zip(compute(model, x).items(), compute(plain, x).values()):
        assert torch.equal(found, expected), name
    assert all(parameter.grad is None for parameter in model.parameters())
    model(x).sum().backward()  # training goes on
    optimizer.step()


def refused(rank: int, n: int) -> None:
    model = mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zerostage.shard(model, optimizer, stage=3)
    x = features(rank, 0)[0]
    for transform in (grad(lambda x: model(x).sum()), vmap(model), jacrev(model), jacrev(model[0])):
        with pytest.raises(RuntimeError, match="cannot go through weights that are divided: keep them whole"):
            transform(x)
    state, plain = zerostage.full_state_dict(model, rank0_only=False), mlp(8, 16, 4)
    assert vmap(lambda x: functional_call(plain, state, (x,)))(x).shape == (4, 4)  # as the message advises
    model(x).sum().backward()
    optimizer.step()


def test_transforms_see_whole_weights() -> None:
    for stage in range(3):
        run(transforms, n=2, stage=stage)
    run(transforms, n=1, stage=3)


def test_transforms_over_divided_weights_are_refused() -> None:
    run(refused, n=2)
