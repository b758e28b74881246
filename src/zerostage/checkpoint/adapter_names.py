"""The names of a PEFT model's tensors: which are the base model's, which an adapter's, and what each is called on disk.

Told from the names alone, as `peft` itself tells it from the modules: where there is an
`X.base_layer`, all else under X is an adapter's; where there is an `X.original_module`, X is
trained whole (modules_to_save) or in a few rows (trainable tokens).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_ROOT = "base_model.model."
#: What peft writes into an adapter even though it is the base model's, where an adapter lies on it.
_EMBEDDINGS = ("embed_tokens", "lm_head")


@dataclass
class PeftNames:
    """base: the name in a plain model of each of the base model's tensors, by its name in the PEFT model.

    adapters: for each adapter the names that peft writes, by the names in the PEFT model.
    """

    base: dict[str, str] = field(default_factory=dict)
    adapters: dict[str, dict[str, str]] = field(default_factory=dict)

    def folder(self, adapter: str) -> str:
        """Where peft has an adapter: 'default' (or the only one) in the folder itself, another in its own below."""
        return "" if adapter == "default" or len(self.adapters) == 1 else adapter


def split(names: Iterable[str], also: Iterable[str] = (), trainable: Iterable[str] = ()) -> PeftNames | None:
    """Divide the names of all parameters and buffers; None if they are no PEFT model's.

    also: further names of shared ones, which tell what is wrapped. trainable: the names of those that are.

    Raises ValueError for prompt learning, whose tensors on disk are computed by the model.
    """
    names = list(names)
    known = {*names, *also}
    if any(name.startswith("prompt_encoder.") for name in names) and any(name.startswith("base_model.") for name in names):
        raise ValueError("the checkpoint is of a PEFT prompt learning model, which only its own save_pretrained can write")
    wrapped = {name[: match.start()] for name in known for match in re.finditer(r"\.base_layer\.", name)}
    whole = {name[: match.start()] for name in known for match in re.finditer(r"\.original_module\.", name)}
    found = PeftNames()
    for name in names:
        part = _adapter_part(name, wrapped, whole)
        if part is None:
            found.base[name] = _clean(name)
        elif part:
            adapter, key = part
            found.adapters.setdefault(adapter, {})[name] = key
    # A layer that someone else called base_layer has no adapter of that form beside it.
    if not found.adapters or any(adapter in ("", "weight", "bias") for adapter in found.adapters):
        return None
    for name in found.base:
        layer, _, rest = name.rpartition(".base_layer.")
        embedding = rest == "weight" and layer.rpartition(".")[2] in _EMBEDDINGS
        embedding = embedding and not any(one.startswith(f"{layer}.trainable_tokens") for one in known)
        if embedding or (name in trainable and name.endswith(".bias")):
            for keys in found.adapters.values():
                keys[name] = _rooted(name)
    return found


def _adapter_part(name: str, wrapped: set[str], whole: set[str]) -> tuple[str, str] | tuple[()] | None:
    """(adapter, its name on disk); () for what is neither the base model's nor on disk; None for the base model's."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        layer, rest = ".".join(parts[:end]), parts[end:]
        if layer in whole and rest[0] == "modules_to_save":
            return rest[1], _rooted(".".join([layer, *rest[2:]]))
        if layer in whole and rest[0] == "token_adapter" and rest[1] != "base_layer":
            return (rest[2], _rooted(".".join([layer, *rest[:2]]))) if rest[1] == "trainable_tokens_delta" else ()
        tuner = layer in wrapped and rest[0] != "base_layer"
        shared = parts[end - 1] == "base_model" and rest[0] != "model" and bool(wrapped)
        if layer not in whole and (tuner or shared):
            adapter, tail = "".join(rest[1:2]), [rest[0], *rest[2:]]
            if tail == ["lora_magnitude_vector", "weight"]:
                tail = tail[:1]
            return adapter, _rooted(".".join([layer, *tail]))
    return None


def _rooted(name: str) -> str:
    """From base_model on; a model that got its adapters by `add_adapter` has no base_model, but its file has."""
    match = re.search(r"(?:^|\.)(base_model\..*)", name)
    return match[1] if match else _ROOT + name


def _clean(name: str) -> str:
    name = re.sub(r"(^|\.)base_model\.model\.", r"\1", name, count=1)
    name = name.replace(".token_adapter.base_layer.", ".").replace(".original_module.", ".")
    return name.replace(".base_layer", "")
