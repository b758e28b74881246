"""From what the user names as a model to its `Architecture`.

Built-in names and config.json files of known families need no torch: their parameters are known in closed form
(`families.py`, `classics.py`). Anything else is built on the meta device and counted (`built.py`).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerostage.mistakes import InputError, closest
from zerostage.planning.model import catalog
from zerostage.planning.model.adapters import linear_weights, with_lora
from zerostage.planning.model.architecture import Architecture, Weight
from zerostage.planning.model.classics import FAMILIES
from zerostage.planning.model.families import NotModelled
from zerostage.planning.model.fields import Fields
from zerostage.planning.model.quantised import quantise

if TYPE_CHECKING:
    from torch import nn

Linear = dict[str, tuple[int, int]]


def resolve(
    model: str | os.PathLike | Mapping[str, Any] | nn.Module | None = None, *, params: float | None = None, lora_rank: int = 0
) -> Architecture:
    """The architecture of a model, with exact parameter names, shapes and counts.

    `model`: a built-in name ('meta-llama/Llama-3.1-8B' and 'llama_3.1_8b' are the same), a config.json or a folder that
    has one, such a configuration as a dict, a hub id (its config.json is downloaded where huggingface_hub and a network
    are), 'module:function' for a function that builds an nn.Module (called under the meta device), or an nn.Module.
    `params`: instead of a model, only its number of parameters. `lora_rank`: adapters of that rank on all linear layers of
    the blocks, the rest frozen; 0: none. What was assumed is listed in `assumed`. Raises an InputError of one line.
    """
    if isinstance(lora_rank, bool) or not isinstance(lora_rank, int) or lora_rank < 0:
        raise InputError(f"lora_rank must be a whole number of at least 0, not {lora_rank!r}")
    if (model is None) == (params is None):
        if params is not None:
            raise InputError("give a model or a number of parameters, not both")
        raise InputError("give a model: a built-in name, a config.json, a folder, a hub id or module:function; or params")
    if params is not None:
        if lora_rank:
            raise InputError("LoRA needs the shapes of a model; a number of parameters does not have them: name the model")
        return _parameters(params)
    architecture, linear = _resolved(model)
    return with_lora(architecture, lora_rank, linear) if lora_rank else architecture


def closed_form(config: Mapping[str, Any], name: str, source: str) -> Architecture | None:
    """The architecture of a configuration of a known family, without quantisation; None for an unknown family.

    Raises NotModelled where the family has a variant that is not known, InputError for a wrong field.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        return None
    fields = Fields(config, source, family.aliases)
    fields.require(*family.required)
    parts = family.parts(fields)
    assumed = list(parts.assumed)
    if parts.unmodelled:
        assumed.append(f"{parts.unmodelled}: parameters are exact, activations are not modelled in closed form")
    made_for = fields.get("architectures", [])
    made_for = made_for if isinstance(made_for, list) else [made_for]
    if made_for and not any(str(one).endswith(("CausalLM", "LMHeadModel")) for one in made_for):
        assumed.append(f"taken as a causal language model, though {source} names {made_for[0]}")
    return Architecture(
        name,
        kind,
        parts.hidden,
        parts.vocab,
        tuple(parts.blocks),
        tuple(parts.weights),
        tied=parts.tied,
        positions=parts.positions,
        modelled=not parts.unmodelled,
        assumed=tuple(assumed),
    )


def _parameters(params: float) -> Architecture:
    if isinstance(params, bool) or not isinstance(params, (int, float)) or not math.isfinite(params) or params < 1:
        raise InputError(f"params must be a positive number of parameters, such as 70.6e9, not {params!r}")
    weight = Weight(("parameters",), (round(params),))
    note = "only a number of parameters is known: no layers, so neither activations and logits nor the size of a gathered unit"
    return Architecture(f"{round(params):,} parameters", "parameters", 0, 0, (), (weight,), modelled=False, assumed=(note,))


