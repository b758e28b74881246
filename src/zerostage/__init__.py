"""zerostage: plan, train and audit ZeRO data parallelism on PyTorch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Imported when first used, so that planning needs no torch.
_HOME = {
    "Partition": "partition",
    "Precision": "precision",
    "OrderError": "notes",
    "PeerError": "notes",
    "Ledger": "ledger",
    "Traffic": "ledger",
    "Audit": "auditing",
    "audit": "auditing",
    "TrafficAudit": "traffic_audit",
    "audit_traffic": "traffic_audit",
    "load_weights": "weights",
    "together": "uneven",
    "take_part": "uneven",
    "save_weights": "whole_weights",
    "save": "checkpoint.saving",
    "load": "checkpoint.loading",
    "export": "checkpoint.exporting",
    "latest": "checkpoint.folder",
    "DamagedError": "checkpoint.damage",
    "EMA": "ema",
    "trace": "tracing",
    "plan": "planning.answer",
    **dict.fromkeys(
        ("shard", "reserve", "no_sync", "gathered", "clip_grad_norm_", "full_state_dict", "memory", "traffic", "close"),
        "engine",
    ),
}
__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'zerostage' has no attribute '{name}'")
    return getattr(import_module(f"zerostage.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
