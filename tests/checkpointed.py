"""A model with one of everything that a checkpoint must carry, and what a rank holds of its training state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import zerostage
from zerostage import Partition
from zerostage.engine import engine_of


class Everything(nn.Module):
    """Odd sizes, a tie, a scalar, an empty weight, mixed dtypes, frozen ones, one that never has a gradient, buffers."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Embedding(11, 8, dtype=torch.bfloat16)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.norm = nn.BatchNorm1d(8)
            self.head = nn.Linear(8, 11, bias=False, dtype=torch.bfloat16)
            self.head.weight = self.embed.weight
            self.ghost = nn.Parameter(torch.randn(5))
            self.scale = nn.Parameter(torch.ones(()))
            self.nothing = nn.Parameter(torch.empty(0, 3))
            self.codes = nn.Parameter(torch.arange(7, dtype=torch.uint8), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            shift = self.ghost.sum() + self.codes.sum()
        x = self.norm(x.float()) * self.scale + shift * 0 + self.nothing.sum()
        return self.head(x.bfloat16()).float()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 13, dtype=torch.bfloat16), nn.Linear(13, 8, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(8)  # fp32 beside bf16
        self.fixed = nn.Parameter(torch.randn(3, 1, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("phases", torch.randn(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(self.norm(x.float()).bfloat16()))) + self.fixed.sum() * 0


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [], "lr": 3.0},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "lr": 2e-2},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def build(partition: Partition, **shard: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Everything()
    optimizer = optimizer_of(model)
    zerostage.shard(model, optimizer, partition=partition, **shard)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(11, (6,), generator=torch.Generator().manual_seed(100 * step + rank))
        nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
        zerostage.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def held(model: nn.Module) -> dict[tuple[str, str], list[tuple[int, torch.Tensor]]]:
    """(parameter, term) to the parts of the flattened term that this rank holds: first element and values, no padding."""
    engine = engine_of(model)
    found: dict[tuple[str, str], list[tuple[int, torch.Tensor]]] = {}

    def add(flat: Any, index: int, term: str, values: torch.Tensor, base: int, first: int, last: int) -> None:
        slot = flat.layout.slots[index]
        last = min(last, slot.start + slot.numel)
        if first < last:
            part = values[first - base : last - base].clone()
            found.setdefault((slot.name, term), []).append((first - slot.start, part))

    for flat in engine.flats:
        for term, level, values in (("weights", 1, flat.shard), ("master", 3, flat.master)):
            if term == "weights" or flat.trainable and flat.has_master:
                for index, first, last in flat.layout.segments(*flat.bounds[level]):
                    add(flat, index, term, values, flat.bounds[level][0], first, last)
        for segment in engine.driver.segments.get(flat, ()):
            for term, value in engine.driver.optimizer.state.get(segment.parameter, {}).items():
                if value.dim():
                    add(flat, segment.index, term, value, segment.start, segment.start, segment.stop)
                else:
                    found.setdefault((flat.layout.slots[segment.index].name, term), []).append((0, value.reshape(1).clone()))
    return found


def whole(parts: list[dict[tuple[str, str], list[tuple[int, torch.Tensor]]]]) -> dict[tuple[str, str], torch.Tensor]:
    """The whole terms of what all ranks hold."""
    joined: dict[tuple[str, str], torch.Tensor] = {}
    for rank in parts:
        for key, pieces in rank.items():
            for first, values in pieces:
                old = joined.get(key, values[:0])
                new = torch.zeros(max(old.numel(), first + values.numel()), dtype=values.dtype)
                new[: old.numel()] = old
                new[first : first + values.numel()] = values
                joined[key] = new
    return joined


def differences(mine: dict[Any, Any], expected: dict[tuple[str, str], torch.Tensor]) -> list[str]:
    """Where what a rank holds is not, bit for bit, its part of `expected`."""
    wrong = []
    for (name, term), pieces in mine.items():
        for first, values in pieces:
            there = expected.get((name, term))
            if there is None or values.dtype != there.dtype or not torch.equal(values, there[first : first + values.numel()]):
                wrong.append(f"{name}.{term} from {first}")
    return wrong
