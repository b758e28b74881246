"""`zerostage calibrate` on real ranks, and the cards of this machine."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launched import ranks_of

from zerostage.mistakes import InputError
from zerostage.planning.inputs import calibrate
from zerostage.planning.inputs.here import here

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")
SCRIPT = "import sys; from zerostage.planning.inputs.calibrate import command; sys.exit(command({ranks}, 'cpu', {out!r}, {seconds}))"


def start(out, ranks=2, seconds=3.0):
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(ranks=ranks, out=str(out), seconds=seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "COLUMNS": "100"},
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("calibration") / "here.json"
    process = start(out)
    printed, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert os.listdir(out.parent) == ["here.json"]
    return json.loads(out.read_text()), printed


def test_the_file_is_complete(measured):
    found, _ = measured
    assert set(found) == set(
        "version device memory_bytes flops_reached memory_bytes_per_s dtype world ranks_per_node backend collectives spread "
        "torch when".split()
    )
    assert (found["version"], found["device"], found["world"], found["ranks_per_node"], found["backend"]) == (
        1,
        "cpu",
        2,
        2,
        "gloo",
    )
    assert found["torch"] == torch.__version__
    assert found["dtype"] in ("bf16", "fp32")
    assert set(found["collectives"]) == set(found["spread"]) == {"all_gather", "reduce_scatter", "all_reduce"}


def test_rates_are_those_of_a_machine(measured):
    """Bounds that any CPU of this century keeps: they catch a wrong unit or a wrong count, not a slow day."""
    found, _ = measured
    assert 1e8 < found["flops_reached"] < 1e14
    assert 1e8 < found["memory_bytes_per_s"] < 2e12
    assert 2**28 < found["memory_bytes"] < 2**45


def test_seconds_grow_with_bytes(measured):
    found, _ = measured
    for name, points in found["collectives"].items():
        sizes, times = zip(*points)
        assert sizes[:3] == (2**16, 2**18, 2**20)
        assert all(later == 4 * earlier for earlier, later in zip(sizes, sizes[1:]))
        assert len(sizes) >= 4
        assert all(seconds > 0 for seconds in times)
        assert times[-1] > 2 * min(times), (name, times)
        assert 1e6 < sizes[-1] / times[-1] < 1e12
        for seconds, (least, most) in zip(times, found["spread"][name]):
            assert least <= seconds <= most
    # an all-reduce is both of the others, one after the other
    parts = [found["collectives"][name][-1][1] for name in ("all_gather", "reduce_scatter", "all_reduce")]
    assert parts[2] > max(parts[:2]) / 2


def test_what_is_printed_names_its_units(measured):
    found, printed = measured
    assert "2 ranks over gloo" in printed
    assert f"{found['flops_reached'] / 1e12:.3g} TFLOP/s" in printed
    assert "ms, GB/s" in printed and "MiB" in printed and "written to" in printed


def test_one_rank_has_nobody_to_talk_to():
    from zerostage.collectives import World
    from zerostage.partition import Partition

    world = World(None, None, torch.device("cpu"), lambda n: Partition.from_stage(3, n))
    points, spread = calibrate._messages(world, 1.0)
    assert points == spread == {"all_gather": [], "reduce_scatter": [], "all_reduce": []}


def test_a_killed_rank_ends_it_with_an_error(tmp_path):
    process = start(tmp_path / "never.json", seconds=300.0)
    try:
        end = time.monotonic() + 60
        while not talking(ranks := ranks_of(process.pid)) and process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "rank 1 was ended by SIGKILL" in errors
    assert os.listdir(tmp_path) == []


def talking(ranks):
    """Whether two ranks have threads that listen for one another."""
    threads = [
        [Path(f"/proc/{rank}/task/{task}/comm").read_text() for task in os.listdir(f"/proc/{rank}/task")]
        for rank in ranks.values()
    ]
    return len(ranks) == 2 and all(any("gloo" in name for name in own) for own in threads)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((2, "tpu", "x.json", 3), "it must be cpu or cuda"),
        ((0, "cpu", "x.json", 3), "--ranks is 0"),
        ((2, "cpu", "x.json", 0), "--seconds is 0"),
        ((2, "cpu", "nowhere/x.json", 3), "there is no folder"),
        ((2, "cpu", ".", 3), "that is a folder"),
    ],
)
def test_mistakes_are_told_before_any_rank_starts(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=words) as told:
        calibrate.calibrate(*arguments)
    assert "\n" not in str(told.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_without_a_card_cuda_cannot_be_measured(tmp_path):
    with pytest.raises(InputError, match="torch sees no card here; use --device cpu"):
        calibrate.calibrate(1, "cuda", tmp_path / "x.json")


def has_driver():
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True


@pytest.mark.skipif(has_driver(), reason="there is an NVIDIA driver here")
def test_here_without_a_driver():
    with pytest.raises(InputError) as told:
        here()
    assert str(told.value) == (
        "no NVIDIA driver here (NVML Shared Library Not Found): give --gpu h100, or another card, and --gpus-per-node"
    )


@pytest.mark.skipif(not has_driver(), reason="there is no NVIDIA driver here")
def test_here_with_a_driver():
    found = here()
    assert found["gpus_per_node"] >= 1
    assert found["name"]
    assert 2**30 < found["memory_bytes"] < 2**40
    assert found["link_bytes_per_s"] is None or 1e9 < found["link_bytes_per_s"] < 1e13


def test_the_planner_reads_the_file(measured, tmp_path):
    from zerostage.planning.timing.hardware import Machine

    found, _ = measured
    (tmp_path / "c.json").write_text(json.dumps(found))
    machine = Machine.from_calibration(tmp_path / "c.json")
    assert machine.ranks == 2
    assert machine.card.flops_reached == found["flops_reached"]
    size, seconds = found["collectives"]["all_gather"][2]
    assert machine.measured.seconds("all_gather", size, 2) == seconds
