"""The audit from outside: readings against figures written out here, a plan's own figures, real ranks and published runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import batch, tiny_llama
from ranks import run

import zerostage
from zerostage import Partition, Precision, cli
from zerostage.mistakes import InputError
from zerostage.planning import published, rows
from zerostage.planning.memory.engines import BUFFERS
from zerostage.planning.model import resolve as models
from zerostage.planning.published import cases
from zerostage.planning.run import Run
from zerostage.readings import Reading, _on_twice, explain
from zerostage.used import Used, parse
from zerostage.verdict import EXPLAINS, judge, state, window

SMALL = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
         "intermediate_size": 1536, "vocab_size": 32000, "tie_word_embeddings": False}  # fmt: skip


def used(size: int) -> Used:
    return Used(bytes=size, low=size, high=size)


def verdicts(reading: Reading) -> dict[str, str]:
    return {one.layout: one.verdict for one in reading.candidates}


@pytest.fixture
def command(monkeypatch, capsys):
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["zerostage", "audit", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code or 0, *capsys.readouterr()

    return call


# The example of the issue


def test_157_gb_of_a_70b_on_64_ranks(command) -> None:
    code, shown, _ = command("--params", "70.6e9", "--ranks", "64", "--used", "157GB")
    words = " ".join(shown.split())
    assert code == 0
    assert "- stage 0: impossible: the training state alone is 1,129.6 GB" in words
    assert "- stage 1: impossible: the training state alone is 295.6 GB" in words
    assert "- stage 2: exact: its training state is 156.6 GB, which leaves 356 MB" in words
    assert "- stage 3: implausible: leaves 139.3 GB unexplained" in words
    assert "- hybrid 8 x 8: explains: leaves 15.8 GB" in words  # 16/8 x 70.6 = 141.2
    assert "157.0 GB a rank = 146.22 GiB" in words and "GB = 1e9 bytes, GiB = 2^30" in words
    assert "Only the training state can be compared" in words
    assert "2 explanations remain; one reading cannot tell them apart" in words
    assert "156.6 GB for stage 2, 141.2 GB for hybrid 8 x 8" in words
    assert "on 128 ranks: -7.7 GB for stage 2, no change for hybrid 8 x 8" in words  # 14/64 - 14/128 of 70.6
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("stage, code", [(0, 4), (1, 4), (2, 0), (3, 4)])
def test_exit_code_says_whether_the_configured_stage_explains_it(command, stage: int, code: int) -> None:
    found, shown, _ = command("--params", "70.6e9", "--ranks", "64", "--used", "157GB", "--stage", str(stage), "--json")
    answer = json.loads(shown)
    assert found == code and answer["agrees"] is (code == 0) and answer["configured"] == stage


def test_json_has_whole_bytes(command) -> None:
    code, shown, _ = command("--params", "70.6e9", "--ranks", "64", "--used", "157GB", "--json")
    answer = json.loads(shown)
    assert code == 0 and answer["version"] == 1 and answer["agrees"] is None
    assert answer["judged"] == {"bytes": 157 * 10**9, "low": 1565 * 10**8, "high": 1575 * 10**8, "name": "reading 0"}
    stage2 = answer["candidates"][2]
    N, padding = 70_600_000_000, 64 * 64  # elements: the engine's slices are aligned
    assert 0 <= stage2["state"] - (2 * N + 14 * N // 64) < 16 * padding
    assert stage2["left"] == 157 * 10**9 - stage2["state"] and 0 <= stage2["bytes"]["weights"] - 2 * N < 2 * padding
    assert all(isinstance(size, int) for size in (stage2["state"], stage2["left"], *stage2["bytes"].values()))
    assert Reading(**answer).model_dump(mode="json") == answer


def test_one_rank_divides_nothing(command) -> None:
    code, shown, _ = command("--params", "1e9", "--ranks", "1", "--used", "16GB", "--stage", "3")
    assert code == 4 and "one rank divides nothing" in " ".join(shown.split())


# A plan's own figures explain themselves


@pytest.mark.parametrize("engine", BUFFERS)
def test_every_setting_explains_its_own_figures(engine: str) -> None:
    architecture, settings = models.resolve(SMALL), Run(engine=engine, sequence=512)
    for partition in rows.partitions(16, 8):
        if partition.stage(16) in BUFFERS[engine].stages:
            row = rows.row(architecture, settings, partition, 16, None)[0]
            readings = {"any": row.peak_allocated, "peak": row.peak_allocated, "reserved": row.reserved_high,
                        "nvidia-smi": row.reserved_high + 2**30, "allocated": state(row)}  # fmt: skip
            for kind, size in readings.items():
                found = judge(used(size), {"full": row}, kind, 0.0, settings, architecture.parameters, None)
                assert found.verdict in EXPLAINS, (kind, found)
                assert found.left == size - state(row)
            start, end = window(row, "reserved")
            for size, verdict in ((end + 1, "implausible"), (state(row) - 1, "impossible")):
                found = judge(used(size), {"full": row}, "reserved", 0.0, settings, architecture.parameters, None)
                assert found.verdict == verdict and found.expected == {"full": (start - state(row), end - state(row))}


def test_what_all_ranks_divide_halves_on_twice_the_ranks() -> None:
    N = 64 * 10**6
    here = explain([used(N)], params=N, ranks=16)
    there = {one.layout: one.state for one in explain([used(N)], params=N, ranks=32).candidates}
    for one in here.candidates:
        assert _on_twice(one, 16) == there[one.layout.replace("8 x 2", "8 x 4")]


def test_settings_that_were_not_given_are_tried_or_named() -> None:
    said = dict(ranks=8, sequence=2048, kind="peak")
    row = rows.row(models.resolve(SMALL), Run(sequence=2048, checkpointing="none"), Partition(8, 8, 8), 8, None)[0]
    open_ = explain([used(row.peak_allocated)], SMALL, **said)
    stage3 = next(one for one in open_.candidates if one.stage == 3)
    assert stage3.verdict == "explains" and stage3.checkpointing[0] == "none"
    assert stage3.bytes.activations == row.bytes.activations and stage3.peak_allocated == row.peak_allocated
    large = rows.row(models.resolve(SMALL), Run(sequence=2048, micro_batch=6), Partition(8, 8, 8), 8, None)[0]
    closed = explain([used(large.peak_allocated)], SMALL, **said, checkpointing="full")
    stage3 = next(one for one in closed.candidates if one.stage == 3)
    assert stage3.verdict == "implausible" and "a micro-batch of 6 or more would explain it" in stage3.reason
    known = explain([used(large.peak_allocated)], SMALL, **said, checkpointing="full", micro_batch=6)
    assert next(one for one in known.candidates if one.stage == 3).verdict == "explains"


def test_what_the_figure_is_of_decides() -> None:
    # FSDP2's stages 2 and 3 hold the same between steps; the peak is another by the whole weights
    peaks = {row.stage: row.peak_allocated for row in zerostage.plan("llama-3.1-8b", ranks=[8], engine="fsdp2").rows}
    same = dict(ranks=8, engine="fsdp2", checkpointing="full", micro_batch=1, sequence=4096)
    for stage in (2, 3):
        found = explain([used(peaks[stage])], "llama-3.1-8b", kind="peak", **same)
        assert [one.stage for one in found.explanations] == [stage]
    rest = explain([used(16_060_522_496)], "llama-3.1-8b", kind="allocated", **same)
    assert verdicts(rest) == {"stage 0": "impossible", "stage 2": "exact", "stage 3": "exact"}
    assert any("max_memory_allocated() over a step with sequences of 1024 tokens" in note for note in rest.notes)
    # gradients may be gone between two steps: 4 + 12/64 less 2
    gone = explain([used(155 * 10**9)], params=70.6e9, ranks=64, kind="allocated")
    assert verdicts(gone)["stage 1"] == "explains" and verdicts(gone)["stage 2"] == "explains"


def test_a_rounded_parameter_count_is_taken_as_rounded() -> None:
    # '7B' is 6.74e9 in truth: 16 x 6.74 = 107.8
    assert verdicts(explain(parse("108GB"), params="7B", ranks=8))["stage 0"] == "exact"
    assert verdicts(explain(parse("108GB"), params=7e9, ranks=8))["stage 0"] == "impossible"


def test_ranks_that_differ_are_named(command) -> None:
    _, shown, _ = command("--params", "1e9", "--used", "20,20.9,20,21.1GB", "--json")  # 4.5% more, and 5.5%
    answer = json.loads(shown)
    assert answer["uneven"] == [3] and answer["judged"]["bytes"] == 20 * 10**9 and answer["ranks"] == 4
    assert any(note.startswith("Rank 3 holds 21.1 GB, 1.05 times the median") for note in answer["notes"])


# Real ranks, and published runs


def held(rank: int, n: int) -> list[int]:
    """What a rank holds between backward and zero_grad, in bytes, at every partition."""
    found = []
    for partition in rows.partitions(n, 2):
        torch.manual_seed(0)
        model = tiny_llama(layers=2, hidden=64, vocab=512)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        zerostage.shard(model, optimizer, partition=partition, precision=Precision())
        for step in range(2):
            optimizer.zero_grad()
            model(**batch(rank, step, vocab=512)).loss.backward()
            optimizer.step()
        measured = zerostage.memory(model, optimizer).measured
        found.append(sum(measured[term] for term in ("weights", "gradients", "master", "exp_avg", "exp_avg_sq")))
    return found


def test_real_ranks_at_every_partition_are_recognised() -> None:
    config = tiny_llama(layers=2, hidden=64, vocab=512).config.to_dict()
    for partition, sizes in zip(rows.partitions(2, 2), zip(*run(held, n=2, timeout=60))):
        found = explain([used(size) for size in sizes], config, ranks=2, kind="allocated")
        exact = [one.partition for one in found.candidates if one.verdict == "exact"]
        assert exact == [tuple(vars(partition).values())] and not found.uneven


def test_published_runs_are_recognised() -> None:
    kinds = {"allocated": "peak", "active": "peak", "reserved": "reserved", "at rest": "allocated", "device": "nvidia-smi"}
    right, explanations, total = 0, 0, 0
    for case in cases.read(Path(published.__file__).parent / "published.json"):
        if not case.fitted or case.run is None or case.missing or case.kind not in kinds:
            continue
        for kind, value in {case.kind: case.value, **case.also}.items():
            total += 1
            for partition in rows.partitions(case.ranks, case.ranks):
                if partition.stage(case.ranks) in (0, *BUFFERS[case.run.engine].stages):
                    row = rows.row(case.architecture, case.run, partition, case.ranks, None)[0]
                    variants = {case.run.checkpointing: row}
                    found = judge(used(value), variants, kinds[kind], 0.0, case.run, case.architecture.parameters, None)
                    explanations += found.verdict in EXPLAINS
                    right += found.verdict in EXPLAINS and row.stage == (case.stage if case.ranks > 1 else 0)
    assert total >= 100 and right >= 0.94 * total
    assert explanations < 1.5 * total  # what explains everything says nothing


# What is typed


@pytest.mark.parametrize(
    "text, size, half",
    [("157GB", 157 * 10**9, 5 * 10**8), ("146.2 GiB", 156_981_054_669, 53_687_091), ("81234MiB", 81234 * 2**20, 2**19),
     ("157000000000", 157 * 10**9, 0), ("157000000000 bytes", 157 * 10**9, 0), ("1.5e3MB", 15 * 10**8, 5 * 10**7),
     ("0.5tb", 5 * 10**11, 5 * 10**10)],
)  # fmt: skip
def test_units(text: str, size: int, half: int) -> None:
    (found,) = parse(text)
    assert (found.bytes, found.high - found.bytes, found.bytes - found.low) == pytest.approx((size, half, half), abs=1)


def test_one_unit_serves_a_list() -> None:
    for text in ("1,2,3GiB", "1GiB, 2GiB,3"):
        assert [one.bytes for one in parse(text)] == [2**30, 2 * 2**30, 3 * 2**30]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--params", "7B", "--ranks", "8", "--used", "157"], ["157", "is it in GB?", "157GB (1e9 bytes)"]),
        (["--params", "7B", "--ranks", "8", "--used", "157Gb"], ["'Gb'", "a small b is a bit"]),
        (["--params", "7B", "--ranks", "8", "--used", "157G"], ["'G'", "GiB"]),
        (["--params", "7B", "--ranks", "8", "--used", "157 GiG"], ["did you mean GiB?"]),
        (["--params", "7B", "--ranks", "8", "--used", "15GB,15GiB"], ["mixes GB and GiB"]),
        (["--params", "7B", "--ranks", "8", "--used", "a lot"], ["'a lot'", "157GB"]),
        (["--params", "7B", "--ranks", "8", "--used", "-3GB"], ["'-3GB'"]),
        (["--params", "7B", "--ranks", "8", "--used", "15,GB"], ["15,GB"]),
        (["--params", "7B", "--ranks", "8", "--used", "0GB"], ["no memory of a rank"]),
        (["--params", "7B", "--ranks", "2", "--used", "1,2,3GB"], ["3 readings for 2 rank(s)"]),
        (["--params", "7B", "--ranks", "0", "--used", "15GB"], ["--ranks", "0"]),
        (["--params", "7B", "--used", "15GB"], ["give --ranks"]),
        (["--params", "7B", "--ranks", "8"], ["--used", "--gpu"]),
        (["--params", "7B", "--ranks", "8", "--used", "15GB", "--gpu"], ["not both"]),
        (["--params", "7B", "--gpu", "--reading", "peak"], ["--gpu reads what nvidia-smi shows"]),
        (["--ranks", "8", "--used", "15GB"], ["give a model", "--params"]),
        (["llama-3.1-8b", "--params", "7B", "--ranks", "8", "--used", "15GB"], ["not both"]),
        (["llama-3.1-8b", "--model", "gpt2", "--ranks", "8", "--used", "15GB"], ["twice"]),
        (["lama-3.1-8b", "--ranks", "8", "--used", "15GB"], ["did you mean llama-3.1-8b?"]),
        (["--params", "7B", "--ranks", "8", "--used", "15GB", "--stage", "4"], ["0, 1, 2 or 3"]),
        (["--params", "7B", "--ranks", "8", "--used", "15GB", "--stage", "1", "--engine", "fsdp2"], ["fsdp2 has no stage 1"]),
        (["--params", "7B", "--ranks", "8", "--used", "15GB", "--engine", "fsdp3"], ["fsdp3"]),
        (["--params", "7B", "--ranks", "8", "--used", "15GB", "--reading", "nvidia"], ["did you mean nvidia-smi?"]),
        (["--params", "7B", "--ranks", "8", "--used", "15GB", "--micro-bach", "2"], ["did you mean --micro-batch?"]),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(command, arguments: list[str], words: list[str]) -> None:
    code, shown, error = command(*arguments)
    assert code == 2 and shown == "" and error.startswith("zerostage: ") and error.count("\n") == 1
    assert all(word in error for word in words), error


def test_the_same_settings_and_models_as_plan(command, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    for model in ([str(tmp_path)], ["--model", str(tmp_path / "config.json")]):
        code, shown, _ = command(*model, "--ranks", "4", "--used", "1.2GB", "--micro-batch-size", "2", "--seq-len", "128",
                                 "--activation-checkpointing", "none", "--json")  # fmt: skip
        answer = json.loads(shown)
        assert code == 0 and [answer["run"][key] for key in ("micro_batch", "sequence", "checkpointing")] == [2, 128, "none"]
        assert set(answer["candidates"][0]["expected"]) == {"none"}


def test_no_torch() -> None:
    code = "import sys\nfrom zerostage import cli\ntry: cli.main()\nfinally: print([m for m in ('torch',) if m in sys.modules])"
    arguments = ["audit", "llama-3.1-8b", "--ranks", "8", "--used", "30GB", "--checkpointing", "full"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("[]"), done


# The cards of this machine


def test_gpu_without_a_driver_is_one_line(command) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    code, shown, error = command("--params", "7B", "--gpu")
    assert code == 2 and shown == "" and error.count("\n") == 1 and "give --used" in error


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_gpu_reads_this_process() -> None:
    from zerostage import used_here

    held = torch.empty(8 * 2**30, dtype=torch.uint8, device="cuda")
    sizes, _ = used_here.read()
    assert any(8 * 2**30 < one.bytes < 12 * 2**30 for one in sizes), sizes
    del held


def test_readings_need_a_rank() -> None:
    with pytest.raises(InputError, match="0 readings for 8"):
        explain([], params=1e9, ranks=8)
