"""Runs that survive: killed, stopped, failed, and gone on from their newest checkpoint to the same bits.

Most of it runs in the rank processes of `ranks`, which call the trainer for real; a hook that a
user could have kills, stops or fails a rank at a certain step or at a certain file of a save.
"""

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
import torch
from models import tiny_llama
from test_train import corpus, folder, run, wait_until  # noqa: F401  (two of them are fixtures)
from torch.optim.optimizer import register_optimizer_step_post_hook

import zerostage
from zerostage.engine import require
from zerostage.train import ending, launch, loop, readback
from zerostage.train.config import derive_batch, load
from zerostage.train.progress import name

STEPS = 8
#: What the audit hook does at the next file of this kind; it stays in a process for good.
_at_file: list = []


# -- What ranks do ---------------------------------------------------------------------------------


def act(kind):
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    if kind == "fail":
        raise ValueError("boom")
    if kind == "launcher":
        termination = signal.getsignal(signal.SIGTERM).__self__
        os.kill(int(os.environ["ZEROSTAGE_PARENT"]), signal.SIGTERM)
        wait_until(lambda: termination.asked)  # within the step in hand


@contextlib.contextmanager
def doing(at):
    """at: (kind, rank, where), where a step's number, or an event and a part of a path with the number of the time."""
    if at is None or str(at[1]) != os.environ["RANK"]:
        yield
        return
    kind, _, where = at
    seen = [0]

    def after_step(*_):
        seen[0] += 1
        if seen[0] == where:
            act(kind)

    def at_event(event, arguments):
        if _at_file and event == where[0] and where[1] in str(arguments[0]):
            _at_file[0] -= 1
            if _at_file[0] == 0:
                _at_file.clear()
                act(kind)

    handle = register_optimizer_step_post_hook(after_step)
    if isinstance(where, tuple):
        _at_file[:] = [where[2]]
        sys.addaudithook(at_event)
    try:
        yield
    finally:
        handle.remove()
        _at_file.clear()


def train(config, at=None):
    with doing(at):
        loop.train(config)


