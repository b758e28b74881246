"""The command without a run: help, plan, and one line for each mistake."""

import json
import os
import subprocess
import sys

import pytest


def zerostage(*arguments, **more):
    return subprocess.run(
        [sys.executable, "-m", "zerostage.cli", *arguments], capture_output=True, text=True, timeout=60, **more
    )


def refused(*arguments, **more):
    done = zerostage(*arguments, **more)
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("zerostage: ")
    return done.stderr


def test_help_and_plan_do_not_import_torch():
    code = (
        "import sys; sys.argv = ['zerostage', *sys.argv[1:]]\nfrom zerostage import cli\n"
        "try: cli.main()\nfinally: print([m for m in ('torch', 'transformers', 'pyarrow') if m in sys.modules])"
    )
    for arguments in (["--help"], ["train", "--help"], ["plan", "--params", "7B"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout.rstrip().endswith("[]"), done.stdout


def test_help_lists_what_there_is():
    assert all(word in zerostage("--help").stdout for word in ("plan", "train"))
    shown = zerostage("train", "--help").stdout
    assert all(word in shown for word in ("--model", "--micro-batch", "--no-activation-checkpointing", "--config"))


def test_plan_prints_the_table_of_a_70b():
    shown = zerostage("plan", "--params", "70.6e9", "--ranks", "8,16,32,64").stdout
    cells = [[word for word in line.replace("│", " ").split()] for line in shown.splitlines()]
    assert ["8", "1,130", "388", "265", "141"] in cells
    assert ["16", "1,130", "335", "203", "70.6"] in cells
    assert ["32", "1,130", "309", "172", "35.3"] in cells
    assert ["64", "1,130", "296", "157", "17.7"] in cells
    assert "GB = 1e9 bytes" in shown


def test_plan_as_json_has_whole_bytes():
    plan = json.loads(zerostage("plan", "--params", "7B", "--ranks", "8", "--json").stdout)
    rows = {row["stage"]: row for row in plan["rows"]}
    assert plan["version"] == 1 and plan["model"]["parameters"] == 7_000_000_000
    assert rows[1]["peak_allocated"] == 38_500_000_000 == sum(rows[1]["bytes"].values())
    assert [rows[stage]["sent_bytes_per_step"] for stage in range(4)] == [24_500_000_000] * 3 + [36_750_000_000]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["plan", "--params", "seven"], ["--params is 'seven'", "70.6e9"]),
        (["plan", "--params", "7B", "--ranks", "8,0"], ["--ranks is '8,0'", "1 or more"]),
        (["plan"], ["--params"]),
        (["trian"], ["there is no command trian", "did you mean train?"]),
        (["train", "--micro-bach", "2"], ["there is no flag --micro-bach", "did you mean --micro-batch?"]),
        (["train", "--model", "m", "--data", "d", "--stage", "5"], ["stage is '5' (the flag --stage)", "2 or 3"]),
        (["train", "--model", "m", "--data", "d", "--steps", "x"], ["steps is 'x' (the flag --steps)", "whole"]),
        (["train", "--steps"], ["--steps"]),
        (["train", "--data", "d"], ["model is missing"]),
        (
            ["train", "--model", "m", "--data", "d", "e", "--ranks", "3", "--global-batch", "4"],
            ["global_batch 4 (the flag --global-batch)", "ranks 3 (the flag --ranks)"],
        ),
        (["train", "--model", "m", "--data", "none.txt", "--ranks", "1"], ["none.txt does not exist"]),
        (["train", "--model", "./m", "--data", sys.executable, "--ranks", "1"], ["./m is not a folder"]),
    ],
)
def test_a_mistake_is_one_line(arguments, expected):
    message = refused(*arguments)
    for part in expected:
        assert part in message


def test_Q4_a_half_set_environment_names_what_is_missing():
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    message = refused("train", "--model", "m", "--data", "d", env=environ)
    assert "has RANK, WORLD_SIZE but lacks LOCAL_RANK, MASTER_ADDR, MASTER_PORT" in message
    environ = {**os.environ, "SLURM_PROCID": "0"}
    message = refused("train", "--model", "m", "--data", "d", env=environ)
    assert "lacks SLURM_NTASKS, SLURM_LOCALID" in message


def test_Q4_slurm_gives_each_rank_its_place():
    from zerostage.mistakes import InputError
    from zerostage.train import launch

    bare = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    with pytest.raises(InputError, match="has SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID but lacks MASTER_ADDR, MASTER_PORT"):
        launch.place(dict(bare))
    environ = {**bare, "MASTER_ADDR": "here", "MASTER_PORT": "1234"}
    assert launch.place(environ)
    assert [environ[name] for name in launch.TORCHRUN] == ["3", "8", "1", "here", "1234"]
    # torchrun under srun: what torchrun says holds, and rank 0 may be on another host than MASTER_ADDR
    environ = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "5", "MASTER_ADDR": "there", "MASTER_PORT": "1234"}
    under = {**environ, **bare, "SLURM_JOB_ID": "77", "SLURM_NODELIST": "gpu[07-08]"}
    assert launch.place(under) and {name: under[name] for name in launch.TORCHRUN} == environ
    environ = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    environ |= {"SLURM_JOB_ID": "77", "SLURM_NODELIST": "gpu[07-08]"}
    assert launch.place(environ)
    assert [environ[name] for name in launch.TORCHRUN[:4]] == ["3", "8", "1", "gpu07"]
    assert 1024 < int(environ["MASTER_PORT"]) < 32768
    assert not launch.place({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"})
    lists = {"a1,a2": "a1", "gpu[03-05,09]": "gpu03", "n[1,3]-ib,m2": "n1-ib", "host": "host"}
    assert {nodes: launch.first_node(nodes) for nodes in lists} == lists


def test_Q2_ranks_on_windows_do_without_libuv():
    from zerostage.train import launch

    assert launch.additions({}, "cuda", "win32") == {"USE_LIBUV": "0"}
    assert launch.additions({}, "cpu", "win32") == {"OMP_NUM_THREADS": "1", "USE_LIBUV": "0"}
    assert launch.additions({"OMP_NUM_THREADS": "4", "USE_LIBUV": "1"}, "cpu", "win32") == {}  # what is set holds
    assert launch.additions({}, "cuda", "linux") == {} and launch.additions({}, "cpu", "darwin") == {"OMP_NUM_THREADS": "1"}
