"""Weights that are stored in fewer bits than they compute with: the logical count and the stored size are two numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from zerostage.mistakes import InputError
from zerostage.planning.model.architecture import Architecture

_HINT = "known are bitsandbytes, gptq, awq and fp8; take quantization_config out to plan for unquantised weights"


def _method(settings: Mapping[str, Any]) -> Any:
    unsaid = "bitsandbytes" if {"load_in_4bit", "load_in_8bit"} & settings.keys() else None
    return settings.get("quant_method") or unsaid


def _stored(settings: Mapping[str, Any], source: str) -> tuple[str, Callable[[int, int], float]]:
    """What the weights are called, and the bits per element that a weight of (inputs, outputs) takes, scales included.

    bitsandbytes: one fp32 scale per 64 elements in 4 bits (QLoRA, arXiv:2305.14314), with double quantisation 8 bits and
    another fp32 scale per 256 of those; in 8 bits one fp32 scale per output. GPTQ and AWQ: a 16-bit scale and a zero
    point of the weight's own width per group of inputs. fp8: an fp32 scale per block, or one for all.
    """
    method = _method(settings)
    if method == "bitsandbytes":
        if settings.get("load_in_4bit"):
            scales = 8 / 64 + 32 / (64 * 256) if settings.get("bnb_4bit_use_double_quant") else 32 / 64
            return "4-bit", lambda inputs, outputs: 4 + scales
        if settings.get("load_in_8bit"):
            return "8-bit", lambda inputs, outputs: 8 + 32 / inputs
        raise InputError(f"{source}: quantization_config loads neither in 4 nor in 8 bits; {_HINT}")
    if method in ("gptq", "awq"):
        bits, group = settings.get("bits", settings.get("w_bit")), settings.get("group_size", settings.get("q_group_size", 128))
        if bits not in (2, 3, 4, 8) or not isinstance(group, int) or (group < 1 and group != -1):
            raise InputError(f"{source}: quantization_config has bits {bits!r} and group_size {group!r}; bits are 2, 3, 4 or 8")
        return f"{bits}-bit", lambda inputs, outputs: bits + (16 + bits) / (inputs if group == -1 else group)
    if method == "fp8":
        block = settings.get("weight_block_size")
        sound = isinstance(block, (list, tuple)) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
        if block is not None and not sound:
            raise InputError(
                f"{source}: quantization_config has weight_block_size {block!r}; it is two numbers, such as [128, 128]"
            )
        return "fp8", lambda inputs, outputs: 8 + 32 / (block[0] * block[1] if block else inputs * outputs)
    raise InputError(f"{source}: quantization_config has quant_method {method!r}; {_HINT}")


def quantise(
    architecture: Architecture, linear: Mapping[str, tuple[int, int]], settings: Mapping[str, Any], source: str
) -> Architecture:
    """The architecture with the linear weights of its blocks stored in few bits, and therefore not trainable.

    `linear`: name -> (inputs, outputs). `settings`: the quantization_config. Fused experts count as linear, except under
    bitsandbytes, which quantises linear layers only. Raises an InputError for a method that is not known.
    """
    if not isinstance(settings, Mapping):
        raise InputError(f"{source}: quantization_config must be an object, not {settings!r}; {_HINT}")
    what, bits = _stored(settings, source)
    whole = settings.get("modules_to_not_convert") or settings.get("llm_int8_skip_modules") or ()
    with_experts = _method(settings) != "bitsandbytes"
    weights, changed, left = [], 0, 0
    for weight in architecture.weights:
        sizes = linear.get(weight.name) if architecture.block_of(weight.name) else None
        if len(weight.shape) == 3 and ".experts." in weight.name:
            sizes = (weight.shape[2], weight.shape[1]) if with_experts else None
            left += not with_experts
        path = f".{weight.name.rpartition('.')[0]}."
        if sizes is not None and not any(f".{name}." in path for name in whole):
            weight = replace(weight, bits=bits(*sizes), trainable=False)
            changed += weight.numel
        weights.append(weight)
    if not changed:
        raise InputError(f"{source}: quantization_config applies to no linear layer of '{architecture.name}'; {_HINT}")
    notes = [f"{changed:,} parameters are stored in {what} as quantization_config says, and not trained"]
    if left:
        notes.append("the fused experts are not quantised: bitsandbytes quantises linear layers only")
    return replace(architecture, weights=tuple(weights), assumed=(*architecture.assumed, *notes))
