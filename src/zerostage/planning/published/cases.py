"""Published measurements as questions to the planner: what was run, and what was seen.

`read` takes a JSON list of rows. A row states the model's shape, the engine, the run and one measured figure with its
unit (keys: model, param_count or arch_public, hidden, layers, heads, kv_heads, ffn, vocab, engine, zero_stage, n_gpus,
gpu_type, micro_batch, seq_len, activation_checkpointing, precision_*, optimizer, tp, dp, metric, value, unit, ...). A row
that leaves open what memory depends on is not a question; `Case.missing` says what it lacks.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerostage.mistakes import InputError
from zerostage.planning.model import resolve as models
from zerostage.planning.model.architecture import Architecture
from zerostage.planning.run import Run

UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6, "bytes": 1}
#: What a metric's name says was looked at.
KINDS = {
    "max_active": "active", "max_allocated": "allocated", "max_reserved": "reserved", "allocated_end": "at rest",
    "nvidia_smi": "device", "theory_model_states": "state",
}  # fmt: skip
#: torchtitan's models returned fp32 logits, which its loop held through backward, up to about pull request 400 (mid-2024).
TITAN_KEPT_LOGITS = 400


@dataclass
class Case:
    id: str
    engine: str  # as its source names it
    kind: str  # allocated, active, reserved, at rest, device, state; '' for one that says nothing definite
    value: int  # bytes; 0 for a run that ran out of memory
    fitted: bool
    stage: int = 3
    ranks: int = 1
    gpu: str = ""
    architecture: Architecture | None = None
    run: Run | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    also: dict[str, int] = field(default_factory=dict)  # other figures of the same run, by kind
    missing: tuple[str, ...] = ()
    source: str = ""


def read(path: str | Path) -> list[Case]:
    """The cases in a JSON file. Raises InputError where it is not a list of rows."""
    try:
        rows = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as a list of measurements: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "engine" in row for row in rows):
        raise InputError(f"{path} is not a list of measurements: each needs at least 'engine', 'metric' and 'value'")
    return [case(row) for row in rows]


def case(row: dict[str, Any]) -> Case:
    """One row as a question; see the module's text for its keys."""
    name, metric = row["engine"], str(row.get("metric", ""))
    kind = next((kind for word, kind in KINDS.items() if word in metric), "")
    value = round(row.get("value", 0) * UNITS.get(str(row.get("unit", "")).rstrip("?"), 1)) if row.get("value") else 0
    found = Case(
        id=str(row.get("id", "")), engine=name, kind=kind, value=value, fitted=bool(row.get("fits", True)), source=row.get("source", ""),
        tokens_per_s=row.get("tokens_per_s_per_gpu"), mfu=row.get("mfu_pct"), gpu=_gpu(row),
    )  # fmt: skip
    missing = []
    engine = _engine(name, row.get("n_gpus"))
    if engine is None:
        missing.append("modelled engine")
    if not kind and found.fitted:
        missing.append("what was measured")
    if (row.get("pp") or 1) > 1:
        missing.append("pipeline parallelism, which is planned as a layout only")
    if row.get("offload") not in (None, "none"):
        missing.append("offload with all its options")
    stage, world = row.get("zero_stage"), row.get("n_gpus")
    if stage is None or world is None:
        missing.append("stage and ranks")
    found.stage, found.ranks = stage or 0, row.get("dp") or (world or 1) // ((row.get("tp") or 1) * (row.get("pp") or 1))
    if kind == "state" and row.get("param_count"):
        found.architecture, found.run = models.resolve(params=row["param_count"]), Run(engine="zerostage")
        return found
    for key, what in (("micro_batch", "micro-batch"), ("seq_len", "sequence length"), ("activation_checkpointing", "checkpointing")):
        if row.get(key) is None:
            missing.append(what)
    try:
        found.architecture = _architecture(row, row.get("lora_rank") or 0)
    except InputError:
        missing.append("the model's shape")
    if not row.get("lora_rank") and "lora" in f"{name} {row.get('stage')} {row.get('extra')}".lower():
        missing.append("the rank of its LoRA")
    toggles = _toggles(row)
    if "baseline" in toggles and "packed" not in toggles:
        missing.append("how long the sequences were")
    missing += [what for what in ("optimizer in backward", "activation offload") if what in toggles]
    if row.get("grade") == "B" and "not stated" in str(row.get("notes")):
        missing.append("a stated configuration")
    if "fp8" in str(row.get("precision_compute")) or "fp4" in str(row.get("precision_compute")):
        missing.append("8- and 4-bit products, which are not modelled")
    if row.get("precision_weights") is None and row.get("precision_optimizer") is None:
        missing.append("precision")
    found.missing = tuple(missing)
    if not missing:
        found.run = _run(row, engine)
    if isinstance(row.get("extra"), dict):
        end, seen = row["extra"].get("allocated_end_bytes"), row["extra"].get("nvidia_smi_delta_mib_avg")
        found.also = {k: v for k, v in (("at rest", round(end or 0)), ("device", round((seen or 0) * 2**20))) if v}
    return found


