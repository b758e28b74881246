"""The check for one card, run in small on the CPU: every section, the bytes, and what happens where one cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("zerostage", "fsdp2", "plain")


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.device_check", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def sections(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("device") / "found" / "check.json"
    done = check("--tiny", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["tiny"] and all(name in done.stdout for name in found["sections"])
    return found["sections"]


def test_every_section_runs(sections: dict) -> None:
    assert list(sections) == ["gpu_tests", "one_card", "fake_world_zerostage", "fake_world_fsdp2"]
    assert not any("error" in found for found in sections.values())
    assert sections["gpu_tests"]["counts"] == {"skipped": 1}
    one = sections["one_card"]
    for name in ENGINES:
        for figures in one["engines"][name]:
            assert min(figures["seconds"]) > 0 and figures["peak"] > figures["at_rest"] > 0
            assert figures["losses"][1] < figures["losses"][0]
        assert one["summary"][name]["median"] > 0
    assert set(one["ratios"]) == {"zerostage / fsdp2", "zerostage / plain"}


def test_bytes_of_one_rank_of_many_are_those_of_the_formula(sections: dict) -> None:
    ours, theirs = sections["fake_world_zerostage"], sections["fake_world_fsdp2"]
    account = ours["terms"]
    assert account["measured"].items() >= account["expected"].items()
    expected = sum(account["expected"].values())
    share = 16 * ours["parameters"] // ours["ranks"]
    assert ours["plan"] == theirs["plan"] == share
    shape = ours["shape"]
    # every parameter here is a multiple of 64 elements, so only a unit's end is padded, by less than 64 for each rank
    padding = 16 * 64 * (shape["num_hidden_layers"] + 3)
    assert share <= expected <= share + padding + account["expected"]["buffers"]
    # the allocator has the batch besides, and a step count for each parameter
    besides = 8 * shape["max_position_embeddings"] + 4 * (9 * shape["num_hidden_layers"] + 3) + 1024
    assert expected <= ours["at_rest"] <= expected + besides
    assert share <= sum(theirs["terms"]["measured"].values()) <= theirs["at_rest"] <= share * 1.01


def test_peak_is_within_the_bound(sections: dict) -> None:
    ours = sections["fake_world_zerostage"]
    account = ours["terms"]["peak"]
    assert account["engine"] <= account["bound"]
    # the same model and batch with nothing recomputed: activations and gradients
    plain = sections["one_card"]["engines"]["plain"][0]
    assert ours["at_rest"] < ours["peak"] <= account["bound"] + plain["peak"] - plain["at_rest"]
    assert ours["build_peak"] < 4 * ours["parameters"]  # never the whole model in fp32


def test_out_of_time_is_recorded(tmp_path: Path) -> None:
    done = check("--tiny", "--minutes", "0", "--out", str(tmp_path / "check.json"))
    found = json.loads((tmp_path / "check.json").read_text())["sections"]
    assert done.returncode == 1
    assert [section["error"] for section in found.values()] == ["not run: out of time"] * 4


def test_a_failing_section_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from bench import device_check

    def part(name: str, tiny: bool, seconds: float) -> dict:
        if name == "one_card":
            raise ValueError("boom")
        if name == "gpu_tests":
            raise subprocess.TimeoutExpired("pytest", seconds)
        return {}

    monkeypatch.setattr(device_check, "part", part)
    threads = torch.get_num_threads()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", ["device_check", "--tiny", "--out", str(tmp_path / "check.json")])
    with pytest.raises(SystemExit) as ended:
        device_check.main()
    torch.set_num_threads(threads)
    found = json.loads((tmp_path / "check.json").read_text())["sections"]
    assert ended.value.code == 1
    assert found["one_card"]["error"] == "ValueError: boom" and "time budget" in found["gpu_tests"]["error"]
    assert "error" not in found["fake_world_zerostage"] and "error" not in found["fake_world_fsdp2"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_card_one_line_says_so() -> None:
    done = check()
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1 and "needs an NVIDIA card" in done.stderr
