"""The audit of a training run and --strict: the trainer for real, also with a user's hook that keeps more than was planned."""

import contextlib
import io
import json
import os
import shutil
import socket
import sys

import pytest
import ranks
from models import tiny_llama
from test_train import command, corpus, folder, read, run, start  # noqa: F401  (two of them are fixtures)
from torch.optim.optimizer import register_optimizer_step_post_hook

import zerostage
from zerostage.train import launch, loop
from zerostage.train.config import derive_batch, load

# -- What users do: one more copy beside the moments, by the hook that torch has for all optimizers ---


def nothing(optimizer, *_):
    pass


def whole(optimizer, *_):
    """fp32 copies of the whole weights."""
    for parameter in optimizer.param_groups[0]["params"]:
        with zerostage.gathered(parameter):
            optimizer.state[parameter]["master_param"] = parameter.detach().float().clone()


def divided(optimizer, *_):
    """As many bytes as the first moment."""
    for state in optimizer.state.values():
        state.setdefault("mean", state["exp_avg"].clone())


def divided_on_rank_1(optimizer, *_):
    if os.environ["RANK"] == "1":
        divided(optimizer)


def train(config, hook):
    handle = register_optimizer_step_post_hook(globals()[hook])
    try:
        loop.train(config)
    finally:
        handle.remove()


def settings(model, data, metrics, **flags):
    common = {"model": str(model), "data": data, "ranks": 2, "steps": 3, "sequence_length": 16, "eval_samples": 4}
    return {**common, "metrics": str(metrics), "strict": True, **flags}


def trained(rank, n, flags, hook="nothing"):
    """Train as one rank; what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train(derive_batch(load(None, flags)), hook)
    return printed.getvalue()


def audits(metrics):
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line.get("event") == "audit"]


@pytest.fixture(scope="module")
def larger(folder, tmp_path_factory):  # noqa: F811
    """A model of which a copy is more than the margin: 1.1 million parameters."""
    path = shutil.copytree(folder, tmp_path_factory.mktemp("larger") / "model")
    tiny_llama(tie=True, hidden=256).save_pretrained(path)
    return path


# -- What is as configured --------------------------------------------------------------------


def check(metrics, printed, stage, n):
    """The metrics and the log of a run in which all is as configured."""
    found = audits(metrics)
    assert [line["step"] for line in found] == [1, 2] and len(read(metrics)[0]) >= 3
    for line in found:
        assert line["configured_stage"] == stage and line["stage"] == (stage if n > 1 else 0)
        terms = line["bytes_per_parameter"]
        least = {"weights": 3, "gradients": 2}  # the stage from which on a term is divided
        for term, size in {"weights": 2, "gradients": 2, "master": 4, "exp_avg": 4, "exp_avg_sq": 4}.items():
            assert terms[term] == pytest.approx(size / n if stage >= least.get(term, 1) else size, rel=0.05), term
        assert any("updates would be lost" in note for note in line["notes"])
        says = f"stage {stage}, as configured" if n > 1 else "one rank, on which all stages are the same"
        start = f"audit after step {line['step']}: {says}; {sum(terms.values()):.2f} bytes per parameter and rank: weights "
        assert printed.count(start) == 1, printed


@pytest.mark.parametrize("stage", range(4))
def test_the_audit_of_the_first_two_steps_is_in_the_log_and_the_metrics(folder, corpus, tmp_path, stage):  # noqa: F811
    flags = settings(folder, corpus, tmp_path / "m.jsonl", stage=stage)
    check(tmp_path / "m.jsonl", ranks.run(trained, n=2, flags=flags)[0], stage, 2)


def test_on_one_rank_stage_3_is_no_difference(folder, corpus, tmp_path):  # noqa: F811
    done = run(command(folder, corpus, "--stage", 3, "--strict", "--steps", 3, "--metrics", tmp_path / "m.jsonl"))
    check(tmp_path / "m.jsonl", done.stdout, 3, 1)


def test_a_skipped_step_has_no_audit_and_is_no_difference(folder, corpus, tmp_path):  # noqa: F811
    flags = settings(folder, corpus, tmp_path / "m.jsonl", precision="fp32", learning_rate=1e30)
    ranks.run(trained, n=2, flags=flags)
    assert [step.get("skipped", False) for step in read(tmp_path / "m.jsonl")[0]] == [False, True, True]
    assert [line["step"] for line in audits(tmp_path / "m.jsonl")] == [1]


def test_a_copy_within_the_margin_is_no_difference(folder, corpus, tmp_path):  # noqa: F811
    ranks.run(trained, n=2, flags=settings(folder, corpus, tmp_path / "m.jsonl"), hook="divided")
    assert len(read(tmp_path / "m.jsonl")[0]) == 3


# -- What is not ------------------------------------------------------------------------------


@pytest.mark.parametrize("stage, hook, named", [(3, "divided", (0, 1)), (1, "divided", (0, 1)), (3, "divided_on_rank_1", (1,))])
def test_strict_ends_all_ranks_where_one_holds_more_than_planned(larger, corpus, tmp_path, stage, hook, named):  # noqa: F811
    flags = settings(larger, corpus, tmp_path / "m.jsonl", stage=stage)
    one, other = ranks.run(trained, n=2, flags=flags, hook=hook, expect_failure=True)
    assert one.kind == other.kind == "StrictError" and one.message == other.message and "\n" not in one.message
    assert any(one.message.startswith(f"--strict: after step 1 rank {rank} holds ") for rank in named), one
    assert "more than 1% and 1 MB over it; most of the difference is in 'other'" in one.message
    (line,) = audits(tmp_path / "m.jsonl")
    assert line["stage"] == stage  # the stage is as configured; the bytes are not


def test_without_strict_the_same_run_goes_on_and_shows_it(larger, corpus, tmp_path):  # noqa: F811
    ranks.run(trained, n=2, flags=settings(larger, corpus, tmp_path / "m.jsonl", strict=False), hook="divided")
    found = audits(tmp_path / "m.jsonl")
    assert [line["step"] for line in found] == [1, 2] and len(read(tmp_path / "m.jsonl")[0]) == 3
    assert all(line["bytes_per_parameter"]["other"] > 1.9 for line in found)


def script(tmp_path, hook, flags):
    """A user's own script around the trainer, with the hook `hook`: starts its ranks, or joins the job that is there."""
    path = tmp_path / "job.py"
    lines = ["import sys", f"sys.path[:0] = {sys.path!r}", "import test_train_audit", f"test_train_audit.main({hook!r}, {flags!r})"]
    path.write_text("\n".join(lines))
    return path


