"""How far a run has come, and its checkpoints: what they have beside the model, and how a run goes on from one."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from torch import nn

import zerostage
from zerostage.checkpoint import folder as places
from zerostage.engine import require
from zerostage.mistakes import InputError
from zerostage.train import ending, readback
from zerostage.train.account import unit_for
from zerostage.train.config import TrainConfig
from zerostage.train.data import Position, Samples
from zerostage.train.report import Report

#: Settings that a run may change when it goes on; the new value holds, and a line says so.
CHANGEABLE = {
    "stage", "ranks", "global_batch", "steps", "epochs", "learning_rate", "min_learning_rate", "warmup_steps", "weight_decay",
    "beta1", "beta2", "clip", "precision",
}  # fmt: skip
_NAME = re.compile(r"step-(\d{8,})")
#: In the folder of checkpoints: the one of --test-save.
TEST = ".test-save"


@dataclass
class Progress:
    """`step` steps are done, `updates` of them not skipped (the learning rate goes by these), up to `position` in the data."""

    step: int = 0
    updates: int = 0
    position: Position = Position()


class Checkpoints:
    """The checkpoints of one run, in the folder `config.checkpoints`; without one, nothing is saved.

    All methods are collective: every rank calls them in the same order.
    """

    def __init__(self, config: TrainConfig, model: nn.Module, optimizer: Any, samples: Samples, tokenizer: Any) -> None:
        self.config, self.model, self.optimizer, self.tokenizer = config, model, optimizer, tokenizer
        self.engine = require(model)
        self.world = self.engine.world
        self.folder = Path(config.checkpoints).absolute() if config.checkpoints else None
        self.resumed = False
        self.saved: int | None = None  # the step of the newest checkpoint
        self._under_way: tuple[Any, int, float, float] | None = None
        self._run: dict[str, Any] = {}
        if self.folder or config.resume not in ("auto", "no"):
            self._run = self._on_rank_0(lambda: fingerprint(config, model, samples))

    def _on_rank_0(self, work: Callable[[], Any]) -> Any:
        """What `work` returns on rank 0, on all ranks; its OSError or InputError is an InputError on all."""
        outcome, problem = None, None
        if self.world.rank == 0:
            try:
                outcome = work()
            except (OSError, InputError) as error:
                problem = str(error)
        outcome, problem = self.world.collect_objects((outcome, problem), "rank 0's look at the checkpoints")[0]
        if problem:
            raise InputError(problem)
        return outcome

    # Going on

    def resume(self) -> tuple[Progress, list[str]]:
        """Load what the run goes on from, if there is anything. Returns how far that is, and lines that tell about it.

        Raises InputError where the checkpoint is of another run, or none can be used.
        """
        where = self._on_rank_0(self._source)
        progress, lines = self._load(where) if where else (Progress(), [])
        return progress, lines + self._on_rank_0(lambda: self._set_aside(progress.step if where else -1))

    def _source(self) -> Path | None:
        found = self.folder is not None and any(places.newest_first(self.folder))
        asked = self.config.resume
        if found and (asked == "auto" or ending.restarted()):
            return self.folder
        if asked in ("auto", "no"):
            return None
        if not Path(asked).is_dir():
            raise InputError(
                f"resume is {asked!r} ({self.config.source('resume')}): no such folder; use auto, no or a checkpoint's folder"
            )
        return Path(asked).absolute()

    def _load(self, where: Path) -> tuple[Progress, list[str]]:
        kept = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        try:
            with ending.during("while it loaded a checkpoint"):
                extra = zerostage.load(where, self.model, self.optimizer)
        except (OSError, KeyError, ValueError) as error:
            raise InputError(
                f"cannot go on from {where}: {error.args[0] if isinstance(error, KeyError) else error}; start anew with "
                "--resume no or another --checkpoints"
            ) from None
        for group, settings in zip(self.optimizer.param_groups, kept):
            group.update(settings)  # the command's settings hold, not those of the checkpoint
        extra = extra.get("zerostage train") if isinstance(extra, dict) else None
        if extra is None:
            return Progress(), [f"weights and optimizer state are of {where}, which has no place in the data: starting at step 1"]
        if differing := differences(extra["run"], self._run):
            raise InputError(
                f"the checkpoint {where} is of another run: {differing}. Start anew with --resume no or another --checkpoints, "
                "or make them equal"
            )
        self.resumed = True
        progress = Progress(extra["step"], extra["updates"], Position(extra["epoch"], extra["offset"]))
        path = where / name(progress.step) if where == self.folder else where
        self.saved = progress.step if where == self.folder else None
        settings = self.config.model_dump(include=CHANGEABLE)
        changed = [f"{key} {old} -> {settings[key]}" for key, old in extra["settings"].items() if settings.get(key, old) != old]
        return progress, [f"resumed from step {progress.step}: {path}" + (f" (changed: {', '.join(changed)})" if changed else "")]

    def _set_aside(self, after: int) -> list[str]:
        """Move checkpoints of later steps than `after` away: they are damaged, or of a run that is not gone on with.

        Else a restart could take them up, and rotation would delete them.
        """
        if self.folder is None or not self.folder.is_dir():
            return []
        shutil.rmtree(self.folder / TEST, ignore_errors=True)
        later = [path for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name)) and int(match[1]) > after]
        if not later:
            return []
        aside = self.folder / f"set-aside-{datetime.now():%Y%m%d-%H%M%S-%f}"
        aside.mkdir()
        for path in later:
            path.rename(aside / path.name)
        return [f"set aside {len(later)} checkpoint{'s' * (len(later) > 1)} that this run does not go on from: {aside}"]

    # Saving

    def check(self, progress: Progress, steps: int) -> None:
        """Raise InputError unless all ranks see the folder and its disk has room for what the run will keep there at a time."""
        if self.folder is None or progress.step >= steps:
            return
        probe = self.folder / f".probe-{hashlib.sha256(str(time.time_ns()).encode()).hexdigest()[:8]}"

        def write() -> Path:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                probe.write_bytes(b"0")
            except OSError as error:
                reason = error.strerror or error
                raise InputError(f"cannot write checkpoints to {self.folder}: {reason}; give another --checkpoints") from None
            every = self.config.checkpoint_every
            count = 1 + ((steps - 1) // every - progress.step // every if every else 0)
            if self.config.keep_last:
                there = sum(not places.check_sizes(path) for path in places.newest_first(self.folder))
                count = min(count, max(1, self.config.keep_last + 1 - there))
            needed, free = count * self.nbytes(), shutil.disk_usage(self.folder).free
            if free < needed:
                probe.unlink()
                unit, size = unit_for(needed)
                raise InputError(
                    f"{self.folder} has {free / size:,.0f} {unit} free, and this run's checkpoints need {needed / size:,.0f} "
                    f"{unit} more ({count} at a time): make room, keep fewer (--keep-last), or give another --checkpoints"
                )
            return probe

        probe = self._on_rank_0(write)
        sees = self.world.collect_objects(probe.exists(), "the folder of checkpoints")
        if self.world.rank == 0:
            probe.unlink()
        if not all(sees):
            blind = sees.index(False)
            raise InputError(f"rank {blind} does not see {self.folder}, where rank 0 writes: give a folder that all ranks share")

    def nbytes(self) -> int:
        """Bytes of the tensors of a checkpoint, once the optimizer has its states."""
        total = 0
        for flat in self.engine.flats:
            total += flat.layout.numel * flat.dtype.itemsize
            if flat.trainable:  # AdamW has two moments
                total += flat.layout.numel * flat.master_dtype.itemsize * (2 + flat.has_master)
        return total

    def test(self, progress: Progress) -> int:
        """--test-save: write a checkpoint, read it back, compare all bits, delete it. Returns its bytes.

        Raises InputError on all ranks where anything is wrong.
        """
        path = self.folder / TEST / name(progress.step)
        try:
            saving = zerostage.save(path, self.model, self.optimizer, self._extra(progress), beside=[self.tokenizer])
            found = self.world.collect_objects(self._read_back(path), "--test-save")
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"--test-save: {error}") from None
        finally:
            if self.world.rank == 0:
                shutil.rmtree(self.folder / TEST, ignore_errors=True)
        if any(found):
            first = next(text for texts in found for text in texts)
            raise InputError(f"--test-save: what was read is not what was written: {first}")
        return saving.bytes

    def _read_back(self, path: Path) -> list[str]:
        try:
            return readback.compare(path, self.engine)
        except Exception as error:  # the others must not wait for this rank
            return [f"{type(error).__name__}: {error}"]

    def due(self, step: int) -> bool:
        return self.folder is not None and self.config.checkpoint_every > 0 and step % self.config.checkpoint_every == 0

    def save(self, progress: Progress, report: Report, last: bool = False) -> Path | None:
        """Save, unless that step is saved already; the `last` time return only when all is on the disk."""
        if self.folder is None:
            return None
        path = self.folder / name(progress.step)
        with ending.during(f"in the checkpoint after step {progress.step}"):
            self.poll(report, wait=True)
            if self.saved != progress.step:
                began = time.perf_counter()
                saving = zerostage.save(
                    path,
                    self.model,
                    self.optimizer,
                    self._extra(progress),
                    keep_last=self.config.keep_last,
                    asynchronous=self.config.async_save and not last,
                    beside=[self.tokenizer],
                )
                self.saved = progress.step
                self._under_way = saving, progress.step, began, time.perf_counter() - began
            self.poll(report, wait=last)
        return path

    def poll(self, report: Report, wait: bool = False) -> None:
        """Report the checkpoint under way once it is published. Raises where it could not be written."""
        if self._under_way is None or not (wait or self._under_way[0].done):
            return
        saving, step, began, blocked = self._under_way
        self._under_way = None
        with ending.during(f"in the checkpoint after step {step}"):
            saving.wait()
        seconds = blocked if not self.config.async_save else time.perf_counter() - began
        report.checkpoint(step=step, path=str(saving.path), bytes=saving.bytes, seconds=seconds, blocked_s=blocked)

    def _extra(self, progress: Progress) -> dict[str, Any]:
        return {
            "zerostage train": {
                "step": progress.step,
                "updates": progress.updates,
                "epoch": progress.position.epoch,
                "offset": progress.position.offset,
                "run": self._run,
                "settings": self.config.model_dump(include=CHANGEABLE),
            }
        }


def name(step: int) -> str:
    """The folder name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def fingerprint(config: TrainConfig, model: nn.Module, samples: Samples) -> dict[str, Any]:
    """What must be the same for a run to go on: the kind of model, the data, its order."""
    described = {key: value for key, value in model.config.to_dict().items() if not key.startswith(("_", "transformers_"))}
    described.pop("dtype", None)
    tokens = samples.tokens
    total = hashlib.blake2b(digest_size=8)
    for start in range(0, len(tokens), 1 << 24):
        total.update(tokens[start : start + (1 << 24)].tobytes())
    return {
        "model": hashlib.blake2b(json.dumps(described, sort_keys=True, default=str).encode(), digest_size=8).hexdigest(),
        "tokens": len(tokens),
        "data": total.hexdigest(),
        "seed": config.seed,
        "sequence_length": config.sequence_length,
    }


def differences(then: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs between two fingerprints, in words; '' where nothing does."""
    words = []
    if then["model"] != now["model"]:
        words.append("the model's configuration differs")
    if then["data"] != now["data"]:
        counts = f"{then['tokens']:,} then, {now['tokens']:,} now"
        words.append(f"the training data differs ({counts} tokens)")
    words += [f"{key} was {then[key]} and is {now[key]}" for key in ("seed", "sequence_length") if then[key] != now[key]]
    return ", ".join(words)