def trained(rank, n, flags, at=None):
    """Train as one rank. What it printed; of an error its kind, what it was in, and its text too."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        try:
            train(derive_batch(load(None, {**flags, "ranks": n})), at)
        except Exception as error:
            return printed.getvalue(), type(error).__name__, getattr(error, "during", ""), str(error)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return printed.getvalue()


def trained_on_a_small_disk(rank, n, flags):
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    return trained(rank, n, flags)


# -- What is trained -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(folder, tmp_path_factory):  # noqa: F811
    """A model with dropout."""
    path = shutil.copytree(folder, tmp_path_factory.mktemp("dropout") / "model")
    tiny_llama(tie=True, attention_dropout=0.5).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def settings(model, corpus):  # noqa: F811
    """Flags of a run in `path` with checkpoints: two passes over the data, with accumulation."""

    def flags(path, **more):
        common = {"model": str(model), "data": corpus, "sequence_length": 16, "global_batch": 8, "micro_batch": 2, "steps": STEPS}
        common |= {"learning_rate": 1e-2, "warmup_steps": 2, "eval_samples": 4, "eval_every": 3, "clip": 0.5}
        common |= {"checkpoints": str(path / "checkpoints"), "checkpoint_every": 2}
        return common | {"metrics": str(path / "m.jsonl"), "save": str(path / "trained"), **more}

    return flags


@pytest.fixture(scope="module")
def uninterrupted(settings, tmp_path_factory):
    """The folder of a run on two ranks that saves nothing but its end."""
    path = tmp_path_factory.mktemp("uninterrupted")
    ranks.run(trained, n=2, flags=settings(path, checkpoints="", checkpoint_every=0))
    return path


def lines(path):
    return [json.loads(line) for line in (path / "m.jsonl").read_text(encoding="utf-8").splitlines()]


def numbers(path):
    """What a run computed: of each step, and of each evaluation."""
    names = ("step", "loss", "grad_norm", "lr")
    steps = [(*(line[name] for name in names), "skipped" in line) for line in lines(path) if "loss" in line]
    return steps, [(line["step"], line["eval_loss"]) for line in lines(path) if "eval_loss" in line]


def weights(path):
    return (path / "trained" / "model.safetensors").read_bytes()


def check_equal(path, other):
    assert numbers(path) == numbers(other)
    assert weights(path) == weights(other)


def kept(path):
    return sorted(entry.name for entry in (path / "checkpoints").iterdir())


def refused(outcomes, *parts):
    """That all ranks ended with one line, alike, before the first step."""
    printed, kind, _, text = outcomes[0]
    assert all(outcome[1:] == outcomes[0][1:] for outcome in outcomes)
    assert kind == "InputError" and "\n" not in text and "step 1/" not in printed, outcomes
    for part in parts:
        assert part in text, text


# -- Nothing changes -------------------------------------------------------------------------------


def test_saving_changes_nothing_and_a_run_that_is_complete_says_so(settings, uninterrupted, tmp_path):
    flags = settings(tmp_path, async_save=True, test_save=True)
    printed = ranks.run(trained, n=2, flags=flags)[0]
    check_equal(tmp_path, uninterrupted)
    assert kept(tmp_path) == [name(6), name(8)]
    assert printed.index("--test-save: wrote 0.") < printed.index("held-out loss")
    saved = [line for line in lines(tmp_path) if line.get("event") == "checkpoint"]
    assert [line["step"] for line in saved] == [2, 4, 6, 8]
    for line in saved[2:]:
        files = [file for file in Path(line["path"]).rglob("*") if file.is_file()]
        assert line["bytes"] == sum(file.stat().st_size for file in files)
        assert line["seconds"] >= line["blocked_s"] > 0
    shutil.rmtree(tmp_path / "trained")
    printed = ranks.run(trained, n=2, flags=flags)[0]
    assert "all 8 steps are done already" in printed and "step 8/" not in printed and "--test-save" not in printed
    check_equal(tmp_path, uninterrupted)
    assert sum("account" in line for line in lines(tmp_path)) == 1


# -- Killed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "where, rank, before",
    [(5, 1, 4), (("open", "__1_0.distcp", 3), 1, 2), (("os.rename", ".step-00000004.partial", 1), 0, 2)],
    ids=["in a step", "before its file", "before publishing"],
)
def test_H5_a_run_that_is_killed_goes_on_to_the_same_bits(settings, uninterrupted, tmp_path, where, rank, before):
    killed = ranks.run(trained, n=2, flags=settings(tmp_path), at=("kill", rank, where), expect_failure=True)
    assert killed[rank].kind == "Died"
    assert killed[1 - rank][1] in ("PeerError", "OSError", "RuntimeError", "CheckpointException"), killed
    printed = ranks.run(trained, n=2, flags=settings(tmp_path))[0]
    assert f"resumed from step {before}: {tmp_path / 'checkpoints' / name(before)}" in printed
    check_equal(tmp_path, uninterrupted)
    assert [line["step"] for line in lines(tmp_path) if line.get("event") == "resumed"] == [before]
    assert kept(tmp_path) == [name(6), name(8)]  # and no leftovers


def test_H5_a_damaged_checkpoint_is_named_and_the_one_before_taken(settings, uninterrupted, tmp_path):
    ranks.run(trained, n=2, flags=settings(tmp_path, keep_last=0), at=("fail", 1, 7))
    shard = tmp_path / "checkpoints" / name(6) / "__1_0.distcp"
    os.truncate(shard, shard.stat().st_size - 8)
    printed = ranks.run(trained, n=2, flags=settings(tmp_path, keep_last=0))[0]
    assert "passed over" in printed and f"{shard} has " in printed and "resumed from step 4" in printed
    assert "set aside 1 checkpoint that" in printed
    check_equal(tmp_path, uninterrupted)
    for step in (2, 4, 6, 8):
        os.truncate(tmp_path / "checkpoints" / name(step) / "index.json", 5)
    refused(ranks.run(trained, n=2, flags=settings(tmp_path)), "index.json has ", "--resume no")
    printed = ranks.run(trained, n=2, flags=settings(tmp_path, resume="no", steps=2, save=""))[0]
    assert "resumed" not in printed and "set aside 4 checkpoints" in printed and name(2) in kept(tmp_path)


def test_skipped_steps_are_not_made_up_for(settings, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = dict(precision="fp32", learning_rate=1e30, clip=0, steps=6, checkpoint_every=2, warmup_steps=4)
    ranks.run(trained, n=2, flags=settings(whole, **flags))
    ranks.run(trained, n=2, flags=settings(parts, **flags), at=("fail", 0, 5))
    assert "resumed from step 4" in ranks.run(trained, n=2, flags=settings(parts, **flags))[0]
    check_equal(parts, whole)
    assert [skipped for *_, skipped in numbers(whole)[0]] == [False, True, True, True, True, True]


def test_H15_on_another_number_of_ranks_it_goes_on_where_it_was(model, settings, tmp_path):
    plain = shutil.copytree(model, tmp_path / "model")
    tiny_llama(tie=True).save_pretrained(plain)
    flags = dict(model=str(plain), precision="fp32", save="")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks.run(trained, n=2, flags=settings(whole, **flags))
    ranks.run(trained, n=2, flags=settings(parts, **flags), at=("fail", 1, 5))
    for n, at, stage, changed in ((1, ("fail", 0, 3), 3, "ranks 2 -> 1"), (4, None, 2, "stage 3 -> 2, ranks 1 -> 4")):
        more = dict(flags, stage=stage, micro_batch=8 // max(2, n))
        printed = ranks.run(trained, n=n, flags=settings(parts, **more), at=at)[0]
        printed = printed if at is None else printed[0]
        assert f" (changed: {changed})" in printed and "random states (dropout) are new ones" in printed, printed
    one, other = numbers(whole)[0], numbers(parts)[0]
    assert [step for step, *_ in other] == list(range(1, 9))
    assert [loss for _, loss, *_ in one] == pytest.approx([loss for _, loss, *_ in other], rel=1e-3)


# -- Stopped and failed ----------------------------------------------------------------------------


def test_sigterm_at_one_rank_saves_and_ends_all(settings, uninterrupted, tmp_path):
    flags = settings(tmp_path, checkpoint_every=0)
    for outcome in ranks.run(trained, n=2, flags=flags, at=("term", 1, 3)):
        _, kind, _, text = outcome
        assert kind == "Stopped" and text.startswith("stopped by SIGTERM after step 3: saved ") and "same command" in text
    assert kept(tmp_path) == [name(3)]
    assert "resumed from step 3" in ranks.run(trained, n=2, flags=flags)[0]
    check_equal(tmp_path, uninterrupted)


@pytest.mark.parametrize(
    "where, what",
    [(2, "in step 2"), (("open", "__1_0.distcp", 1), "in the checkpoint after step 2")],
    ids=["step", "save"],
)
def test_K1_a_rank_that_raises_ends_all_and_says_where(settings, tmp_path, where, what):
    began = time.monotonic()
    outcomes = ranks.run(trained, n=2, flags=settings(tmp_path), at=("fail", 1, where), expect_failure=True)
    assert time.monotonic() - began < 30
    assert all(outcome[2] == what for outcome in outcomes) or where == 2, outcomes
    _, kind, during, text = outcomes[1]
    assert during == what and "boom" in text, outcomes
    assert outcomes[0][1] in ("PeerError", "RuntimeError", kind), outcomes


# -- Refused before the first step -----------------------------------------------------------------


def test_a_checkpoint_of_another_run_is_refused_with_what_differs(settings, folder, corpus, tmp_path):  # noqa: F811
    flags = settings(tmp_path, steps=2, save="")
    ranks.run(trained, n=1, flags=flags)
    advice = "--resume no or another --checkpoints"
    other = shutil.copytree(folder, tmp_path / "other")
    tiny_llama(tie=True, layers=3).save_pretrained(other)
    for more, words in (
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"sequence_length": 8}, "sequence_length was 16 and is 8"),
        ({"data": corpus[:2]}, "the training data differs ("),
        ({"model": str(other)}, "'model.layers.2."),
        ({"model": str(folder)}, "the model's configuration differs"),
    ):
        refused(ranks.run(trained, n=1, flags={**flags, **more}), words, advice)
    refused(ranks.run(trained, n=1, flags={**flags, "resume": str(tmp_path / "none")}), "no such folder", "auto, no or")
    last = str(tmp_path / "checkpoints" / name(2))
    fresh = {**flags, "resume": last, "checkpoints": str(tmp_path / "new"), "steps": 3, "learning_rate": 2e-2}
    printed = ranks.run(trained, n=1, flags=fresh)[0]
    assert f"resumed from step 2: {last} (changed: steps 2 -> 3, learning_rate 0.01 -> 0.02)" in printed
    assert [line["lr"] for line in lines(tmp_path) if line.get("step") == 3 and "lr" in line] == [2e-2]
    assert sorted(os.listdir(tmp_path / "new")) == [name(3)]


def test_H7_H17_where_a_checkpoint_cannot_be_written_the_run_ends_before_step_1(settings, tmp_path):
    flags = settings(tmp_path, save="")
    small = ranks.run(trained_on_a_small_disk, n=2, flags={**flags, "test_save": True}, keep=False)
    refused(small, "--test-save: ", "File too large")
    assert kept(tmp_path) == []
    file = tmp_path / "file"
    file.write_text("")
    outcomes = ranks.run(trained, n=2, flags={**flags, "checkpoints": str(file / "x")})
    refused(outcomes, "cannot write checkpoints", "Not a directory", "give another")


def read_back(rank, n, path):
    """What --test-save finds right after a save, and when one bit of one term is another then, on rank 1 only."""
    model = torch.nn.Sequential(*(torch.nn.Linear(9, 9) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    zerostage.shard(model, optimizer, 3, precision=zerostage.Precision())
    for _ in range(2):
        model(torch.ones(2, 9, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    zerostage.save(path, model, optimizer)
    engine = require(model)
    found = [readback.compare(Path(path), engine)]
    flat = engine.flats[0]
    for held in (flat.shard, flat.master, engine.driver.state_of(engine.driver.segments[flat][0])["exp_avg_sq"]):
        held.view(torch.uint8)[0] ^= rank  # the lowest bit
        found.append(readback.compare(Path(path), engine))
        held.view(torch.uint8)[0] ^= rank
    return found


def test_H17_what_is_read_back_is_compared_to_the_last_bit(tmp_path):
    zero, one = ranks.run(read_back, n=2, path=str(tmp_path / "checkpoint"))
    assert zero == [[]] * 4 and one[0] == []
    for term, (problem,) in zip(("weights", "master", "exp_avg_sq"), one[1:]):
        assert f" ({term}) differs in {tmp_path / 'checkpoint'}" in problem


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may mount a small disk")
def test_H7_a_disk_with_room_for_one_checkpoint_of_three(settings, tmp_path):
    small = tmp_path / "checkpoints"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("no right to mount a small disk")
    try:
        outcomes = ranks.run(trained, n=2, flags=settings(tmp_path, save=""))
        refused(outcomes, " kB free", "need 876 kB more (3 at a time)", "--keep-last")
        ranks.run(trained, n=2, flags=settings(tmp_path, save="", checkpoint_every=0))
        assert kept(tmp_path) == [name(8)]
        (saved,) = [line["bytes"] for line in lines(tmp_path) if line.get("event") == "checkpoint"]
        tensors = sum(json.loads((small / name(8) / "manifest.json").read_text())["terms"].values())
        assert tensors == 876_288 // 3 and saved < 2 * tensors
    finally:
        subprocess.run(["umount", str(small)], check=True)


# -- As it is started ------------------------------------------------------------------------------


def main(flags, plan):
    """A user's own script around the trainer, in which something goes wrong. plan: what, by how often it was started anew."""
    if launch.place(os.environ):
        config = derive_batch(load(None, flags, os.environ))
        sys.exit(launch.run_rank(train, config, plan.get(ending.generation())))
    sys.exit(launch.start([sys.executable, *sys.argv], 2, "cpu", max_restarts=3))


