"""Sizes that do not divide, scalars, empty parameters, fewer elements than ranks, odd layouts: all ordinary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run
from torch import nn

import zerostage
from zerostage.engine import engine_of


class Product(nn.Module):
    """One parameter of a given shape that scales its input's mean; a unit of its own inside a list."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(len(shape) + sum(shape))
        self.weight = nn.Parameter(torch.randn(shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + self.weight.sum().tanh() / 4)


class Stack(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Product(*shape) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x.square().mean()


def transposed() -> nn.Module:
    """Initial values that are not contiguous: a transpose, a channels-last kernel, an expanded view."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 5))
    model[0].to(memory_format=torch.channels_last)
    model[2].weight = nn.Parameter((torch.randn(12, 5) / 5).t())
    model[2].bias = nn.Parameter((torch.randn(1) / 5).expand(5))
    return model


def shared_ends(unused: bool) -> nn.Module:
    """The first and the last of nine layers share weight and bias; a branch may be unused."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6) for _ in range(9)]
    layers[8].weight, layers[8].bias = layers[0].weight, layers[0].bias
    model = nn.Sequential(*layers)
    if unused:
        model.branch = nn.Linear(6, 6)
        model.forward = lambda x, stack=layers: _through(stack, x)
    return model


def _through(layers: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "L2 one element in nested units": (lambda: Stack([(1,), (1, 1), (2,), (1000,)]), (4, 3)),
    "L3 fewer elements than ranks": (lambda: Stack([(1,), (2,)]), (4, 3)),
    "L3 a dimension smaller than the ranks": (lambda: Stack([(1, 5), (1, 5)]), (4, 3)),
    "L4 one small layer": (lambda: nn.Linear(2, 2), (4, 2)),
    "L5 sizes that do not divide": (lambda: Stack([(5,), (7,), (13,), (65,), (129,)]), (4, 3)),
    "scalars and empty": (lambda: Stack([(), (0,), (3, 0), ()]), (4, 3)),
    "L6 odd layouts": (transposed, (2, 2, 4, 4)),
    "A7 shared ends": (lambda: shared_ends(False), (3, 6)),
    "A7 shared ends and an unused branch": (lambda: shared_ends(True), (3, 6)),
}


def padding_is_zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether what lies after each parameter's values is zero in this rank's masters, gradients and states."""
    for flat, segments in engine_of(model).driver.segments.items():
        for segment in segments:
            slot = flat.layout.slots[segment.index]
            values = max(slot.start + slot.numel - segment.start, 0)
            states = optimizer.state.get(segment.parameter, {}).values()
            held = [segment.master, flat.step_grad[segment.slice]]
            held += [state for state in states if isinstance(state, torch.Tensor) and state.dim()]
            if any(tensor[values:].any() for tensor in held):
                return False
    return True


def train(rank: int, n: int, name: str, kind: str, stage: int | None) -> dict[str, Any]:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model = build()
    if stage is None:
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # torch cannot step a parameter that is an expanded view
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4, weight_decay=0.1),
    }[kind](model.parameters())
    if stage is not None:
        zerostage.shard(model, optimizer, stage=stage)
        gathered = zerostage.full_state_dict(model, rank0_only=False)
        assert all(torch.equal(gathered[key], value) and gathered[key].shape == value.shape for key, value in initial.items())
        assert sum(flat.layout.values for flat in engine_of(model).flats) == sum(p.numel() for p in model.parameters())
    norms = []
    for step in range(10 if name.startswith("A7") else 3):
        xs = [torch.randn(shape, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(n)]
        if stage is None:
            torch.stack([model(x).square().mean() for x in xs]).mean().backward()
            norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        else:
            model(xs[rank]).square().mean().backward()
            norms.append(zerostage.clip_grad_norm_(model, float("inf")))
        optimizer.step()
        assert stage is None or padding_is_zero(model, optimizer)
        optimizer.zero_grad()
    state = model.state_dict() if stage is None else zerostage.full_state_dict(model, rank0_only=False)
    return {"state": dict(state), "norms": torch.stack(norms)}


def train_stages(rank: int, n: int, name: str) -> dict[tuple[str, int], dict[str, Any]]:
    # The optimizers differ in what they do with a slice, the stages in how slices come about: SGD at two of them will do.
    cells = [("adamw", stage) for stage in range(4)] + [("sgd", 0), ("sgd", 3)]
    return {(kind, stage): train(rank, n, name, kind, stage) for kind, stage in cells}


@pytest.mark.parametrize("name, n", [(name, n) for name in MODELS for n in (1, 2, 3, 4) if n != 3 or not name.startswith("A7")])
def test_odd_sizes_equal_plain_torch(name: str, n: int) -> None:
    oracles = {kind: train(0, n, name, kind, None) for kind in ("sgd", "adamw")}
    for results in run(train_stages, n=n, name=name):
        for (kind, stage), result in results.items():
            assert result["state"].keys() == oracles[kind]["state"].keys()
            for key, value in oracles[kind]["state"].items():
                # 1e-6: the mean over ranks is summed in another order
                assert torch.allclose(result["state"][key], value, atol=1e-6, rtol=0), (kind, stage, key)
            assert torch.allclose(result["norms"], oracles[kind]["norms"], rtol=1e-5, atol=1e-7), (kind, stage)
