"""Every byte held and sent, against formulas that are written out here once more, and against independent counts."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
from allocations import live_storages, recorded
from models import batch, padded_sizes, tiny_llama
from ranks import run
from torch import nn

import zerostage
from zerostage import Partition, Precision

SHAPE = dict(layers=4, hidden=64, vocab=512)


def partitions(n: int) -> list[Partition]:
    found = [Partition.from_stage(stage, n) for stage in range(4)]
    return found + ([Partition.hybrid(2), Partition.node_local_weights(4, 2)] if n == 4 else [])


def train(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, micro: int = 1, vocab: int = 512) -> None:
    for step in steps:
        for part in range(micro):
            model(**batch(rank, step, vocab=vocab, micro=part)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def account(rank: int, n: int, partition: Partition) -> dict:
    torch.ones(1).add(1)
    tiny_llama(**SHAPE)  # whatever the libraries keep from a first model is not ours
    before = live_storages()
    with recorded() as built:
        model = tiny_llama(**SHAPE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        zerostage.shard(model, optimizer, partition=partition, precision=Precision())
    with recorded() as trained:
        train(rank, model, optimizer, range(2))
        model(**batch(rank, 2)).loss.backward()  # there are gradients from here to zero_grad
    ledger = zerostage.memory(model, optimizer)
    after = live_storages()
    ours = sum(size for key, size in after.items() if key not in before)
    scalars = 4 * len(optimizer.state)  # a step count per parameter that this rank has a part of
    return {
        "expected": ledger.expected,
        "measured": ledger.measured,
        "walked": ours - scalars,
        "built": built.net,
        "trained": trained.net - scalars,
    }


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_bytes_at_rest(n: int) -> None:
    model = tiny_llama(**SHAPE)
    sizes = padded_sizes(model, n)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    for partition in partitions(n):
        formula = {
            "weights": sum(2 * size // partition.weights for size in sizes),
            "gradients": sum(2 * size // partition.gradients for size in sizes),
            "master": sum(4 * size // partition.optimizer for size in sizes),
            "exp_avg": sum(4 * size // partition.optimizer for size in sizes),
            "exp_avg_sq": sum(4 * size // partition.optimizer for size in sizes),
            "buffers": buffers,
        }
        for result in run(account, n=n, partition=partition):
            measured = {term: size for term, size in result["measured"].items() if term in formula}
            assert measured == formula, partition
            assert {term: result["expected"][term] for term in formula} == formula, partition
            assert result["measured"]["gathered"] == result["measured"]["in_flight"] == 0
            total = sum(formula.values())
            assert result["walked"] == total, (partition, result)
            made_by_training = sum(formula[term] for term in ("gradients", "exp_avg", "exp_avg_sq"))
            # over gloo, votes of some tens of bytes are freed by its own thread, which the profiler does not
            # follow; neither does it follow the broadcast of the initial values
            assert abs(result["trained"] - made_by_training) <= (0 if n == 1 else 1000), (partition, result)
            assert result["built"] == total - made_by_training or n > 1, (partition, result)


LARGER = dict(layers=6, hidden=256, vocab=1024)


def activations(rank: int, n: int) -> int:
    """The peak of a plain bf16 forward and backward that drops each gradient as soon as it is there."""
    model = tiny_llama(**LARGER).to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for step in range(3):
        with recorded() as during:
            model(**batch(rank, step, rows=2, length=32, vocab=1024)).loss.backward()
    return during.peak


def peaks(rank: int, n: int, partition: Partition, prefetch: int, last: int) -> dict:
    """The allocator's peak above what is at rest, in step 3 and the last one, and what the ledger allows for it."""
    model = tiny_llama(**LARGER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zerostage.shard(model, optimizer, partition=partition, precision=Precision(), prefetch=prefetch)
    found = {}
    for step in range(1, last + 1):
        with recorded() if step in (3, last) else nullcontext() as during:
            model(**batch(rank, step, rows=2, length=32, vocab=1024)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if during is not None:
            found[step] = during.peak
    ledger = zerostage.memory(model, optimizer)
    units = zerostage.engine.engine_of(model).units
    window = (1 + prefetch) * max(unit.nbytes for unit in units if not unit.resident)
    return found | {
        "allowed": ledger.peak["bound"] - sum(s for term, s in ledger.expected.items() if term not in ("buffers", "gradients")),
        "gathered": ledger.peak["gathered"],
        "window": window + sum(unit.nbytes for unit in units if unit.resident),
    }


@pytest.mark.parametrize("n", [2, 4])
def test_the_peak_of_a_step_keeps_its_bound_and_does_not_move(n: int) -> None:
    plain = run(activations, n=1)[0]
    for partition in partitions(n):
        for prefetch in (0, 1, 2) if partition.weights == n and n == 2 else (1,):
            last = 30 if n == 2 and partition.weights == n and prefetch == 1 else 6
            for result in run(peaks, n=n, partition=partition, prefetch=prefetch, last=last, timeout=180):
                what = f"{partition}, prefetch {prefetch}: {result}, activations {plain}"
                # votes of some tens of bytes are freed on gloo's own thread, out of the profiler's sight
                assert abs(result[3] - result[last]) < 1000, what
                assert result[3] <= result["allowed"] + plain, what
                if partition.weights > 1:
                    assert 0 < result["gathered"] <= result["window"], what


def sent(rank: int, n: int, partition: Partition, micro: int = 1, checkpointing: str | None = None) -> dict:
    model = tiny_llama(**SHAPE)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zerostage.shard(model, optimizer, partition=partition, precision=Precision())
    train(rank, model, optimizer, range(2), micro)
    traffic = zerostage.traffic(model)
    traffic.reset()
    events = zerostage.engine.engine_of(model).schedule.events = []
    train(rank, model, optimizer, range(2, 3), micro)
    gathers: dict[str, int] = {}
    for kind, unit in events:
        if kind == "gather":
            gathers[unit] = gathers.get(unit, 0) + 1
    return {"bytes": traffic.bytes, "expected": traffic.expected(micro), "gathers": gathers, "calls": traffic.calls}


@pytest.mark.parametrize("n", [2, 3, 4])
def test_traffic_of_a_step_is_two_two_two_three_model_sizes(n: int) -> None:
    model_size = 2 * sum(padded_sizes(tiny_llama(**SHAPE), n))  # bytes in bf16
    for stage, sizes in enumerate((2, 2, 2, 3)):
        for result in run(sent, n=n, partition=Partition.from_stage(stage, n)):
            once = model_size * (n - 1) // n
            assert result["bytes"]["reduce_scatter"] == once
            assert result["bytes"]["all_gather"] == (sizes - 1) * once
            assert {k: result["bytes"].get(k, 0) for k in result["expected"]} == result["expected"]
            # what is agreed in each step is not a share of the model
            assert result["bytes"]["agreement"] < 1000 and set(result["bytes"]) <= {*result["expected"], "agreement"}


def test_traffic_of_hybrids_by_hand() -> None:
    model_size = 2 * sum(padded_sizes(tiny_llama(**SHAPE), 4))
    for result in run(sent, n=4, partition=Partition.hybrid(2)):
        # within the node of 2: half a model twice for the gathers and once reduced; across the 2 nodes:
        # half of the half model in fp32 reduced, and as much in bf16 gathered
        assert result["bytes"]["reduce_scatter"] == model_size // 2 + 2 * (model_size // 2) // 2
        assert result["bytes"]["all_gather"] == 2 * (model_size // 2) + (model_size // 2) // 2
        assert {k: result["bytes"][k] for k in result["expected"]} == result["expected"]
    for result in run(sent, n=4, partition=Partition.node_local_weights(4, 2)):
        # the same reduction; gathers within the node, and updated weights across nodes
        assert result["bytes"]["reduce_scatter"] == model_size // 2 + 2 * (model_size // 2) // 2
        assert result["bytes"]["all_gather"] == 2 * (model_size // 2) + (model_size // 2) // 2


@pytest.mark.parametrize("checkpointing", ["non-reentrant", "reentrant"])
def test_activation_checkpointing_gathers_twice_not_thrice(checkpointing: str) -> None:
    for stage, times in ((3, 2),):
        for result in run(sent, n=2, partition=Partition.from_stage(stage, 2), checkpointing=checkpointing):
            assert set(result["gathers"].values()) == {times} and len(result["gathers"]) == SHAPE["layers"] + 3
            assert {k: result["bytes"][k] for k in result["expected"]} == result["expected"]


def test_accumulation_repeats_what_it_must() -> None:
    for stage in range(4):
        for result in run(sent, n=2, partition=Partition.from_stage(stage, 2), micro=3):
            assert {k: result["bytes"][k] for k in result["expected"]} == result["expected"]


def accumulating(rank: int, n: int, stage: int) -> dict:
    model = tiny_llama(**SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zerostage.shard(model, optimizer, stage=stage, precision=Precision())
    train(rank, model, optimizer, range(1))
    sizes = {}
    model(**batch(rank, 1, vocab=512)).loss.backward()
    sizes["shard"] = sum(zerostage.memory(model, optimizer).measured[k] for k in ("gradients", "in_flight"))
    with zerostage.no_sync(model):
        model(**batch(rank, 2, vocab=512)).loss.backward()
    gc.collect()
    sizes["no_sync"] = sum(zerostage.memory(model, optimizer).measured[k] for k in ("gradients", "in_flight"))
    model(**batch(rank, 3, vocab=512)).loss.backward()
    sizes["after"] = sum(zerostage.memory(model, optimizer).measured[k] for k in ("gradients", "in_flight"))
    return sizes


@pytest.mark.parametrize("n", [2, 4])
def test_E4_accumulation_goes_into_the_shard_and_no_sync_costs_a_whole_copy(n: int) -> None:
    whole = 2 * sum(padded_sizes(tiny_llama(**SHAPE), n))
    for stage in range(4):
        kept = whole if stage < 2 else whole // n
        for sizes in run(accumulating, n=n, stage=stage):
            assert sizes["shard"] == sizes["after"] == kept
            assert sizes["no_sync"] == kept + (whole if stage >= 2 else 0)
    # the same for 26e9 parameters on 16 ranks: the shard, and what no_sync adds
    divided, at_stage_0 = (Partition.from_stage(stage, 16).bytes(26e9)["gradients"] for stage in (2, 0))
    assert (divided, at_stage_0) == (3.25e9, 52e9)