def main(hook, flags):
    if launch.place(os.environ):
        sys.exit(launch.run_rank(train, derive_batch(load(None, flags)), hook))
    sys.exit(launch.start([sys.executable, *sys.argv], 2, "cpu"))


def test_strict_ends_a_run_whose_optimizer_keeps_whole_masters_with_exit_code_4(larger, corpus, tmp_path):  # noqa: F811
    metrics = tmp_path / "m.jsonl"
    done = run([str(script(tmp_path, "whole", settings(larger, corpus, metrics)))], expect=4)
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("--strict: after step 1 the bytes are those of no single stage (No partition explains")
    assert "but stage 3 was configured" in done.stderr
    assert "audit after step 1: no stage, but stage 3 is configured" in done.stdout
    (line,) = audits(metrics)
    assert line["stage"] is None and line["configured_stage"] == 3 and len(read(metrics)[0]) == 1


def test_under_slurm_every_rank_ends_with_4_and_one_speaks(larger, corpus, tmp_path):  # noqa: F811
    path = script(tmp_path, "divided", settings(larger, corpus, tmp_path / "m.jsonl"))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    place = dict(SLURM_NTASKS="2", SLURM_NODELIST="localhost", MASTER_PORT=port)
    tasks = [start([str(path)], SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **place) for rank in range(2)]
    ended = [task.communicate(timeout=120) for task in tasks]
    assert [task.returncode for task in tasks] == [4, 4], ended
    assert ended[0][1].startswith("--strict: ") and ended[0][1].count("\n") == 1 and ended[1][1] == ""
