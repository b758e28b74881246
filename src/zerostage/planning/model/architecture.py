"""What a model is to the planner: its parameters with names and shapes, and the sizes that activations follow from.

Arithmetic only: no torch. Where an architecture comes from (a built-in name, a config.json, a module on the meta
device) is `resolve.py`'s business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Weight:
    """One parameter. Tied ones appear once, with all of their names."""

    names: tuple[str, ...]
    shape: tuple[int, ...]  # logical: what the model computes with
    trainable: bool = True
    bits: float | None = None  # stored bits per element where they differ from the run's dtype (4-bit packed: 4, plus scales)
    active: float = 1.0  # the part of it that one token uses (experts: top_k / experts)

    @property
    def name(self) -> str:
        return self.names[0]

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Block:
    """The sizes of one repeated layer that its activations follow from."""

    name: str  # its path: 'model.layers.0'
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # width of the dense MLP; of one expert where `experts`
    gated: bool = True  # SwiGLU-like: two projections up
    experts: int = 0
    experts_per_token: int = 0
    shared_ffn: int = 0  # width of shared experts, run for every token
    window: int | None = None  # sliding-window attention
    norm: str = "rms"  # 'rms' or 'layer'
    norms: int = 2  # norms over the hidden size in one block (Gemma 2: 4)
    qk_norm: bool = False
    activation: str = "silu"
    dropout: bool = False


@dataclass(frozen=True)
class Unit:
    """What is gathered and reduced as one."""

    name: str
    weights: tuple[Weight, ...]
    resident: bool = False  # used in several places (tied embeddings, leftovers): gathered from first to last use

    @cached_property
    def numel(self) -> int:
        return sum(weight.numel for weight in self.weights)


@dataclass(frozen=True)
class Architecture:
    name: str
    family: str  # transformers' model_type, or 'parameters' where only a count is known
    hidden: int
    vocab: int
    blocks: tuple[Block, ...]
    weights: tuple[Weight, ...]  # in the order in which the model defines them
    tied: bool = False
    positions: int | None = None  # longest sequence that the model was made for
    modelled: bool = True  # whether activations are known in closed form; else only counts are
    assumed: tuple[str, ...] = field(default=())

    @cached_property
    def parameters(self) -> int:
        return sum(weight.numel for weight in self.weights)

    @cached_property
    def trainable_parameters(self) -> int:
        return sum(weight.numel for weight in self.weights if weight.trainable)

    def trains(self, block: str) -> bool:
        """Whether weights of a block (by its path) are trained, adapters apart."""
        return self._trained.get(block, False)

    @cached_property
    def _trained(self) -> dict[str, bool]:
        return {
            unit.name: any(weight.trainable and ".lora_" not in weight.name for weight in unit.weights) for unit in self.units
        }

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token uses."""
        return round(sum(weight.numel * weight.active for weight in self.weights))

    @cached_property
    def block_names(self) -> frozenset[str]:
        return frozenset(block.name for block in self.blocks)

    def block_of(self, parameter: str) -> str | None:
        """The innermost block that the parameter of that name lies in."""
        parts = parameter.split(".")
        return next((path for i in range(len(parts) - 1, 0, -1) if (path := ".".join(parts[:i])) in self.block_names), None)

    @cached_property
    def blocks_and_root(self) -> tuple[Unit, ...]:
        """One unit a block, and one of all the rest: how fully_shard and auto-wrap policies are commonly applied."""
        blocks = tuple(unit for unit in self.units if unit.name in self.block_names)
        rest = tuple(weight for unit in self.units if unit.name not in self.block_names for weight in unit.weights)
        return (Unit("root", rest, resident=True), *blocks) if rest else blocks

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The units of the engine, by the rule of `division.divide`, in the order in which the model defines them."""
        inside = {name: self.block_of(name) for weight in self.weights for name in weight.names}
        sizes: dict[str, int] = {}
        modules: dict[str, int] = {}
        for weight in self.weights:
            for name in weight.names:
                module = name.rpartition(".")[0]
                modules[module] = modules.get(module, 0) + weight.numel
            if inside[weight.name]:
                sizes[inside[weight.name]] = sizes.get(inside[weight.name], 0) + weight.numel
        large = max(1, min(max(sizes.values(), default=self.parameters), self.parameters // 8))
        units: dict[str, list[Weight]] = {}
        shared: set[str] = set()
        for weight in self.weights:
            where = []
            for name in weight.names:
                module = name.rpartition(".")[0]
                place = inside[name] or (module if modules[module] >= large else "")
                if place not in where:
                    where.append(place)
            key = where[0] if len(where) == 1 else weight.name.rpartition(".")[0] + " (shared)"
            if len(where) > 1:
                shared.add(key)
            units.setdefault(key, []).append(weight)
        return tuple(Unit(key or "root", tuple(own), not key or key in shared) for key, own in units.items())


def usual_depth(parameters: float) -> float:
    """Layers of a dense transformer of which only the size is known: N = 12 L h^2 (Kaplan et al. 2020) with a width h of 128 a layer."""
    return (parameters / (12 * 128**2)) ** (1 / 3)