def _toggles(row: dict[str, Any]) -> list[str]:
    """What a cumulative list of options (torchtune's) has switched on up to this row."""
    extra = row.get("extra")
    if not isinstance(extra, str) or "(cumulative)" not in extra:
        return []
    order = ("baseline", "packed", "compile", "chunked CE", "activation checkpointing", "optimizer in backward", "activation offload",
             "8-bit AdamW")  # fmt: skip
    last = next((i for i, name in enumerate(order) if name in extra), 0)
    return list(order[: last + 1])


def _engine(name: str, world: int | None) -> str | None:
    lower = name.lower()
    if "simplefsdp" in lower or "graph_trainer" in lower or "deepcompile" in lower:
        return None  # compilers that rewrite the engine's schedule
    if "single" in lower and (world or 1) == 1:
        return "ddp"
    for word, engine in (("fsdp2", "fsdp2"), ("fsdp", "fsdp1"), ("deepspeed", "deepspeed"), ("zero paper", "zerostage"), ("ddp", "ddp"),
                         ("megatron", "megatron")):  # fmt: skip
        if word in lower and not ("megatron-deepspeed" in lower):
            return engine
    return None


def _gpu(row: dict[str, Any]) -> str:
    text = str(row.get("gpu_type") or "")
    memory = row.get("gpu_mem_gb")
    return f"{text.split('-')[0]}-{memory:.0f}" if text and memory and memory < 180 else text


def _architecture(row: dict[str, Any], lora_rank: int) -> Architecture:
    shape = {**row, **(row.get("arch_public") or {})}
    keys = {"hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
            "ffn": "intermediate_size", "vocab": "vocab_size", "head_dim": "head_dim"}  # fmt: skip
    config: dict[str, Any] = {theirs: shape[ours] for ours, theirs in keys.items() if shape.get(ours)}
    if len(config) >= 6:
        config |= {"model_type": "llama", "tie_word_embeddings": bool(shape.get("tied", False))}
        found = models.resolve(config, lora_rank=lora_rank)
        count = shape.get("params") or shape.get("param_count")
        if count and not lora_rank and abs(found.parameters - count) > 0.001 * count:
            raise InputError("the shape does not give the stated number of parameters")
        return found
    count, h, layers = (row.get(key) for key in ("param_count", "hidden", "layers"))
    if len(config) == 3 and count and row.get("heads"):  # a plain transformer: 12 h^2 a layer, the rest two tables
        vocab = round((count - 12 * h * h * layers) / (2 * h))
        return models.resolve({**config, "model_type": "llama", "intermediate_size": 8 * h // 3, "vocab_size": vocab}, lora_rank=lora_rank)
    return models.resolve(re.sub(r"\s+(full finetune|pretrain).*", "", row["model"]), lora_rank=lora_rank)


def _run(row: dict[str, Any], engine: str) -> Run:
    name, extra = row["engine"].lower(), row.get("extra") if isinstance(row.get("extra"), str) else ""
    titan, tune = "torchtitan" in name, _toggles(row)
    pull = re.search(r"/pull/(\d+)", row.get("source", ""))
    fast = "fast-kernels" in name
    weights = str(row.get("precision_weights") or "")
    optimizer = str(row.get("precision_optimizer") or "")
    compute = str(row.get("precision_compute") or "bf16")
    master = "fp32" if "fp32" in weights or "fp32" in optimizer else "none"
    checkpointing = next((k for k in ("full", "selective", "none") if k in row["activation_checkpointing"]), "none")
    values: dict[str, Any] = {
        "engine": engine, "micro_batch": row["micro_batch"], "sequence": row["seq_len"], "accumulation": row.get("grad_accum") or 1,
        "checkpointing": checkpointing, "weights": "fp32" if compute == "fp32" else "bf16", "master": master,
        "implementation": "torchtitan" if titan else "transformers", "fused_kernels": fast or bool(row.get("compile")) or "compile" in tune,
        "loss": "chunked" if "chunk" in extra.lower() or "chunked CE" in tune else "fused" if fast else "whole",
        "keep_logits": titan and bool(pull) and int(pull[1]) <= TITAN_KEPT_LOGITS, "shifted_copy": "trainer" in name,
        "lora_rank": row.get("lora_rank") or 0, "tensor": row.get("tp") or 1,
    }  # fmt: skip
    if "torchtune" in name:
        values["optimizer_kernel"] = "fused"  # what its recipes state
    if "8-bit" in optimizer:
        values["moments"] = "int8"
    if "foreach" in str(row.get("optimizer")):
        values["optimizer_kernel"] = "foreach"
    return Run(**values)