def locate(model: Any) -> tuple[Any, str, str]:
    """What `model` (as `resolve` takes it) stands for: a configuration, an nn.Module or 'module:function', with its name.

    The third is what a configuration is called in messages. Raises an InputError where there is no such model.
    """
    if isinstance(model, Mapping):
        return model, str(model.get("_name_or_path") or f"{model.get('model_type')} config"), "the config"
    if not isinstance(model, (str, os.PathLike)):
        if not (hasattr(model, "named_parameters") and hasattr(model, "named_modules")):
            raise InputError(f"a model is a name, a path, a config or an nn.Module, not a {type(model).__name__}")
        return model, type(model).__name__, ""
    text = os.fspath(model)
    if not text.strip():
        raise InputError(_unknown(text))
    path = Path(text).expanduser()
    if path.is_file() or (path / "config.json").is_file():
        return _read(path if path.is_file() else path / "config.json")
    if isinstance(model, str):
        if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", text):
            return text, text, ""
        if name := catalog.find(text):
            return catalog.CATALOG[name], name, f"the built-in config of {name}"
    if path.is_dir():
        raise InputError(f"{path} has no config.json; give a folder that has one, or a built-in name")
    if text.endswith(".json") or text.startswith((".", "/", "~")) or not isinstance(model, str):
        raise InputError(f"there is no file or folder {path}{closest(path.name, catalog.CATALOG)}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        config, _, source = _read(_from_hub(text))
        return config, text, source
    raise InputError(_unknown(text))


def _resolved(model: Any) -> tuple[Architecture, Linear]:
    what, name, source = locate(model)
    if isinstance(what, Mapping):
        architecture, linear = _from_config(what, name, source)
        notes = _notes(str(model), name) if what is catalog.CATALOG.get(name) else ()
        return replace(architecture, assumed=(*architecture.assumed, *notes)), linear
    from zerostage.planning.model.built import counted, made

    return counted(made(what) if isinstance(what, str) else what, name)


def _unknown(text: str) -> str:
    nearest = closest(text.lower().rpartition("/")[2], catalog.CATALOG)
    return f"'{text}' is no built-in model and no file" + (nearest or "; give a config.json, a hub id or module:function")


def _notes(asked: str, name: str) -> list[str]:
    notes = [catalog.NOTES[name]] if name in catalog.NOTES else []
    publisher = asked.rpartition("/")[0].lower()
    if publisher and publisher not in catalog.PUBLISHERS:
        notes.append(f"'{asked}' is taken for the built-in {name}; give its config.json if it is another model")
    return notes


def _read(path: Path) -> tuple[dict[str, Any], str, str]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise InputError(f"{path} is a {type(config).__name__}; a model's config.json is an object with a model_type")
    return config, path.resolve().parent.name if path.name == "config.json" else path.stem, str(path)


def _from_config(config: Mapping[str, Any], name: str, source: str) -> tuple[Architecture, Linear]:
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise InputError(f"{source} has no model_type; it must be a model's config.json, such as transformers writes")
    try:
        architecture, what = closed_form(config, name, source), f"'{kind}'"
    except NotModelled as variant:
        architecture, what = None, f"{variant} of '{kind}'"
    if architecture is None:
        from zerostage.planning.model.built import on_meta

        architecture, linear = on_meta(config, name, source, what)
    else:
        linear = linear_weights(architecture, FAMILIES[kind].transposed)
    settings = config.get("quantization_config")
    return (quantise(architecture, linear, settings, source) if settings else architecture), linear


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import constants, hf_hub_download
    except ImportError:
        raise InputError(f"{_unknown(name)} (to look it up on the hub, install huggingface_hub)") from None
    offline = constants.HF_HUB_OFFLINE or not _reachable(constants.ENDPOINT)
    try:
        return Path(hf_hub_download(name, "config.json", etag_timeout=5, local_files_only=offline))
    except Exception as error:  # no network, no such model, no access: the user needs the same answer
        why = "there is no network" if offline else f"its config.json could not be had from the hub ({type(error).__name__})"
        raise InputError(f"{_unknown(name)}; {why}") from None


def _reachable(endpoint: str) -> bool:
    """Whether the hub's name can be resolved, or a proxy does that: huggingface_hub would retry for half a minute."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    if getproxies():
        return True
    try:
        socket.getaddrinfo(urlsplit(endpoint).hostname, 443)
    except OSError:
        return False
    return True
