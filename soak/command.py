"""Kill `zerostage train` at random moments and start it again: the trained model is that of the undisturbed run."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from soak.job import lives
from soak.kills import WITHIN

RANKS = 2


@dataclass
class Outcome:
    """What a soak of the command found."""

    kills: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    longest_s: float = 0.0
    faults: list[str] = field(default_factory=list)


def soak(kills: int, seed: int, scratch: Path, tell: Callable[[str], None] = lambda text: None) -> Outcome:
    """Kill `kills` times; a run that is done is followed by another."""
    outcome = Outcome()
    if not kills:
        return outcome
    _prepare(scratch)
    whole = scratch / "whole-model"
    _finish(_start(scratch, "whole", whole, 3), outcome)
    number = 0
    while sum(outcome.kills.values()) < kills and not outcome.faults:
        chance, saved = random.Random(f"{seed}/command {number}"), scratch / f"model-{number}"
        for attempt in range(20):
            process = _start(scratch, f"command-{number}", saved, chance.randrange(4))
            if attempt < 4 and sum(outcome.kills.values()) < kills:
                _kill(process, chance, outcome)
            if _finish(process, outcome) == 0:
                break
        if (whole / "model.safetensors").read_bytes() != (saved / "model.safetensors").read_bytes():
            outcome.faults.append(f"seed {seed}, command run {number}: the trained model differs from the undisturbed run's")
        number += 1
        tell(f"command run {number}: {sum(outcome.kills.values())} kills")
    return outcome


def _prepare(scratch: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<unk>", "<end>", *(f"word{number}" for number in range(50))]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>").save_pretrained(scratch / "model")
    shape = dict(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        attention_dropout=0.1, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(scratch / "model")
    text = "\n".join(" ".join(words[2 + (start + step) % 50] for step in range(40)) for start in range(60))
    (scratch / "text.txt").write_text(text, encoding="utf-8")


def _start(scratch: Path, name: str, saved: Path, stage: int) -> subprocess.Popen:
    arguments = dict(
        model=scratch / "model", data=scratch / "text.txt", ranks=RANKS, stage=stage, steps=40, sequence_length=16, micro_batch=2,
        learning_rate=1e-2, device="cpu", checkpoints=scratch / name, checkpoint_every=1, metrics=scratch / f"{name}.jsonl", save=saved,
    )  # fmt: skip
    flags = [part for key, value in arguments.items() for part in ("--" + key.replace("_", "-"), str(value))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    log = open(scratch / f"{name}.log", "a")
    return subprocess.Popen([sys.executable, "-m", "zerostage.cli", "train", *flags], stdout=log, stderr=log, env=environment)


def _finish(process: subprocess.Popen, outcome: Outcome) -> int:
    outcome.starts += 1
    return process.wait(timeout=300)


def _kill(process: subprocess.Popen, chance: random.Random, outcome: Outcome) -> None:
    """Kill the launcher or a rank, some time after the ranks are there, and wait until all have ended."""
    while process.poll() is None and len(_ranks_of(process.pid)) < RANKS:
        time.sleep(0.05)
    time.sleep(chance.uniform(0, 9))  # importing transformers takes most of it
    ranks, kind = _ranks_of(process.pid), chance.choice(("a rank", "the launcher"))
    if process.poll() is not None or not ranks:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid if kind == "the launcher" else chance.choice(ranks), signal.SIGKILL)
    began = time.monotonic()
    while any(lives(rank) for rank in ranks) and time.monotonic() < began + WITHIN:
        time.sleep(0.02)
    outcome.kills[kind] += 1
    outcome.longest_s = max(outcome.longest_s, time.monotonic() - began)
    if any(lives(rank) for rank in ranks):
        outcome.faults.append(f"ranks had not ended {WITHIN:.0f} s after {kind} was killed")


def _ranks_of(launcher: int) -> list[int]:
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"\0ZEROSTAGE_PARENT={launcher}\0".encode() in b"\0" + Path("/proc", process, "environ").read_bytes():
                found.append(int(process))
        except OSError:
            continue
    return found
