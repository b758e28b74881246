"""From what the user names as a model to a function that builds it on the meta device, for simulation."""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerostage.mistakes import InputError, closest
from zerostage.planning.model import catalog


def builder(model: Any) -> Callable[[], nn.Module]:
    """A function that builds `model` on the meta device, in training mode.

    model: a built-in name, a config.json or a folder that has one, such a configuration as a dict, 'module:function', or an
    nn.Module, of which a copy without values is made. Raises InputError for anything else, here or when it is called.
    """
    if isinstance(model, nn.Module):
        return partial(_without_values, model)
    if isinstance(model, Mapping):
        return partial(_from_config, model, "the config")
    if not isinstance(model, (str, os.PathLike)):
        raise InputError(f"a model to simulate is a name, a path, a config or an nn.Module, not a {type(model).__name__}")
    text = os.fspath(model)
    path = Path(text).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        try:
            return partial(_from_config, json.loads(path.read_text(encoding="utf-8")), str(path))
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read as JSON: {' '.join(str(error).split())}") from None
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", text):
        return partial(_from_function, text)
    if name := catalog.find(text):
        return partial(_from_config, catalog.CATALOG[name], f"the built-in config of {name}")
    nearest = closest(text, catalog.CATALOG)
    raise InputError(f"'{text}' is no built-in model and no file{nearest}; of a model of the hub give the config.json")


def _without_values(model: nn.Module) -> nn.Module:
    tensors = {*model.parameters(), *model.buffers()}
    memo: dict[int, Any] = {}
    for tensor in tensors:
        bare = torch.empty_like(tensor, device="meta", requires_grad=False)
        memo[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
    return copy.deepcopy(model, memo).train()


def _from_function(text: str) -> nn.Module:
    from zerostage.planning.model.built import _made

    sys.path.insert(0, os.getcwd())  # as `python -m` does: the user's own file lies here
    try:
        return _without_values(_made(text))
    finally:
        sys.path.pop(0)


def _from_config(config: Mapping[str, Any], source: str) -> nn.Module:
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise InputError(f"{source}: to simulate it, install transformers, whose code is what runs") from None
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise InputError(f"{source}: transformers knows no model_type {kind!r}{closest(str(kind), CONFIG_MAPPING)}")
    if config.get("quantization_config"):
        raise InputError(f"{source}: quantised weights are not simulated; use the closed form")
    fields = {key: value for key, value in config.items() if key not in ("model_type", "auto_map")}
    try:
        made = AutoConfig.for_model(kind, **fields)
        # the run's precision decides, not the checkpoint's
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(made, dtype=torch.float32).train()
    except Exception as error:
        raise InputError(f"{source}: transformers cannot build this {kind}: {' '.join(str(error).split())[:300]}") from None
