"""`python -m soak`: prints what was killed and damaged, and what came of it; exit code 1 if anything was lost."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from soak import command, damage, kills


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m soak")
    parser.add_argument("--kills", type=int, default=200, help="of a small run in plain torch")
    parser.add_argument("--command-kills", type=int, default=10, help="of zerostage train")
    parser.add_argument("--corruptions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first small run, to repeat it")
    parser.add_argument("--out", default="runs/soak.json")
    given = parser.parse_args()
    results, faults = {}, []
    with tempfile.TemporaryDirectory() as scratch:
        for name, part in (
            ("kills", lambda: kills.soak(given.kills, given.seed, Path(scratch), _tell, given.first)),
            ("kills of the command", lambda: command.soak(given.command_kills, given.seed, Path(scratch), _tell)),
            ("corruptions", lambda: damage.soak(given.corruptions, given.seed, Path(scratch))),
        ):
            began = time.monotonic()
            outcome = part()
            results[name] = {**vars(outcome), "seconds": round(time.monotonic() - began)}
            faults += outcome.faults
            _show(name, results[name])
            Path(given.out).parent.mkdir(parents=True, exist_ok=True)
            Path(given.out).write_text(json.dumps({"seed": given.seed, "cores": os.cpu_count(), **results}, indent=1))
    print(*faults or ["nothing was lost, every end was the undisturbed run's, every damage was named"], sep="\n")
    return int(bool(faults))


def _show(name: str, found: dict[str, Any]) -> None:
    print(f"\n{name}")
    for key, value in found.items():
        if isinstance(value, dict):
            print(f"  {key}: {sum(value.values())}", *(f"    {what:<20} {count:>5}" for what, count in sorted(value.items())), sep="\n")
        else:
            print(f"  {key}: {len(value) if key == 'faults' else round(value, 1)}")
    sys.stdout.flush()


def _tell(text: str) -> None:
    print(f"\r{text}", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
