"""The audit against DeepSpeed's engines: stages 0 to 3 on real ranks over gloo, to the byte, and false ones."""

from __future__ import annotations

import functools
import gc
import math
import sys
import time

import pytest
import torch
from models import batch, features, mlp, tiny_llama
from ranks import run
from torch import nn

from zerostage import Partition, audit
from zerostage.storages import hold

BF16 = {"bf16": {"enabled": True}}
#: fp32 gradients of bf16 weights. At stage 1 this makes another optimizer, BF16_Optimizer.
WIDE = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
BUCKET = 20_000  #: elements; stage 3 holds as many for good, 1 GB by default
#: Stage 3 that takes every weight apart again.
ALL = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
FORWARD, BETWEEN, BACKWARD, STEPPED = "after forward", "between micro-batches", "after backward", "after step"


def odd():
    """174 elements, so that flat buffers need padding."""
    return mlp(7, 13, 5)


def half_frozen():
    model = odd()
    model[0].requires_grad_(False)
    return model


MODELS = {"tiny_llama": tiny_llama, "odd": odd, "half_frozen": half_frozen}


def case(stage, precision=None, model="tiny_llama", accumulation=1, **zero):
    """One engine's setting."""
    zero = {"stage": stage, "reduce_bucket_size": BUCKET, **(ALL if stage == 3 else {}), **zero}
    return dict(model=model, precision=precision or {}, accumulation=accumulation, zero=zero)


def made(model, precision, accumulation, zero):
    """The engine, and the optimizer that it was given."""
    import deepspeed

    module = MODELS[model]()
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**6,
        **precision,
    }
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0], optimizer


def alive():
    """Bytes of each storage that some tensor of this process has, by address; what the audit is held against."""
    found = {}
    for tensor in (o for o in gc.get_objects() if isinstance(o, torch.Tensor) and o.device.type != "meta"):
        for one in (tensor, tensor.grad if tensor.is_leaf else None):
            if one is not None:
                found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return found


def loss_of(engine, rank, step):
    if isinstance(engine.module, nn.Sequential):
        dtype = next(engine.module.parameters()).dtype
        x, y = features(rank, step, inputs=7, outputs=5)
        return nn.functional.mse_loss(engine(x.to(dtype)), y.to(dtype))
    return engine(**batch(rank, step)).loss


def start():
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would compile collectives of its own
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)


def engines(rank, n, cases):
    """For each case the moments around its second step: name -> (audit, bytes alive that the case made)."""
    start()
    return {name: moments(rank, **one) for name, one in cases.items()}


def moments(rank, **setting):
    gc.collect()
    gc.freeze()  # `alive` then sees, and goes through, only what comes after
    engine, given = made(**setting)
    found = {}

    def look(moment):
        expected = sum(hold(engine, engine.optimizer).bytes.values())
        for _ in range(1 if moment == FORWARD else 20):  # gloo's threads let go of what they sent a little later
            gc.collect()
            if (size := sum(alive().values())) == expected:
                break
            time.sleep(0.02)
        found[moment] = audit(engine, engine.optimizer), size

    look("made")
    accumulation = setting["accumulation"]
    for step in range(2 * accumulation):
        loss = loss_of(engine, rank, step)
        if step == 2 * accumulation - 1:
            look(FORWARD)
        engine.backward(loss)
        del loss
        if step >= accumulation:
            look(BACKWARD if step == 2 * accumulation - 1 else BETWEEN)
        engine.step()
    look(STEPPED)
    # The audit finds the engine's own optimizer, and knows the one that it was given.
    assert found[STEPPED][0].bytes == audit(engine).bytes == audit(engine, given).bytes
    engine.destroy()
    return found


CASES = {
    **{f"fp32 stage {stage}": case(stage) for stage in range(4)},
    **{f"bf16 stage {stage}": case(stage, BF16) for stage in range(4)},
    **{f"fp32 gradients stage {stage}": case(stage, WIDE) for stage in (1, 2, 3)},
    **{f"padded stage {stage}": case(stage, BF16, "odd") for stage in range(4)},
    **{f"frozen stage {stage}": case(stage, BF16, "half_frozen") for stage in (1, 2, 3)},
}
ON_FOUR = [name for name in CASES if "bf16" in name or "padded" in name]
ACCUMULATING = {
    **{f"stage {stage}": case(stage, BF16, accumulation=2) for stage in range(4)},
    "fp32 gradients stage 1": case(1, WIDE, accumulation=2),
    "fp32 gradients stage 2": case(2, WIDE, accumulation=2),
}
KEPT = {
    "persist": case(3, BF16, stage3_param_persistence_threshold=100_000),  # the default
    "reuse": case(3, BF16, stage3_max_reuse_distance=10**9),  # the default
    "prefetch": case(3, BF16, stage3_prefetch_bucket_size=50_000_000),  # the default
    "reuse some": case(3, BF16, stage3_max_reuse_distance=20_000),
    "secondary": case(3, BF16, zero_hpz_partition_size=2),
}


