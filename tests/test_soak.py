"""A short form of `python -m soak`: real kills and real damage, with a fixed seed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_short_soak(tmp_path: Path) -> None:
    # in a process of its own: it forks, and this one may have threads
    flags = ["--kills", "6", "--corruptions", "10", "--command-kills", "0", "--out", str(tmp_path / "soak.json")]
    done = subprocess.run([sys.executable, "-m", "soak", *flags], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "soak.json").read_text())
    assert sum(found["kills"]["kills"].values()) == 6 and not found["kills"]["faults"]
    corruptions = found["corruptions"]
    assert corruptions["named"] == corruptions["refused"] == corruptions["older_taken"] == sum(corruptions["done"].values()) == 10
