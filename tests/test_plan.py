"""The planner's answer: arithmetic against figures that are written out here, decisions, forms, exit codes, mistakes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import zerostage
from zerostage.mistakes import InputError
from zerostage.partition import Partition
from zerostage.planning.memory.engines import BUFFERS
from zerostage.planning.memory.tape import Event, Tape, Tensor
from zerostage.planning.memory.track import Track
from zerostage.planning.memory.walk import walk
from zerostage.planning.model import resolve as models
from zerostage.planning.run import Run
from zerostage.planning.schema import Bytes, Plan, Recommendation, Row
from zerostage.planning.timing.habits import Traffic

GIB = 2**30


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "zerostage.cli", "plan", *arguments], capture_output=True, text=True, timeout=100)


def row(answer: Plan, stage: int, ranks: int) -> Row:
    return next(r for r in answer.rows if r.stage == stage and r.ranks == ranks)


# The arithmetic of training state


def test_R1_every_stage_with_its_formula() -> None:
    n, N = 8, 10**9
    answer = zerostage.plan(params=N, ranks=n)
    formula = {0: 16 * N, 1: 4 * N + 12 * N // n, 2: 2 * N + 14 * N // n, 3: 16 * N // n}
    assert {r.stage: sum(r.bytes.model_dump().values()) for r in answer.rows} == formula
    terms = row(answer, 2, n).bytes
    assert (terms.weights, terms.gradients, terms.master, terms.exp_avg, terms.exp_avg_sq) == (2 * N, N // 4, *3 * [N // 2])
    wide = zerostage.plan(params=N, ranks=n, gradients="fp32")  # gradients accumulated in fp32: 2N more, or 2N/n
    more = {stage: row(wide, stage, n).peak_allocated - formula[stage] for stage in range(4)}
    assert more == {0: 2 * N, 1: 2 * N, 2: 2 * N // n, 3: 2 * N // n}


@pytest.mark.parametrize(
    "settings, bytes_per_parameter",
    [
        ({}, 16),
        ({"weights": "fp16"}, 16),
        ({"weights": "fp32", "master": "none"}, 16),
        ({"master": "none"}, 8),
        ({"optimizer": "momentum"}, 12),
        ({"optimizer": "sgd"}, 8),
        ({"optimizer": "sgd", "weights": "fp32", "master": "none"}, 8),
        ({"moments": "int8"}, 10),
        ({"offload": "optimizer", "engine": "deepspeed"}, 4),
    ],
)
def test_R2_bytes_by_the_real_choice(settings: dict, bytes_per_parameter: int) -> None:
    answer = zerostage.plan(params=6.7e9, ranks=1, **settings)
    assert row(answer, 0, 1).peak_allocated == round(6.7e9 * bytes_per_parameter)


def test_R2_a_6_7b_takes_107_gb() -> None:
    assert row(zerostage.plan(params=6.7e9, ranks=1), 0, 1).peak_allocated == 107_200_000_000


def test_R3_what_is_left_out_is_said_and_units_are_not_mixed() -> None:
    answer = zerostage.plan(params=6805e6, ranks=4)
    assert any("activations" in text for text in answer.left_out) and any("CUDA context" in text for text in answer.left_out)
    # an estimate of 18 N/n + 4 L was printed as 29.01 GB: it is 29.01 GiB, 31.15 GB
    size = 18 * 6805e6 / 4 + 4 * 131e6
    assert round(size / GIB, 2) == 29.01 and round(size / 1e9, 2) == 31.15
    shown = " ".join(command("llama-3.2-1b", "--ranks", "4").stdout.split())
    assert "GB = 1e9 bytes" in shown and "GiB = 2^30 bytes" in shown
    known = zerostage.plan("llama-3.2-1b", ranks=4)
    assert all(getattr(row(known, 3, 4).bytes, term) > 0 for term in ("activations", "logits", "gathered", "reduce"))


def test_the_70b_of_the_textbook() -> None:
    answer = zerostage.plan("llama-3.1-70b", ranks=[8, 16, 32, 64])
    N = 70_553_706_496
    for n in (8, 16, 32, 64):
        for stage, size in enumerate((16 * N, 4 * N + 12 * N / n, 2 * N + 14 * N / n, 16 * N / n)):
            terms = row(answer, stage, n).bytes
            state = terms.weights + terms.gradients + terms.master + terms.exp_avg + terms.exp_avg_sq
            assert size <= state <= 1.0001 * size  # more by what pads each unit to 64 elements a rank
        sent = [row(answer, stage, n).sent_bytes_per_step * n / (n - 1) / (2 * N) for stage in range(4)]
        assert sent == pytest.approx([2, 2, 2, 3], rel=1e-4)


def test_accumulation_repeats_traffic_unless_kept_local() -> None:
    def sent(stage: int, **run) -> float:
        answer = zerostage.plan(params=8e9, ranks=8, accumulation=4, **run)
        return row(answer, stage, 8).sent_bytes_per_step * 8 / 7 / 16e9

    # four reductions and one publication of weights; at stage 0 reductions gather what they reduce
    assert [sent(stage) for stage in range(4)] == [8, 5, 5, 12]
    assert [sent(stage, keep_local=True) for stage in range(4)] == [2, 2, 2, 9]


def test_E4_the_cost_of_accumulating_whole_gradients() -> None:
    whole, slices = (sum_of("gradients", stage) for stage in (1, 3))
    assert (round(slices / 1e9, 2), round(whole / 1e9, 1)) == (3.25, 52.0)


def test_E4_gradients_kept_whole_within_no_sync() -> None:
    architecture = models.resolve("llama-3.2-1b")
    partition = Partition.from_stage(3, 8)
    often, once = (walk(architecture, Run(accumulation=2, keep_local=local), partition, 8) for local in (False, True))
    whole = 2 * architecture.parameters
    assert often.highest["gradients"] == pytest.approx(whole / 8, rel=1e-3) == once.highest["gradients"]
    assert 0.8 * whole < once.highest["reduce"] - often.highest["reduce"] / 2 < 1.5 * whole
    # accumulated gradients are added to what is kept, not kept beside it
    for engine in ("zerostage", "fsdp2", "fsdp1", "deepspeed"):
        one, three = (walk(architecture, Run(engine=engine, accumulation=n), partition, 8).highest["gradients"] for n in (1, 3))
        assert one == three, engine


def sum_of(term: str, stage: int) -> int:
    return getattr(row(zerostage.plan(params=26e9, ranks=16), stage, 16).bytes, term)


def test_B2_frozen_weights_have_no_gradient_nor_state() -> None:
    frozen = models.resolve("llama-3.2-1b", lora_rank=8)
    buffers = BUFFERS["zerostage"](frozen, Run(lora_rank=8), Partition.from_stage(3, 1), 1, Track())
    sizes = buffers.sizes()
    padded = sum(-(-w.numel // 64) * 64 for w in frozen.weights if w.trainable)
    assert sizes["gradients"] == 2 * padded and sizes["master"] == sizes["exp_avg"] == 4 * padded
    assert Traffic(Run(), Partition.from_stage(3, 1), 1).sent(frozen.parameters, padded) == 0
    assert Traffic(Run(), Partition.from_stage(2, 2), 2).sent(frozen.parameters, padded) == 2 * padded  # half of 2 bytes, twice


# The walk


def test_a_tape_lets_go_of_what_nobody_needs() -> None:
    x = Tensor(4)
    tape = Tape(x)
    y = tape.op("linear", [x], [8], saves="in", weight=5)
    z = tape.op("activation", [y], [8], saves="in")
    tape.op("linear", [z], [2], saves="in", weight=7)
    assert list(tape.forward()) == [Event("activations", 8), Event("activations", 8), Event("activations", 2)]  # all are saved
    total = sum(event.size for event in tape.forward("nothing", keep_start=True))
    assert total == 2  # the result, and the start, which was there
    back = list(tape.backward())
    assert [event.size for event in back if event.term == "gradient"] == [7, 5]
    memory = [event for event in back if event.term != "gradient"]
    assert sum(event.size for event in memory) == -(4 + 8 + 8 + 2) + 4  # all saved and the upstream gradient go, x's comes
    assert [event.size for event in tape.events("backward", True, True) if event.term == "gradient"] == [7, 5]


def test_memory_returns_to_where_a_step_began() -> None:
    architecture = models.resolve("llama-3.2-1b")
    for engine in ("zerostage", "fsdp2", "fsdp1", "ddp"):
        for checkpointing in ("none", "selective", "full"):
            for loss in ("whole", "fused", "chunked", "chunked_head"):
                run = Run(engine=engine, checkpointing=checkpointing, loss=loss, accumulation=2)
                track = walk(architecture, run, Partition.from_stage(BUFFERS[engine].stages[-2] if engine != "ddp" else 0, 4), 4)
                left = {term: size for term, size in track.now.items() if size}
                rest = BUFFERS[engine](architecture, run, Partition.from_stage(BUFFERS[engine].stages[-2] if engine != "ddp" else 0, 4), 4, Track())
                expected = {term: size for term, size in rest.sizes().items() if size and term != "gradients"}
                assert left == expected, (engine, checkpointing, loss)


def test_flash_attention_stores_no_scores_and_checkpointing_saves_memory() -> None:
    architecture = models.resolve("llama-3.2-1b")

    def activations(**settings) -> int:
        return walk(architecture, Run(**settings), Partition.from_stage(3, 8), 8).highest["activations"]

    twice = activations(sequence=8192, checkpointing="none") / activations(sequence=4096, checkpointing="none")
    assert 1.99 < twice < 2.01
    assert activations(sequence=4096, checkpointing="none", attention="eager") > 5 * activations(sequence=4096, checkpointing="none")
    sizes = [activations(checkpointing=one) for one in ("none", "selective", "full")]
    assert sizes == sorted(sizes, reverse=True)
    logits = [walk(architecture, Run(loss=one), Partition.from_stage(3, 8), 8).highest["logits"] for one in ("whole", "chunked_head")]
    assert logits[1] < logits[0] / 7


# Decisions


def test_a_70b_needs_stage_3_and_32_gpus() -> None:
    answer = zerostage.plan("llama-3.1-70b", gpu="h100", network="400GB/s")
    decided = answer.recommendation
    assert (decided.stage, decided.ranks, decided.layout, decided.tensor, decided.pipeline) == (3, 32, "stage 3", 1, 1)
    assert not row(answer, 3, 16).fits and row(answer, 3, 32).fits
    assert not any(r.fits for r in answer.rows if r.stage in (1, 2))
    text = " ".join(decided.reasons)
    assert "stage 1 needs" in text and "at any number of ranks" in text
    assert 1 <= decided.largest_micro_batch <= 8 and decided.longest_sequence > 4096
    assert sum(s.end_s - s.start_s for s in answer.spans if s.stream == "compute") == pytest.approx(decided.row.compute_s, rel=0.01)
    assert max(sum(m.bytes.values()) for m in answer.timeline) == decided.row.peak_allocated == max(decided.row.phases.values())


def test_a_7b_is_told_not_to_pay_for_stage_3() -> None:
    answer = zerostage.plan("llama-2-7b", gpu="h100", nodes=1)
    assert answer.recommendation.stage == 1 and answer.recommendation.ranks == 8
    assert any("stage 3 is not needed" in reason and "1.5 times as much" in reason for reason in answer.recommendation.reasons)


@pytest.mark.parametrize(
    "asked, expected",
    [
        (dict(params=80e9, gpu="a100", nodes=64, network="42.5GB/s", micro_batch=7, sequence=1024), "3D"),
        (dict(params=80e9, gpu="a100", nodes=64, network="42.5GB/s", micro_batch=1, sequence=2048), "3D"),
        (dict(model="gpt3-175b", gpu="a100", nodes=48, network="200GB/s", micro_batch=4, sequence=2048), 3),
        (dict(params=175e9, gpu="a100", nodes=128, network="200GB/s", micro_batch=1, sequence=2048), 3),
        (dict(model="qwen3-32b", gpu="h100", nodes=2, network="400GB/s"), 3),
    ],
)
def test_the_reversals_of_published_runs(asked: dict, expected: str | int) -> None:
    decided = zerostage.plan(**asked).recommendation
    if expected == "3D":  # IDEFICS-80B on 42.5 GB/s a node
        assert decided.tensor * decided.pipeline > 1 and decided.tensor * decided.pipeline * decided.data == 512
        assert any("s a step" in reason for reason in decided.reasons)
    else:
        assert (decided.stage, decided.tensor, decided.pipeline, decided.fits) == (3, 1, 1, True)


def test_what_fits_at_no_number_of_gpus_is_told_so() -> None:
    answer = zerostage.plan("llama-3.1-405b", gpu="l4", nodes=1)
    decided = answer.recommendation
    assert not decided.fits and any("nothing fits" in reason for reason in decided.reasons)
    larger = zerostage.plan("llama-3.1-70b", gpu="h100", nodes=1, micro_batch=1).recommendation
    assert not larger.fits and any("fits from about 32 GPUs" in reason for reason in larger.reasons)
    with_knob = zerostage.plan("llama-3.1-8b", gpu="a100", nodes=1, micro_batch=16, checkpointing="none").recommendation
    assert not with_knob.fits and any("fits with micro-batches of 1" in reason for reason in with_knob.reasons)
    assert with_knob.choices[0].fits and with_knob.tensor == with_knob.pipeline == 1


def test_cost_follows_from_tokens() -> None:
    answer = zerostage.plan("llama-3.1-8b", gpu="h100", nodes=1, tokens=1e9)
    decided = answer.recommendation
    assert decided.gpu_hours == pytest.approx(1e9 / decided.row.tokens_per_s_per_gpu / 3600)
    assert decided.row.step_s == pytest.approx(decided.row.compute_s + decided.row.exposed_s, rel=1e-6)


# Forms


def test_json_has_the_documented_keys_and_whole_bytes() -> None:
    done = command("llama-3.2-1b", "--gpu", "a100-40", "--nodes", "1", "--gpus-per-node", "2", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["version"] == 1 and Plan.model_validate(data).model_dump(mode="json") == data
    terms = {"weights", "gradients", "master", "exp_avg", "exp_avg_sq", "gathered", "reduce", "activations", "logits", "optimizer_temporaries"}
    keys = {"stage", "ranks", "engine", "bytes", "peak_allocated", "reserved_low", "reserved_high", "device_used", "fits",
            "sent_bytes_per_step", "step_s", "exposed_s", "tokens_per_s_per_gpu", "mfu"}  # fmt: skip
    for one in data["rows"]:
        assert keys <= one.keys() and terms <= one["bytes"].keys()
        assert all(isinstance(size, int) for size in one["bytes"].values())
        assert one["reserved_low"] <= one["reserved_high"] and one["peak_allocated"] == one["reserved_low"]
    assert {"stage", "ranks", "layout", "reasons"} <= data["recommendation"].keys()


def test_the_json_schema_is_documented() -> None:
    from pathlib import Path

    text = (Path(__file__).parent.parent / "docs" / "plan.md").read_text()
    for model in (Plan, Row, Bytes, Recommendation):
        assert [name for name in model.model_fields if f"`{name}`" not in text] == []


@pytest.mark.parametrize("stage, code", [("0", 3), ("3", 0)])
def test_the_exit_code_tells_whether_the_asked_stage_fits(stage: str, code: int) -> None:
    done = command("llama-3.1-8b", "--gpu", "h100", "--nodes", "1", "--stage", stage)
    assert done.returncode == code, done.stderr
    assert ("asked for: stage 0 on 8 ranks does not fit" in done.stdout) == (code == 3)


def test_R11_a_config_is_enough_and_torch_is_not_needed(tmp_path) -> None:
    config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8,
              "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 512, "tie_word_embeddings": False}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = "import sys\nfor name in ('torch', 'transformers'): sys.modules[name] = None\nfrom zerostage.cli import main\nmain()"
    arguments = ["plan", str(tmp_path), "--gpu", "h100", "--nodes", "1", "--json"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    there = zerostage.plan(str(tmp_path), gpu="h100", nodes=1)
    assert json.loads(done.stdout) == there.model_dump(mode="json")
    assert there.run["sequence"] == 512 and any("sequences of 512" in text for text in there.assumed)


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["llama-9-8b"], ["'llama-9-8b' is no built-in model", "did you mean llama-3-8b?"]),
        (["llama-3.1-8b", "--gpu", "h1000"], ["unknown card 'h1000'", "did you mean H100-80?"]),
        (["llama-3.1-8b", "--gpu", "h100", "--nodes", "0"], ["0 is no number of ranks, nodes or GPUs", "1 or more"]),
        (["llama-3.1-8b", "--nodes", "2"], ["--gpu h100"]),
        (["llama-3.1-8b", "--gpu", "h100", "--nodes", "2", "--network", "fast"], ["network 'fast' is not a rate", "400GB/s"]),
        (["llama-3.1-8b", "--gpu", "v100"], ["V100-32 has no bf16", "fp16"]),
        (["llama-3.1-8b", "--stage", "7"], ["stage is 7", "0, 1, 2 or 3"]),
        (["llama-3.1-8b", "--engine", "fsdp2", "--stage", "1"], ["fsdp2 has no stage 1", "2 or 3"]),
        (["llama-3.1-8b", "--engine", "deepsped"], ["engine is 'deepsped'", "'deepspeed'"]),
        (["llama-3.1-8b", "--checkpointing", "some"], ["checkpointing is 'some'", "'none'"]),
        (["llama-3.1-8b", "--micro-batch", "-1"], ["micro_batch is -1"]),
        (["llama-3.1-8b", "--micro-bach", "1"], ["there is no flag --micro-bach", "did you mean --micro-batch?"]),
        (["llama-3.1-8b", "--params", "7e9"], ["not both"]),
        (["--params", "7B", "--lora-rank", "8"], ["LoRA needs the shapes"]),
        (["llama-3.1-8b", "--from", "nowhere.json"], ["there is no file nowhere.json"]),
        (["llama-3.1-8b", "--calibration", "nowhere.json"], ["nowhere.json cannot be read"]),
        (["llama-3.1-8b", "--gpu", "h100", "--nodes", "1", "--ranks", "16"], ["1 node(s) of 8 GPUs have no 16 ranks"]),
        (["llama-3.1-8b", "--optimizer", "adafactor"], ["zerostage has no Adafactor", "--engine deepspeed"]),
        (["llama-3.1-8b", "--tensor", "2"], ["zerostage has no tensor parallelism", "megatron"]),
        (["llama-3.1-8b", "--simulate"], ["a simulation is of one number of ranks"]),
        (["--accuracy", "nowhere.json"], ["nowhere.json cannot be read"]),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], parts: list[str]) -> None:
    done = command(*arguments)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert all(part in done.stderr for part in parts), done.stderr


def test_a_stage_that_is_asked_for_is_looked_for_on_the_fewest_gpus() -> None:
    answer = zerostage.plan("llama-3.1-70b", gpu="a100-40", stage=3)
    assert answer.asked.fits and answer.asked.ranks == 64 == answer.recommendation.ranks
    assert not row(answer, 3, 32).fits
    shown = command("llama-3.1-70b", "--gpu", "a100-40", "--stage", "3").stdout
    assert "asked for: stage 3 on 64 ranks fits" in shown and "On 64 ranks" in shown


def test_a_setting_that_is_much_faster_is_preferred_to_an_earlier_stage() -> None:
    slow = zerostage.plan("llama-3.1-8b", gpu="h100", nodes=2, network="100GbE").recommendation
    assert slow.stage == 3 and slow.layout == "stage 3, weights within 8" and any("fits, too, but takes" in r for r in slow.reasons)
    assert zerostage.plan("llama-3.1-8b", gpu="h100", nodes=2, network="400GB/s").recommendation.stage == 1


def test_mfu_counts_no_gradients_of_frozen_weights() -> None:
    whole = zerostage.plan("llama-3.1-8b", gpu="h100", nodes=1, checkpointing="none")
    frozen = zerostage.plan("llama-3.1-8b", gpu="h100", nodes=1, checkpointing="none", lora_rank=16)
    assert row(frozen, 3, 8).mfu < 1.05 * row(whole, 3, 8).mfu < 0.8


def test_numbers_may_be_text_in_python_too() -> None:
    assert zerostage.plan(params="7B", ranks=8).model["parameters"] == 7_000_000_000
    for wrong in ({"ranks": "8"}, {"ranks": 0}, {"nodes": "1", "gpu": "h100"}, {"params": "many"}):
        with pytest.raises(InputError):
            zerostage.plan(**{"params": 7e9, **wrong})


def test_settings_go_by_the_names_of_the_training_command_too() -> None:
    asked = zerostage.plan("gpt2", ranks=2, sequence_length=256, activation_checkpointing="none", micro_batch_size=2)
    assert (asked.run["sequence"], asked.run["checkpointing"], asked.run["micro_batch"]) == (256, "none", 2)
    done = command("gpt2", "--ranks", "2", "--sequence-length", "256", "--activation-checkpointing", "none", "--micro-batch-size", "2", "--json")
    assert json.loads(done.stdout) == asked.model_dump(mode="json")


def test_unknown_settings_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="there is no setting 'microbatch'; did you mean micro_batch?"):
        zerostage.plan("llama-3.1-8b", microbatch=2)