@functools.cache
def results(n):
    """All cases on n ranks in one run, since the engines start in far less time than DeepSpeed is imported."""
    cases = {2: {**CASES, **{f"2x {k}": v for k, v in ACCUMULATING.items()}, **KEPT}, 4: {name: CASES[name] for name in ON_FOUR}}
    one = {f"alone stage {stage}": case(stage, BF16) for stage in range(4)}
    ranks = run(engines, n=n, cases=cases.get(n, one), timeout=120, keep=False)
    return {name: [found[name] for found in ranks] for name in ranks[0]}


def layout(setting, n, rank):
    """Bytes by term that DeepSpeed's own layout has after backward, and after the step where that differs."""
    stage, bf16 = setting["zero"]["stage"], "bf16" in setting["precision"]
    collecting = setting["precision"] is WIDE and stage == 1  # BF16_Optimizer
    width, wide = (2, 4 if setting["precision"] is WIDE else 2) if bf16 else (4, 4)
    parameters = list(MODELS[setting["model"]]().parameters())
    trained = [p.numel() for p in parameters if p.requires_grad]
    frozen = [p.numel() for p in parameters if not p.requires_grad]
    size = sum(trained)
    if stage == 0:
        weights, own, gradients, master = size, size, width * size, 4 * size * bf16
    elif stage == 3:  # each parameter in n equal parts
        own = sum(math.ceil(p / n) for p in trained)
        weights, frozen = own, [math.ceil(p / n) for p in frozen]
        gradients, master = wide * own, 4 * own
    else:  # one flat buffer in n equal parts, in multiples of two elements
        weights = math.ceil(size / (2 * n)) * 2 * n
        own = weights // n
        ends = [sum(trained[: i + 1]) for i in range(len(trained))]
        # What is reduced is kept by whole parameters, so neighbours both hold one that crosses their border.
        met = sum(p for p, end in zip(trained, ends) if end > rank * own and end - p < (rank + 1) * own)
        met += weights - size if rank == n - 1 else 0
        gradients, master = wide * met, 4 * own
        if wide > width:
            gradients = wide * own if not collecting else 4 * weights + 2 * size
    weights_held = width * (weights + sum(frozen))
    before = {"weights": weights_held, "gradients": gradients, "master": master, "exp_avg": 4 * own, "exp_avg_sq": 4 * own}
    return before, {**before, "gradients": gradients if stage == 3 else 4 * weights if collecting else 0}


def the_same(found):
    """What all ranks say alike; returns it once."""
    assert all((f.stage, f.degrees, f.configured) == (found[0].stage, found[0].degrees, found[0].configured) for f in found)
    return found[0]


@pytest.mark.parametrize("name, n", [(name, n) for n in (2, 4) for name in (CASES if n == 2 else ON_FOUR)])
def test_stage_degrees_and_bytes_are_deepspeeds(name, n):
    setting, ranks = CASES[name], results(n)[name]
    stage = setting["zero"]["stage"]
    for moment, which in ((BACKWARD, 0), (STEPPED, 1)):
        found = the_same([r[moment][0] for r in ranks])
        assert (found.stage, found.configured, found.configured_stage) == (stage, f"DeepSpeed stage {stage}", stage)
        assert found.degrees == Partition.from_stage(stage, n) and found.has_moments
        assert found.parameters == sum(p.numel() for p in MODELS[setting["model"]]().parameters())
        assert found.frozen == (7 * 13 + 13 if setting["model"] == "half_frozen" else 0)
        assert not any("no whole number" in note or "Configured is" in note for note in found.notes)
        for rank, r in enumerate(ranks):
            audited, made_by_case = r[moment]
            expected = layout(setting, n, rank)[which]
            assert {term: audited.bytes[term] for term in expected} == expected, (moment, rank)
            # Nothing that lives in the process is left out, and nothing counted twice.
            assert sum(audited.bytes.values()) == made_by_case, (moment, rank)
            assert audited.bytes_per_parameter["weights"] == expected["weights"] / found.parameters


