"""LoRA: which parameters there are when a frozen model gets adapters, as peft builds it (`target_modules='all-linear'`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby

from zerostage.mistakes import InputError
from zerostage.planning.model.architecture import Architecture, Weight

#: What peft puts in front of every name.
PREFIX = "base_model.model."
#: Families with fused experts that peft adapts in its own way.
WITH_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3")


def linear_weights(architecture: Architecture, transposed: bool = False) -> dict[str, tuple[int, int]]:
    """Names of the weights of linear layers in the blocks of a family in closed form, each with its (inputs, outputs).

    Fused experts and routers are parameters of their own in transformers 5, not linear layers. `transposed`: weights are
    stored (in, out).
    """
    routed = {block.name for block in architecture.blocks if block.experts}
    found = {}
    for weight in architecture.weights:
        block = architecture.block_of(weight.name)
        if block is None or len(weight.shape) != 2 or (block in routed and weight.name == f"{block}.mlp.gate.weight"):
            continue
        found[weight.name] = weight.shape if transposed else weight.shape[::-1]
    return found  # type: ignore[return-value]


def with_lora(architecture: Architecture, rank: int, linear: Mapping[str, tuple[int, int]]) -> Architecture:
    """The architecture with all of its weights frozen and trainable adapters in its blocks.

    `linear`: name -> (inputs, outputs). A weight W gets A (rank, inputs) and B (outputs, rank) beside it, and names change
    as peft changes them: 'base_model.model.' in front, 'base_layer' where W was. Raises an InputError where there is
    nothing to adapt.
    """
    weights: list[Weight] = []
    for layer, group in groupby(architecture.weights, key=lambda weight: weight.name.rpartition(".")[0]):
        own = list(group)
        inside = [weight for weight in own if architecture.block_of(weight.name)]
        pairs = [pair for weight in inside for pair in _pairs(weight, rank, linear, architecture.family)]
        for weight in own:
            names = tuple(_renamed(name, len(pairs)) for name in weight.names)
            weights.append(replace(weight, names=names, trainable=False))
        for outer, (inputs, middle, outputs, active) in zip(reversed(range(len(pairs))), pairs):
            where = PREFIX + layer + ".base_layer" * outer
            weights.append(Weight((f"{where}.lora_A.default.weight",), (middle, inputs), active=active))
            weights.append(Weight((f"{where}.lora_B.default.weight",), (outputs, middle), active=active))
    if not any(weight.trainable for weight in weights):
        raise InputError(f"LoRA needs linear layers in repeated blocks, and '{architecture.name}' shows none: leave it out")
    notes = [*architecture.assumed]
    if architecture.family in WITH_EXPERTS:
        where = f"attention, routers and routed experts, as peft has it for {architecture.family}"
    else:
        where = "every linear layer of the blocks"
        if any(len(weight.shape) == 3 for weight in architecture.weights):
            notes.append("parameters of three dimensions (fused experts) get no adapters")
    notes.append(f"LoRA of rank {rank} on {where}; the rest is frozen")
    moved = tuple(replace(block, name=PREFIX + block.name) for block in architecture.blocks)
    return replace(architecture, blocks=moved, weights=tuple(weights), assumed=tuple(notes))


def _pairs(weight: Weight, rank: int, linear: Mapping[str, tuple[int, int]], family: str) -> list[tuple[int, int, int, float]]:
    """Inputs, width between, outputs and active part of the A and B that a weight gets: none or one pair.

    Where transformers 5 has fused what were linear layers of experts, peft (0.21, transformers_weight_conversion) adapts
    the fused parameters and the router, each expert with its own A and B; gate and up are one parameter of twice the
    rank. The names of the expert layers then no longer select linear layers, so dense and shared MLPs get none.
    """
    if family in WITH_EXPERTS and ".mlp." in weight.name:
        if weight.name.endswith(".mlp.gate.weight"):
            return [(weight.shape[1], rank, weight.shape[0], 1.0)]
        if len(weight.shape) == 3:
            count, outputs, inputs = weight.shape
            fused = 2 if weight.name.endswith("gate_up_proj") else 1
            return [(inputs, fused * rank * count, outputs, weight.active)]
        return []
    sizes = linear.get(weight.name)
    return [(sizes[0], rank, sizes[1], 1.0)] if sizes else []


def _renamed(name: str, wrapped: int) -> str:
    layer, _, own = name.rpartition(".")
    return PREFIX + ".".join(part for part in (layer, *["base_layer"] * wrapped, own) if part)
