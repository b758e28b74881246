"""A small run that saves often and goes on from its newest checkpoint: what the soak kills.

Processes are forked from one that has imported torch, so a start takes tens of milliseconds. A
launcher forks the ranks and waits for them; the ranks end by themselves when it is gone.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what the first step would import, in each forked rank
import torch.distributed as dist
from torch import nn

import zerostage
import zerostage.checkpoint.loading
import zerostage.checkpoint.saving
from zerostage.checkpoint.source import Piece
from zerostage.checkpoint.stored import StoredSource

STEPS = 12
#: Steps of a save or load between which a process can be killed: Python's own events of work on files.
EVENTS = {"open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir", "shutil.rmtree"}


@dataclass(frozen=True)
class Settings:
    """One run: where, on how many ranks, how divided, how often saved."""

    folder: Path
    ranks: int
    stage: int  # 4: hybrid, groups of two
    accumulation: int = 1
    every: int = 1
    keep_last: int = 2
    asynchronous: bool = False
    #: (rank, "save" or "load", steps, events): this rank kills itself at its event number `events` on a file of a
    #: checkpoint, from the first such call on that follows `steps` steps of this process.
    dies: tuple[int, str, int, int] | None = None

    @property
    def notes(self) -> Path:
        """Where processes write down who they are and how far they are."""
        return self.folder.with_name(self.folder.name + ".notes")


class Model(nn.Module):
    """Odd sizes, a tied head, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 24)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 57), nn.GELU(), nn.Dropout(0.1), nn.Linear(57, 24)) for _ in range(3)
        )
        self.head = nn.Linear(24, 37, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).float()


def start(settings: Settings) -> int:
    """Fork a launcher, and return its process id."""
    settings.notes.mkdir(parents=True, exist_ok=True)
    for kind in ("rank-*", "ready-*", "loading-*", "died"):
        for old in settings.notes.glob(kind):
            old.unlink()
    if (process := os.fork()) == 0:
        os._exit(_launch(settings))
    return process


def _launch(settings: Settings) -> int:
    os.setpgrp()
    store, launcher = settings.notes / f"store-{os.getpid()}-{time.time_ns()}", os.getpid()
    ranks = []
    for rank in range(settings.ranks):
        if (process := os.fork()) == 0:
            _be(rank, settings, store, launcher)
        ranks.append(process)
        (settings.notes / f"rank-{rank}").write_text(str(process))
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks]
    store.unlink(missing_ok=True)
    return int(any(codes))


def _be(rank: int, settings: Settings, store: Path, launcher: int) -> None:
    """A rank's life. Does not return."""
    log = os.open(settings.notes / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(str(store), settings.ranks), rank=rank, world_size=settings.ranks)
        _train(rank, settings)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


def _end_with(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(0.1)
    os._exit(1)


class Death:
    """Kills this process between two steps of a save or load, as `Settings.dies` says."""

    def __init__(self, rank: int, settings: Settings) -> None:
        self.settings, self.left = settings, 0
        if settings.dies and settings.dies[0] == rank:
            sys.addaudithook(self._see)

    def near(self, what: str, steps: int) -> None:
        """Count from now on, if this is the call that was meant."""
        dies = self.settings.dies
        if dies and self.left == 0 and what == dies[1] and steps >= dies[2]:
            self.left = dies[3]

    def _see(self, event: str, arguments: Any) -> None:
        # what rmtree removes goes by a descriptor and a bare name
        if self.left and event in EVENTS and (str(self.settings.folder) in str(arguments[:2]) or event in ("os.remove", "os.rmdir")):
            self.left -= 1
            if self.left == 0:
                (self.settings.notes / "died").write_text(f"{event} {arguments[0]}")
                os.kill(os.getpid(), signal.SIGKILL)


def _train(rank: int, settings: Settings) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    partition = zerostage.Partition.hybrid(2) if settings.stage == 4 else None
    zerostage.shard(model, optimizer, min(settings.stage, 3), partition=partition, precision=zerostage.Precision())
    torch.manual_seed(rank)
    first = step = 0
    death = Death(rank, settings)
    there = any(settings.folder.glob("step-*"))
    # whoever is killed before has the others wait in torch's own making of groups, from which a launcher must free them
    dist.barrier()
    (settings.notes / f"ready-{rank}").touch()
    if there:
        (settings.notes / f"loading-{rank}").touch()
        death.near("load", 0)
        first = step = zerostage.load(settings.folder, model, optimizer)["step"]
    waiting = None
    while step < STEPS:
        for micro in range(settings.accumulation):
            generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
            tokens = torch.randint(37, (2, 9), generator=generator)
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            (loss / settings.accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % settings.every == 0 or step == STEPS:
            path = settings.folder / f"step-{step:04d}"
            death.near("save", step - first)
            saving = zerostage.save(
                path, model, optimizer, {"step": step}, keep_last=settings.keep_last,
                asynchronous=settings.asynchronous and step < STEPS,
            )  # fmt: skip
            # an asynchronous save is known to be there once the next one has begun
            _known(rank, settings, waiting if settings.asynchronous and step < STEPS else saving)
            waiting = saving
    zerostage.close(model)


def _known(rank: int, settings: Settings, saving: zerostage.checkpoint.saving.Saving | None) -> None:
    if rank == 0 and saving is not None:
        partial = settings.notes / "known.partial"
        partial.write_text(saving.path.name)
        partial.rename(settings.notes / "known")


def ranks_of(settings: Settings) -> dict[int, int]:
    """The process ids of the ranks that have been started, by rank."""
    found = {}
    for path in settings.notes.glob("rank-*"):
        text = path.read_text()
        if text:
            found[int(path.name[5:])] = int(text)
    return found


def lives(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def content(path: Path) -> str:
    """A digest of all that a checkpoint has of its parameters, whatever the partition that it was saved at."""
    source, total = StoredSource(path), hashlib.sha256()
    for name in source.names:
        stored = source.parameters[name]
        for term, dtype in sorted(stored.terms.items()):
            numel = torch.Size(stored.shape).numel()
            out = torch.empty(numel, dtype=dtype)
            source.read(term, [Piece(name, 0, numel, out)])
            total.update(f"{name} {term}".encode() + out.view(torch.uint8).numpy().tobytes())
        total.update(repr(sorted((key, float(value)) for key, value in stored.scalars.items())).encode())
    return total.hexdigest()
