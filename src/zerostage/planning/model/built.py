"""Models that are there as modules: counted from their parameters. The only part that needs torch, imported when used."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zerostage.mistakes import InputError, closest
from zerostage.planning.model.architecture import Architecture, Block, Weight
from zerostage.planning.model.classics import FAMILIES
from zerostage.planning.model.families import NotModelled

#: Sizes of a block by the fields of a transformers configuration, as far as they are there.
_SIZES = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "ffn": "intermediate_size"}

Linear = dict[str, tuple[int, int]]


def counted(module: Any, name: str, why: str = "") -> tuple[Architecture, Linear]:
    """What `module` (an nn.Module) consists of, and its linear layers: weight name -> (inputs, outputs).

    A model of transformers that is, parameter by parameter, one of the families in closed form is `modelled`; of any
    other only counts are known. Packed 4-bit weights count with their logical shape. `why`: what to note as assumed.
    """
    from torch import nn

    from zerostage.division import own_name, repeated_blocks

    names: dict[nn.Parameter, list[str]] = {}
    owners: dict[nn.Parameter, nn.Module] = {}
    for path, owner in module.named_modules():  # a module that is registered twice is met once: it is one place
        for key, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(parameter, []).append(own_name(f"{path}.{key}" if path else key))
            owners.setdefault(parameter, owner)
    if not names:
        raise InputError(f"'{name}' has no parameters; nothing is to be planned")
    weights = [_weight(parameter, tuple(own), owners[parameter]) for parameter, own in names.items()]
    linear: Linear = {}
    for parameter, own in names.items():
        owner = owners[parameter]
        if parameter is getattr(owner, "weight", None):
            if isinstance(owner, nn.Linear):
                linear[own[0]] = (owner.in_features, owner.out_features)
            elif type(owner).__name__ == "Conv1D" and parameter.dim() == 2:  # transformers' linear layer, stored (in, out)
                linear[own[0]] = (parameter.shape[0], parameter.shape[1])
    known = _known(module, name, weights)
    if known is not None:
        return known, linear
    config = _text_config(module)
    blocks = [path for path, _ in repeated_blocks(module)]
    experts = _count(config, "num_local_experts") or _count(config, "num_experts") or _count(config, "n_routed_experts")
    chosen = _count(config, "num_experts_per_tok")
    if experts and 0 < chosen < experts:
        weights = [replace(w, active=chosen / experts) if ".experts." in f".{w.name}." else w for w in weights]
    sizes = {key: _count(config, field) for key, field in _SIZES.items()}
    kind = getattr(getattr(module, "config", None), "model_type", "") or type(module).__name__
    return Architecture(
        name,
        kind,
        _count(config, "hidden_size"),
        _count(config, "vocab_size"),
        tuple(Block(path, **sizes) for path in blocks),
        tuple(weights),
        tied=any(len(weight.names) > 1 for weight in weights),
        positions=_count(config, "max_position_embeddings") or None,
        modelled=False,
        assumed=(why or f"'{kind}' is not modelled in closed form: counted from its parameters",),
    ), linear


def _weight(parameter: Any, names: tuple[str, ...], owner: Any) -> Weight:
    """A parameter with its logical shape. bitsandbytes keeps packed bytes, and the shape in `quant_state`."""
    state = getattr(parameter, "quant_state", None)
    shape = tuple(getattr(state, "shape", None) or ())
    if not shape and not parameter.is_floating_point() and hasattr(owner, "in_features"):
        shape = (owner.out_features, owner.in_features)
    if not shape:
        return Weight(names, tuple(parameter.shape), parameter.requires_grad)
    held = [parameter.data, *(getattr(part, "absmax", None) for part in (state, getattr(state, "state2", None)))]
    stored = 8 * sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)
    weight = Weight(names, shape, parameter.requires_grad)
    return replace(weight, bits=stored / max(1, weight.numel))


def _known(module: Any, name: str, weights: list[Weight]) -> Architecture | None:
    """The family in closed form that `module` is, to the last parameter."""
    from zerostage.planning.model.resolve import closed_form

    config = getattr(module, "config", None)
    if getattr(config, "model_type", None) not in FAMILIES or not hasattr(config, "to_dict"):
        return None
    try:
        known = closed_form(config.to_dict(), name, "the model's config")
    except (InputError, NotModelled):
        return None
    if known is None or [(w.names, w.shape) for w in known.weights] != [(w.names, w.shape) for w in weights]:
        return None
    own = tuple(replace(w, trainable=real.trainable, bits=real.bits) for w, real in zip(known.weights, weights))
    return replace(known, weights=own)


def _text_config(module: Any) -> Any:
    config = getattr(module, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _count(config: Any, field: str) -> int:
    value = getattr(config, field, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def on_meta(config: Mapping[str, Any], name: str, source: str, what: str) -> tuple[Architecture, Linear]:
    """The model of a configuration, built by transformers on the meta device and counted. `what` is not modelled."""
    module = from_config(config, source, f"{what} is not modelled in closed form, and counting it")
    architecture, linear = counted(module, name, f"{what} is not modelled in closed form: counted by building it on the meta device")
    return replace(architecture, family=config["model_type"]), linear


def from_config(config: Mapping[str, Any], source: str, purpose: str) -> Any:
    """The model of a configuration, built by transformers on the meta device in fp32, its weights not quantised.

    purpose: what needs it, for messages. Remote code is never run. Raises an InputError where there is no transformers, or
    where it cannot build the model.
    """
    kind = config.get("model_type")
    try:
        import torch
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise InputError(f"{source}: {purpose} needs transformers and torch, which are not here ({_line(error)})") from None
    if kind not in CONFIG_MAPPING:
        raise InputError(
            f"{source}: neither zerostage nor transformers knows model_type '{kind}'{closest(str(kind), CONFIG_MAPPING)}; give a "
            "function that builds the model, as module:function"
        )
    quiet = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        fields = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config", "auto_map")}
        settings = AutoConfig.for_model(kind, **fields)
        family = AutoModelForCausalLM if type(settings) in AutoModelForCausalLM._model_mapping else AutoModel
        with torch.device("meta"):
            return family.from_config(settings, dtype=torch.float32)
    except Exception as error:
        raise InputError(f"{source}: transformers cannot build this {kind}: {_line(error)}") from None
    finally:
        logging.set_verbosity(quiet)


def made(path: str) -> Any:
    """'module:function': the nn.Module that it returns, built on the meta device. Raises an InputError where it does not."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise InputError(f"'{path}': building a model needs torch, which is not here ({_line(error)})") from None
    here = os.getcwd()
    sys.path.insert(0, here)  # as `python -m` does: the user's own file lies here
    try:
        return _called(path)
    finally:
        sys.path.remove(here)


def _called(path: str) -> Any:
    import torch

    home, _, wanted = path.partition(":")
    try:
        target: Any = importlib.import_module(home)
    except Exception as error:
        raise InputError(f"'{path}': cannot import {home} ({type(error).__name__}: {_line(error)})") from None
    for part in wanted.split("."):
        if not hasattr(target, part):
            raise InputError(f"'{path}': {home} has no {wanted}{closest(part, dir(target))}")
        target = getattr(target, part)
    if isinstance(target, torch.nn.Module):
        return target
    if not callable(target):
        raise InputError(f"'{path}' is a {type(target).__name__}; give a function without arguments that returns an nn.Module")
    try:
        with torch.device("meta"):
            module = target()
    except Exception as error:
        raise InputError(f"'{path}' failed on the meta device: {type(error).__name__}: {_line(error)}") from None
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"'{path}' returned a {type(module).__name__}; it must return an nn.Module")
    return module


def _line(error: BaseException) -> str:
    """The message of an exception in one line."""
    return " ".join(str(error).split())[:300]
