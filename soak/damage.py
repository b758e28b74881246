"""Damage checkpoints in every way: the file is named, the checkpoint is not loaded, the one before it is."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

import zerostage
from soak import job
from soak.job import Settings
from zerostage.checkpoint import stored

KINDS = ("truncate", "flip a bit", "delete", "swap two shards", "an older file")


@dataclass
class Outcome:
    """What a soak of damage found."""

    done: Counter[str] = field(default_factory=Counter)
    named: int = 0
    refused: int = 0
    older_taken: int = 0
    faults: list[str] = field(default_factory=list)


def soak(count: int, seed: int, scratch: Path) -> Outcome:
    """Damage `count` copies of checkpoints of several numbers of ranks and stages."""
    outcome, made = Outcome(), []
    if not count:
        return outcome
    for ranks, stage in ((2, 3), (3, 1), (4, 4), (2, 0)):
        settings = Settings(scratch / f"damage-{ranks}-{stage}", ranks, stage, every=job.STEPS // 2, keep_last=2)
        if os.waitstatus_to_exitcode(os.waitpid(job.start(settings), 0)[1]):
            raise RuntimeError("the run whose checkpoints were to be damaged failed")
        made.append(settings.folder)
    logging.getLogger("zerostage").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    model = job.Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    zerostage.shard(model, optimizer, stage=0, precision=zerostage.Precision())
    for number in range(count):
        chance, copy = random.Random(f"{seed}/{number}"), scratch / "copy"
        kind = KINDS[number % len(KINDS)]
        shutil.copytree(chance.choice(made), copy)
        older, newer = sorted(copy.iterdir())
        names = damage(newer, older, kind, chance)
        faults = []
        found = stored.verify(newer)
        if found and any(name in found[0] for name in names):
            outcome.named += 1
        else:
            faults.append(f"{sorted(names)[0]} is not named: {found}")
        try:
            zerostage.load(newer, model, optimizer)
            faults.append("the damaged checkpoint was loaded")
        except zerostage.DamagedError as error:
            outcome.refused += 1
            if not any(name in str(error) for name in names):
                faults.append(f"{sorted(names)[0]} is not named by load: {error}")
        if zerostage.load(copy, model, optimizer) == {"step": job.STEPS // 2}:
            outcome.older_taken += 1
        else:
            faults.append("the older checkpoint was not taken")
        outcome.done[kind] += 1
        outcome.faults += [f"seed {seed}, corruption {number} ({kind}): {fault}" for fault in faults]
        shutil.rmtree(copy)
    zerostage.close(model)
    return outcome


def damage(newer: Path, older: Path, kind: str, chance: random.Random) -> set[str]:
    """Damage the checkpoint `newer`; returns the files of which one must be named."""
    files = sorted(file for file in newer.rglob("*") if file.is_file())
    file = chance.choice(files)
    content, names = bytearray(file.read_bytes()), {file.name}
    if kind == "truncate":
        file.write_bytes(content[: chance.randrange(len(content))])
    elif kind == "flip a bit":
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file.write_bytes(content)
    elif kind == "delete":
        file.unlink()
    elif kind == "swap two shards":
        one, other = chance.sample([file for file in files if file.suffix == ".distcp"], 2)
        held = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(held)
        names = {one.name, other.name}
    else:
        differing = [file.name for file in files if file.read_bytes() != (older / file.name).read_bytes()]
        name = chance.choice(differing)
        shutil.copy(older / name, newer / name)
        names = {name}
    # a list of checksums that is damaged accuses the file whose line it was
    return names | {file.name for file in files} if "SHA256SUMS" in names else names


