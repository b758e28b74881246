"""Open a checkpoint for reading, whichever program wrote it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from zerostage.checkpoint.source import Source

#: The modules that read a kind of checkpoint, each with its class.
_KINDS = {"stored": "StoredSource", "deepspeed": "DeepSpeedSource", "dcp": "DCPSource"}


def _kind(path: Path) -> Any:
    for module, name in _KINDS.items():
        reader = import_module(f"zerostage.checkpoint.{module}")
        if reader.recognises(path):
            return getattr(reader, name)
    return None


def is_source(path: Path) -> bool:
    """Whether `path` itself looks like a checkpoint of a kind that can be read."""
    return _kind(path) is not None


def open_source(path: str | Path) -> Source:
    """The checkpoint at `path`: of zerostage, DeepSpeed ZeRO or torch.distributed.checkpoint (FSDP2).

    Raises FileNotFoundError where there is nothing and ValueError where it is none of these.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    if (reader := _kind(path)) is None:
        raise ValueError(
            f"{path} is not a checkpoint: it has neither zerostage's manifest.json, nor DeepSpeed's *_optim_states.pt, nor the "
            ".metadata of torch.distributed.checkpoint"
        )
    return reader(path)