def script(tmp_path, flags, plan):
    path = tmp_path / "job.py"
    text = f"import sys\nsys.path[:0] = {sys.path!r}\nimport test_train_resume\ntest_train_resume.main({flags!r}, {plan!r})\n"
    path.write_text(text)
    return str(path)


def test_K1_our_launcher_starts_ranks_anew_and_stops_them_by_sigterm(settings, uninterrupted, tmp_path):
    flags = settings(tmp_path)
    job = script(tmp_path, flags, {0: ("fail", 1, 3), 1: ("launcher", 1, 3)})
    done = run([job], expect=143)
    rest = done.stderr.splitlines()
    assert "restart 1: rank 1 failed in step 3: Traceback (most recent call last):" in rest
    assert done.stderr.count("Traceback") == 1 and "ValueError: boom" in rest
    stopped = f"stopped by SIGTERM after step 5: saved {tmp_path / 'checkpoints' / name(5)}; go on with the same command"
    assert rest[-1] == stopped and not [line for line in rest if line.startswith("restart 2")], done.stderr
    assert f"resumed from step 2: {tmp_path / 'checkpoints' / name(2)}" in done.stdout
    ranks.run(trained, n=2, flags=flags)
    check_equal(tmp_path, uninterrupted)


def test_under_torchrun_a_killed_rank_leads_to_a_resumed_run_of_the_same_bits(settings, uninterrupted, tmp_path):
    job = script(tmp_path, settings(tmp_path), {0: ("kill", 1, 5)})
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    done = run([job], python=torchrun)
    assert "rank 0 failed in step" in done.stderr and "rank 1 ended without a word" in done.stderr
    assert f"resumed from step 4: {tmp_path / 'checkpoints' / name(4)}" in done.stdout
    check_equal(tmp_path, uninterrupted)
