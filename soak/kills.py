"""Kill runs at random moments and start them again: nothing is lost, and the end is that of the undisturbed run."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import zerostage
from soak import job
from soak.job import Settings
from zerostage.checkpoint import folder, stored

#: The last two are exactly between two steps of a save or load on the files.
KINDS = ("a rank", "the launcher", "all ranks", "during a save", "during a load", "within a save", "within a load")
#: Seconds within which all ranks must have ended after one was killed.
WITHIN = 30.0


@dataclass
class Outcome:
    """What a soak of kills found."""

    kills: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)  # of kills within a save or load: before what
    runs: int = 0
    starts: int = 0
    longest_s: float = 0.0
    faults: list[str] = field(default_factory=list)


def soak(kills: int, seed: int, scratch: Path, tell: Callable[[str], None] = lambda text: None, first: int = 0) -> Outcome:
    """Kill `kills` times, in as many runs as that takes; each run goes on until it is done."""
    outcome, ends = Outcome(), {}
    while sum(outcome.kills.values()) < kills:
        number = first + outcome.runs
        chance = random.Random(f"{seed}/{number}")
        ranks = chance.choice((1, 2, 2, 3, 4))
        settings = Settings(
            scratch / f"run-{number}", ranks, _stage(chance, ranks), accumulation=chance.choice((1, 2)), every=chance.choice((1, 1, 2, 3)),
            keep_last=chance.choice((1, 2, 3)), asynchronous=chance.random() < 0.3,
        )  # fmt: skip
        kind = ranks, settings.accumulation
        if kind not in ends:
            ends[kind] = _undisturbed(replace(settings, folder=scratch / f"whole-{ranks}-{settings.accumulation}", asynchronous=False))
        faults = _run(settings, chance, outcome, ends[kind], kills)
        for fault in faults:
            tell(f"{fault}\n")
        outcome.faults += [f"seed {seed}, run {number} ({settings.ranks} ranks): {fault}" for fault in faults]
        outcome.runs += 1
        if not faults:
            shutil.rmtree(settings.folder, ignore_errors=True)
            shutil.rmtree(settings.notes, ignore_errors=True)
        tell(f"run {outcome.runs}: {sum(outcome.kills.values())} kills, {len(outcome.faults)} faults")
    return outcome


def _stage(chance: random.Random, ranks: int) -> int:
    """A stage at random, or 4 for a hybrid; all give the same bits."""
    return chance.choice((0, 1, 2, 3, 3, 4) if ranks == 4 else (0, 1, 2, 3))


def _undisturbed(settings: Settings) -> str:
    launcher = job.start(settings)
    code = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
    if code:
        raise RuntimeError("the undisturbed run failed:\n" + _output(settings))
    return job.content(settings.folder / f"step-{job.STEPS:04d}")


def _run(settings: Settings, chance: random.Random, outcome: Outcome, end: str, most: int) -> list[str]:
    planned = chance.randint(1, 8)
    for attempt in range(40):
        settings = replace(settings, stage=_stage(chance, settings.ranks), asynchronous=chance.random() < 0.3, dies=None)
        before, kind = zerostage.latest(settings.folder), ""
        if attempt < planned and sum(outcome.kills.values()) < most:
            kind = chance.choice([kind for kind in KINDS if before or not kind.endswith("load")])
            settings = replace(settings, dies=_dies(settings, kind, chance))
        hidden = _hidden(settings)
        launcher = job.start(settings)
        outcome.starts += 1
        killed = kind and _kill(settings, launcher, kind, hidden, chance)
        began = time.monotonic()
        deadline = began + (WITHIN if killed else 120)
        while (alive := _alive(settings, launcher)) and time.monotonic() < deadline:
            time.sleep(0.005)
        code = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1]) if not alive else None
        if alive:
            for process in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            os.waitpid(launcher, 0)
            return [f"{len(alive)} processes had not ended {WITHIN:.0f} s after {killed or 'the start'}: {_output(settings)}"]
        if killed:
            outcome.kills[killed] += 1
            if settings.dies:
                outcome.moments[(settings.notes / "died").read_text().split()[0]] += 1
            outcome.longest_s = max(outcome.longest_s, time.monotonic() - began)
        if fault := _lost(settings, before):
            return [f"after {killed or 'no kill'}: {fault}"]
        if code == 0 and (settings.folder / f"step-{job.STEPS:04d}").is_dir():
            return _at_the_end(settings, end, before)
        if not killed:
            return [f"attempt {attempt} failed although nothing was killed: {_output(settings)}"]
    return ["it never came to its end"]


def _alive(settings: Settings, launcher: int) -> list[int]:
    return [process for process in (launcher, *job.ranks_of(settings).values()) if job.lives(process)]


def _hidden(settings: Settings) -> set[str]:
    """What is being written, replaced or deleted, or was when its process was killed."""
    return {path.name for path in settings.folder.iterdir() if path.name.startswith(".")} if settings.folder.is_dir() else set()


def _dies(settings: Settings, kind: str, chance: random.Random) -> tuple[int, str, int, int] | None:
    if not kind.startswith("within"):
        return None
    rank = chance.choice((0, chance.randrange(settings.ranks)))  # rank 0 has the most to do
    if kind == "within a load":
        return rank, "load", 0, chance.randint(1, 12)
    return rank, "save", chance.choice((0, chance.randrange(6))), chance.randint(1, 60 if rank == 0 else 3)


def _kill(settings: Settings, launcher: int, kind: str, hidden: set[str], chance: random.Random) -> str:
    """Kill as chance will have it, or wait for the rank that kills itself; '' where the run was done before."""
    notes = settings.notes
    _until(launcher, lambda: sum(1 for _ in notes.glob("ready-*")) == settings.ranks)
    if kind == "during a save":
        _until(launcher, lambda: any(".partial-" in name for name in _hidden(settings) - hidden))
        time.sleep(chance.uniform(0, 0.03))
    elif kind == "during a load":
        _until(launcher, lambda: any(notes.glob("loading-*")))
        time.sleep(chance.uniform(0, 0.1))
    elif settings.dies:
        _until(launcher, lambda: (notes / "died").exists())
        return kind if (notes / "died").exists() else ""
    else:
        time.sleep(chance.uniform(0, 0.3 * settings.ranks))
    ranks = job.ranks_of(settings)
    if not job.lives(launcher) or not ranks:
        return ""
    targets = [launcher] if kind == "the launcher" else list(ranks.values()) if kind == "all ranks" else [chance.choice(list(ranks.values()))]
    for target in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, signal.SIGKILL)
    return kind


def _until(launcher: int, there: Callable[[], bool]) -> None:
    while job.lives(launcher):
        with contextlib.suppress(OSError):
            if there():
                return
        time.sleep(0.001)


def _lost(settings: Settings, before: Path | None) -> str:
    """What is wrong with the checkpoints: all must be whole, the newest no older than the one before the start, or known to be saved."""
    for path in folder.newest_first(settings.folder):
        if problems := stored.verify(path):
            return problems[0]
    newest, known = zerostage.latest(settings.folder), settings.notes / "known"
    least = max(before.name.lstrip(".") if before else "", known.read_text() if known.exists() else "")
    if least and (newest is None or newest.name.lstrip(".") < least):
        return f"the newest checkpoint is {newest and newest.name}, but {least} had been saved"
    return ""


def _at_the_end(settings: Settings, end: str, before: Path | None) -> list[str]:
    found = job.content(settings.folder / f"step-{job.STEPS:04d}")
    faults = [] if found == end else ["weights or optimizer state differ from the undisturbed run's"]
    if before is None or before.name != f"step-{job.STEPS:04d}":  # else there was nothing left to save, and no occasion to clean
        faults += [f"{name} was left behind" for name in _hidden(settings)]
        there = sum(1 for _ in settings.folder.glob("step-*"))
        if there > settings.keep_last:
            faults.append(f"{there} checkpoints are there, keep_last is {settings.keep_last}")
    return faults


def _output(settings: Settings) -> str:
    return "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted(settings.notes.glob("output-*")))