@pytest.mark.parametrize("name", ACCUMULATING)
def test_between_micro_batches(name):
    ranks = results(2)[f"2x {name}"]
    stage = ACCUMULATING[name]["zero"]["stage"]
    for moment in ("made", BETWEEN, BACKWARD, STEPPED):
        assert the_same([r[moment][0] for r in ranks]).stage == stage, moment
    for audited, made_by_case in (r[BETWEEN] for r in ranks):
        assert audited.bytes["gradients"] > 0 and sum(audited.bytes.values()) == made_by_case
        # All that stage 1 without a buffer of its own gains, it gains after the last micro-batch.
        whole = audited.bytes["gradients"] >= 2 * audited.parameters
        assert whole == (stage < 2 or ACCUMULATING[name]["precision"] is WIDE)


def test_the_bucket_of_stage_3_is_held_for_good():
    for r in results(2)["bf16 stage 3"]:
        assert 2 * BUCKET < r[STEPPED][0].bytes["other"] < 2 * BUCKET + 100


def test_fp32_gradients_besides_those_of_backward():
    found = results(2)["fp32 gradients stage 1"][0][BACKWARD][0]
    assert found.bytes_per_parameter["gradients"] == 6 and found.formula["gradients"] == 4
    assert "45,376 bytes of gradients are those of backward, besides the optimizer's own buffer of them." in found.notes


# -- Configured is one thing, real another ---------------------------------------------------


@pytest.mark.parametrize("stage", range(4))
def test_one_rank_divides_nothing(stage):
    found = results(1)[f"alone stage {stage}"][0][BACKWARD][0]
    assert (found.stage, found.configured_stage, found.degrees) == (0, stage, Partition(1, 1, 1))
    if stage:
        said = f"Configured is DeepSpeed stage {stage} (stage {stage}), measured is stage 0: there is one rank"
        assert found.notes[0].startswith(said)


WHY = {
    "persist": "stage3_param_persistence_threshold",
    "reuse": "stage3_max_reuse_distance is 1,000,000,000",
    "prefetch": "stage3_prefetch_bucket_size 50,000,000",
}


@pytest.mark.parametrize("name, why", WHY.items())
def test_stage_3_that_keeps_all_weights_whole(name, why):
    """DeepSpeed's defaults are for large models: of a small one no weight is taken apart between forward and backward."""
    ranks = results(2)[name]
    for moment in (BACKWARD, STEPPED):
        found = the_same([r[moment][0] for r in ranks])
        assert (found.stage, found.configured_stage, found.degrees) == (2, 3, Partition.from_stage(2, 2))
        assert found.notes[0] == "Configured is DeepSpeed stage 3 (stage 3), measured is stage 2."
        assert any(note.startswith(f"{found.parameters:,} elements stay whole") and why in note for note in found.notes)
    # It is so: after forward all of them are there.
    assert all(r[FORWARD][0].bytes["other"] >= 2 * found.parameters + 2 * BUCKET for r in ranks)
    assert (ranks[0][STEPPED][0].bytes["other"] >= 2 * found.parameters + 2 * BUCKET) == (name == "persist")


def test_stage_3_that_keeps_some_weights_whole():
    found = the_same([r[FORWARD][0] for r in results(2)["reuse some"]])
    assert found.stage == 3
    said = next(int(note.split()[0].replace(",", "")) for note in found.notes if "elements stay whole from forward" in note)
    really = next(int(note.split()[0].replace(",", "")) for note in found.notes if "are gathered at this moment" in note)
    assert said == pytest.approx(really / 2, rel=0.01)
    strict = the_same([r[FORWARD][0] for r in results(2)["bf16 stage 3"]])
    assert not any("gathered" in note or "stay whole" in note for note in strict.notes)


def test_secondary_shards_are_counted():
    for r in results(2)["secondary"]:
        for moment in (BACKWARD, STEPPED):
            assert r[moment][0].stage == 3 and sum(r[moment][0].bytes.values()) == r[moment][1]


def without_optimizer(rank, n):
    import deepspeed

    start()
    config = {"train_micro_batch_size_per_gpu": 1, **BF16}
    zeros = [{"stage": stage, "reduce_bucket_size": BUCKET, **ALL} for stage in (0, 3)]
    return [audit(deepspeed.initialize(model=odd(), config={**config, "zero_optimization": zero})[0]) for zero in zeros]


def test_engines_without_an_optimizer():
    for stage, found in zip((0, 3), zip(*run(without_optimizer, n=2, keep=False))):
        assert the_same(found).stage == stage
        assert found[0].bytes["weights"] == 2 * sum(math.ceil(p.numel() / (2 if stage else 1)) for p in odd().parameters())
