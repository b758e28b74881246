"""The folder of a DeepSpeed checkpoint: where it is, which files it must have, and which kinds of it are not read."""

from __future__ import annotations

import os
import re
from pathlib import Path

_OPTIMIZER = re.compile(r"((?:bf16_|fp16_)?)zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_(\d+)_model_states\.pt")
_EXPERTS = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt")
_LAYERS = re.compile(r"layer_\d+-model_.*\.pt")
_STATE = Path("zero", "optimizer_state.pt")  # of a universal checkpoint


def find(path: Path) -> Path | None:
    """The folder with the files: `path`, or the one that its file `latest` names (perhaps missing); None if there is neither."""
    if not path.is_dir():
        return None
    if _has_files(path):
        return path
    for pointer in (path / "latest", path / "latest_universal"):
        if pointer.is_file() and pointer.stat().st_size < 1000:
            name = pointer.read_bytes().decode(errors="replace").strip()
            # DeepSpeed puts its own script beside, which tells its `latest` from another program's.
            if name and (_has_files(path / name) or (path / "zero_to_fp32.py").exists()):
                return path / name
    return None


def _has_files(folder: Path) -> bool:
    forms = (_OPTIMIZER, _MODEL, _EXPERTS, _LAYERS)
    if not folder.is_dir():
        return False
    return (folder / _STATE).is_file() or any(form.fullmatch(name) for name in os.listdir(folder) for form in forms)


class Folder:
    """The files of one checkpoint. Raises ValueError for what is not read, and OSError for what `latest` names and is missing."""

    def __init__(self, path: Path) -> None:
        found = find(path)
        if found is None:
            give = "give a folder such as global_step10, or the one above, with the file 'latest'"
            raise ValueError(f"{path} is no DeepSpeed checkpoint: {give}")
        if not found.is_dir():
            what = f"{path} names {found.name} as its latest checkpoint, which is missing"
            raise FileNotFoundError(f"{what}: give one of its other folders")
        self.path = found
        self.universal = (found / _STATE).is_file()
        names = sorted(os.listdir(found))
        for kind, form in (("mixture-of-experts", _EXPERTS), ("pipeline-parallel", _LAYERS)):
            if name := next((name for name in names if form.fullmatch(name)), None):
                self.refuse(f"a {kind} checkpoint (it has {name})")
        files = [(match, name) for name in names if (match := _OPTIMIZER.fullmatch(name) or _MODEL.fullmatch(name))]
        if name := next((name for match, name in files if int(match[match.lastindex])), None):
            self.refuse(f"a tensor-parallel checkpoint (it has {name})")
        prefixes = sorted({match[1] for match, _ in files if match.re is _OPTIMIZER})
        if len(prefixes) > 1:
            both = " and ".join(self.optimizer(0, prefix).name for prefix in prefixes)
            raise ValueError(f"{found} has the files of two runs ({both}): delete those of the older one")
        #: Of the optimizer's files' names; None where there is none.
        self.prefix = prefixes[0] if prefixes else None

    def refuse(self, what: str) -> None:
        read = "only DeepSpeed checkpoints of ZeRO stages 1 to 3 with data parallelism alone are read"
        raise ValueError(f"{self.path} is {what}: {read}")

    def optimizer(self, rank: int, prefix: str | None = None) -> Path:
        """The rank's file; of a universal checkpoint the one that all share."""
        prefix = prefix if prefix is not None else self.prefix or ""
        return self.path / (_STATE if self.universal else f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")

    def model(self, rank: int | None = None) -> Path:
        """The file of all that is not the optimizer's: at stage 3 (`rank` given) each rank has one."""
        return self.path / (f"{'' if rank is None else f'zero_pp_rank_{rank}_'}mp_rank_00_model_states.pt")

    def states(self, name: str) -> list[str]:
        """The states of a parameter that a universal checkpoint has files of; [] where it has none of the parameter."""
        folder = self.path / "zero" / name
        return sorted(file[:-3] for file in os.listdir(folder) if file.endswith(".pt")) if folder.is_dir() else []

    def state(self, name: str, state: str) -> Path:
        return self.path / "zero" / name / f"{state}.pt"
