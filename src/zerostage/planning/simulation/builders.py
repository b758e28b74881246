"""From what the user names as a model to a function that builds it on the meta device, for simulation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zerostage.mistakes import InputError
from zerostage.planning.model.built import from_config, made
from zerostage.planning.model.resolve import locate


def builder(model: Any) -> Callable[[], nn.Module]:
    """A function that builds `model` (as `resolve.resolve` takes it) on the meta device, in training mode.

    Of an nn.Module a copy without values is made. Raises InputError for what is no model, here or when it is called.
    """
    what, _, source = locate(model)
    if isinstance(what, Mapping):
        if what.get("quantization_config"):
            raise InputError(f"{source}: quantised weights are not simulated; use the closed form")
        return lambda: from_config(what, source, "a simulation").train()
    return lambda: _without_values(made(what) if isinstance(what, str) else what)


def _without_values(model: nn.Module) -> nn.Module:
    tensors = {*model.parameters(), *model.buffers()}
    memo: dict[int, Any] = {}
    for tensor in tensors:
        bare = torch.empty_like(tensor, device="meta", requires_grad=False)
        memo[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
    return copy.deepcopy(model, memo).train()
