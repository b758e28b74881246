"""python -m bench.device_check: what can be learned on one NVIDIA card in a few minutes.

Four sections, each in processes of its own: the GPU tests; step time and memory on one rank
beside FSDP2 and plain bf16 training; and the memory of one rank of 64 that train a 70B model,
under zerostage and under FSDP2. The last two use torch's fake process group, which has this
process stand for rank 0 and moves no values between ranks: weights and gradients are wrong,
the shapes, the allocations and the arithmetic on the card are those of a real run.

--tiny runs the same steps in small on the CPU. A section that fails is recorded as such and
the others go on; the exit status tells whether all ran.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bench.device_work import fake_world, one_card

ROOT = Path(__file__).resolve().parent.parent
#: Sections in order, and the part of the time budget that each may take at most.
SECTIONS = {"gpu_tests": 0.3, "one_card": 0.4, "fake_world_zerostage": 0.4, "fake_world_fsdp2": 0.3}


def gpu_tests(tiny: bool, seconds: float) -> dict[str, Any]:
    done = run(["pytest", "tests/test_cuda.py", "-q", "-p", "no:cacheprovider"], seconds)
    counts = {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout[-500:])}
    result: dict[str, Any] = {"counts": counts, "output": done.stdout[-3000:] + done.stderr[-1000:]}
    if done.returncode or not (tiny or counts.get("passed")):
        result["error"] = f"pytest ended with code {done.returncode}: {counts}"
    return result


def run(module: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *module], cwd=ROOT, capture_output=True, text=True, timeout=seconds)


def part(name: str, tiny: bool, seconds: float) -> dict[str, Any]:
    """One section in a process of its own: its memory starts empty and its failure is its own."""
    if name == "gpu_tests":
        return gpu_tests(tiny, seconds)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "part.json")
        options = ["--part", name, "--out", str(out), "--minutes", str(seconds / 60)] + ["--tiny"] * tiny
        done = run(["bench.device_check", *options], seconds)
        if done.returncode or not out.exists():
            lines = done.stderr.strip().splitlines() or ["no word"]
            return {"error": f"ended with code {done.returncode}: {lines[-1]}", "output": "\n".join(lines[-30:])}
        return json.loads(out.read_text())


def show(name: str, result: dict[str, Any]) -> None:
    """One section in print; GB are 1e9 bytes."""
    print(f"{name} ({result['took']:.0f} s)" + (f": FAILED: {result['error']}" if "error" in result else ""))
    if "counts" in result:
        print("  " + ", ".join(f"{number} {what}" for what, number in result["counts"].items()))
    for engine, row in result.get("summary", {}).items():
        low, high = (1000 * value for value in row["range"])
        speed = f", {row['flops'] / 1e12:.3g} TFLOP/s" + (f", MFU {row['mfu']:.1%}" if row["mfu"] else "")
        print(f"  {engine:<10}{1000 * row['median']:8.1f} ms ({low:.1f} to {high:.1f}), {gb(row['peak'])} at most{speed}")
    for pair, row in result.get("ratios", {}).items():
        print(f"  {pair}: {row['median']:.3f} ({row['range'][0]:.3f} to {row['range'][1]:.3f})")
    if "terms" in result:
        print(f"  {result['parameters']:,} parameters, {result['ranks']} ranks; plan {gb(result['plan'])} at rest")
        account = ", ".join(f"{kind} {gb(sum(terms.values()))}" for kind, terms in result["terms"].items() if kind != "peak")
        print(f"  at rest {gb(result['at_rest'])} by the allocator; by term: {account}")
        bound = result["terms"].get("peak", {}).get("bound")
        print(f"  at most {gb(result['peak'])} in a step of {result['seconds']:.2f} s without communication", end="")
        print(f"; bound without activations {gb(bound)}" if bound else "")


def gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.device_check", description=__doc__.split("\n\n")[0])
    parser.add_argument("--tiny", action="store_true", help="the same steps in small, on the CPU")
    parser.add_argument("--minutes", type=float, default=8, help="time budget; sections beyond it are not run (default: 8)")
    parser.add_argument("--out", type=Path, default=Path("runs/device/device_check.json"), help="JSON file")
    parser.add_argument("--part", choices=[name for name in SECTIONS if name != "gpu_tests"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        sys.exit("bench.device_check needs an NVIDIA card and torch sees none here; --tiny runs the same steps on the CPU")
    if options.part:
        engine = options.part.removeprefix("fake_world_")
        # rounds end early enough for imports before them and for one that takes longer than the others
        found = one_card(options.tiny, 45 * options.minutes) if engine == "one_card" else fake_world(engine, options.tiny)
        options.out.write_text(json.dumps(found))
        sys.stderr.flush()
        os._exit(0)  # no destructor of a process group may hold up the next section
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "transformers": version("transformers")}
    result: dict[str, Any] = {"versions": versions, "tiny": options.tiny, "sections": {}}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    for name, share in SECTIONS.items():
        began = time.monotonic()
        seconds = min(end - began, 60 * options.minutes * share)
        found = {"error": "not run: out of time"}
        if end > began:
            try:
                found = part(name, options.tiny, seconds)
            except subprocess.TimeoutExpired:
                found = {"error": f"stopped after {seconds:.0f} s: its part of the time budget"}
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"}
        result["sections"][name] = found | {"took": time.monotonic() - began}
        show(name, result["sections"][name])
        options.out.write_text(json.dumps(result, indent=1))
    print(f"wrote {options.out}")
    sys.exit(any("error" in found for found in result["sections"].values()))


if __name__ == "__main__":
    main()
