"""The audit against real engines on real ranks: what is configured, and what is not what it says."""

import json
import warnings

import pytest
import torch
from models import batch, features, mlp, tiny_llama
from ranks import alone, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from zerostage import Partition, Precision, audit, gathered, shard
from zerostage.engine import engine_of

LAYER = "LlamaDecoderLayer"


def blocks(model):
    return [m for m in model.modules() if type(m).__name__ == LAYER]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def plain(model, **_):
    return model, adamw(model)


def ddp(model, **options):
    model = DistributedDataParallel(model, **options)
    return model, adamw(model)


def zero_redundancy(model, **_):
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)


def fsdp(model, strategy="FULL_SHARD", policy=LAYER, nodes=0, early=False, **options):
    optimizer = adamw(model) if early else None
    kinds = {type(m) for m in model.modules() if type(m).__name__ == policy}
    if nodes:
        options["device_mesh"] = init_device_mesh("cpu", (nodes, torch.distributed.get_world_size() // nodes))
    model = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy(kinds) if kinds else None,
        device_id=torch.device("cpu"),
        **options,
    )
    return model, optimizer or adamw(model)


def fsdp2(model, reshard=True, wrapped=None, root=True, nodes=0, early=False, **_):
    optimizer = adamw(model) if early else None
    options = {} if reshard is None else {"reshard_after_forward": reshard}
    if nodes:
        n = torch.distributed.get_world_size()
        options["mesh"] = init_device_mesh("cpu", (nodes, n // nodes), mesh_dim_names=("replicate", "shard"))
    for block in blocks(model)[:wrapped]:
        fully_shard(block, **options)
    if root:
        fully_shard(model, **options)
    return model, optimizer or adamw(model)


def measured(rank, n, wrap, options=None, steps=2, moment="before step", model=None):
    """Train a little and audit at one moment of the last step: "made", "after forward", "before step" or "after step"."""
    module, optimizer = globals()[wrap](tiny_llama(**(model or {})), **(options or {}))
    if moment != "made":
        for step in range(steps):
            loss = module(**batch(rank, step)).loss
            last = step == steps - 1
            if last and moment == "after forward":
                break
            loss.backward()
            if last and moment == "before step":
                break
            optimizer.step()
            optimizer.zero_grad()
    found = audit(module, optimizer)
    json.dumps(found.to_json())
    assert str(found).splitlines()[0].endswith(found.configured)
    return found


def agree(found):
    """What all ranks say alike; returns it once."""
    assert all(f.stage == found[0].stage and f.degrees == found[0].degrees and f.configured == found[0].configured for f in found)
    return found[0]


def full_size(**shape):
    return sum(p.numel() for p in tiny_llama(**shape).parameters())


CASES = [
    ("plain", {}, 0, "plain torch"),
    ("ddp", {}, 0, "DistributedDataParallel"),
    ("ddp", {"gradient_as_bucket_view": True}, 0, "DistributedDataParallel"),
    ("zero_redundancy", {}, 1, "DistributedDataParallel, ZeroRedundancyOptimizer of AdamW"),
    ("fsdp", {"strategy": "NO_SHARD"}, 0, "FSDP NO_SHARD"),
    ("fsdp", {"strategy": "SHARD_GRAD_OP"}, 2, "FSDP SHARD_GRAD_OP"),
    ("fsdp", {"strategy": "SHARD_GRAD_OP", "use_orig_params": True}, 2, "FSDP SHARD_GRAD_OP"),
    ("fsdp", {"strategy": "FULL_SHARD"}, 3, "FSDP FULL_SHARD"),
    ("fsdp", {"strategy": "FULL_SHARD", "use_orig_params": True}, 3, "FSDP FULL_SHARD"),
    ("fsdp", {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}, 3, "FSDP FULL_SHARD"),
    ("fsdp2", {"reshard": True}, 3, "FSDP2 fully_shard, reshard_after_forward=True"),
    ("fsdp2", {"reshard": None}, 3, "FSDP2 fully_shard, reshard_after_forward=True"),
    ("fsdp2", {"reshard": False}, 2, "FSDP2 fully_shard, reshard_after_forward=False"),
]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("wrap, options, stage, configured", CASES, ids=["-".join([c[0], *(str(getattr(v, "param_dtype", v)) for v in c[1].values())]) for c in CASES])
def test_each_engine_is_what_it_says(wrap, options, stage, configured, n):
    results = run(measured, n=n, wrap=wrap, options=options)
    found = agree(results)
    size = full_size()
    assert (found.stage, found.configured, found.configured_stage) == (stage, configured, stage)
    assert found.degrees == Partition.from_stage(stage, n)
    assert found.parameters == found.trainable == size and found.frozen == 0 and found.has_moments
    at_rest = {term: degree for term, degree in zip(("exp_avg", "gradients", "weights"), (stage > 0, stage > 1, stage > 1))}
    for term, divided in at_rest.items():
        copies = sum(f.bytes[term] for f in results) / (4 * size)
        assert copies == pytest.approx(1 if divided else n, rel=0.01), term
    assert found.formula["exp_avg"] == pytest.approx(4 / n if stage else 4)
    assert not any("divided unevenly" in note for note in found.notes)


def zerostage(model, stage=3, partition=None, optimizer="AdamW", n=None, **options):
    made = getattr(torch.optim, optimizer)([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return shard(model, made, stage, partition=partition and Partition(*partition), **options)


ZEROSTAGE_CASES = [(stage, n, kind) for stage in (0, 1, 2, 3) for n in (1, 2, 3, 4) for kind in ("fp32", "bf16")]


@pytest.mark.parametrize("stage, n, kind", ZEROSTAGE_CASES)
def test_zerostage_is_the_stage_that_it_was_given(stage, n, kind):
    model = {"dtype": torch.bfloat16} if kind == "bf16" else {}
    results = run(measured, n=n, wrap="zerostage", options={"stage": stage}, model=model)
    found = agree(results)
    expected = stage if n > 1 else 0
    assert (found.stage, found.configured, found.has_moments) == (expected, f"zerostage stage {expected}", True)
    assert found.degrees == Partition.from_stage(stage, n) and found.parameters == full_size()
    d = found.degrees
    textbook = d.bytes_per_parameter() if kind == "bf16" else 4 / d.weights + 4 / d.gradients + 8 / d.optimizer
    assert sum(found.formula.values()) == pytest.approx(textbook)
    held = sum(size for term, size in found.bytes_per_parameter.items() if term != "other")
    assert textbook <= held < 1.05 * textbook  # alignment padding
    assert not any("fit the stages" in note or "divided unevenly" in note for note in found.notes) or n == 1


def trained_parts(rank, n):
    found = []
    for stage in range(4):
        model, optimizer = zerostage(Odd(), stage)
        found.append(audit(model, optimizer))
        for _ in range(2):
            model(torch.ones(2, 3)).backward()
            found.append(audit(model, optimizer))
            optimizer.step()
            found.append(audit(model, optimizer))
            optimizer.zero_grad()
        found.append(audit(model, optimizer))
    return found


def test_B6_parameters_without_a_gradient_are_named():
    for found in run(trained_parts, n=2):
        for stage in range(4):
            made, *within, dropped = found[6 * stage : 6 * stage + 6]
            assert made.without_gradient is dropped.without_gradient is None
            for audited in within:
                # the empty parameter has nothing to train, the frozen ones are not asked
                assert audited.without_gradient == ["unused.weight", "unused.bias"]
                said = "3 of 5 trainable parameters have a gradient; without one on any rank: unused.weight, unused.bias."
                assert said in audited.notes and said in str(audited)


def some_stand_still(rank, n, bare):
    found = []
    for stage in range(4):
        model = nn.Sequential(nn.LayerNorm(64, bias=False), nn.Linear(64, 1, bias=False), nn.Linear(1, 1, bias=False))
        groups = [{"params": model[:2].parameters()}, {"params": model[2].parameters(), "lr": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=1e-3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are no masters
            shard(model, optimizer, stage, precision=Precision(master=torch.bfloat16) if bare else Precision())
        assert audit(model, optimizer).unmoved == []  # nothing is said before the first step
        for _ in range(20):
            weight = model[0].weight
            model(torch.randn(2, 64).bfloat16())
            with gathered(model):
                loss = weight.sum() + model[1].weight.sum() + model[2].weight.sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(audit(model, optimizer))
    return found


def test_J2_parameters_that_never_move_are_named():
    for bare, still in ((True, ["0.weight", "2.weight"]), (False, ["2.weight"])):
        for by_stage in run(some_stand_still, n=2, bare=bare):
            for found in by_stage:
                assert found.unmoved == still
                said = "of 3 trainable parameters have the same bits as before the first step, after 20 steps: "
                assert any(note.startswith(f"{len(still)} {said}{', '.join(still)}.") for note in found.notes)


@pytest.mark.parametrize("partition", [(2, 2, 2), (4, 4, 2), (4, 2, 2), (4, 2, 1), (2, 1, 1)])
def test_zerostage_partitions(partition):
    found = agree(run(measured, n=4, wrap="zerostage", options={"partition": partition}))
    assert found.stage is None and found.degrees == Partition(*partition)


class Odd(nn.Module):
    """Fewer elements than a slice is aligned to, and a frozen, an unused, an empty and a scalar parameter."""

    def __init__(self):
        super().__init__()
        self.used, self.frozen, self.unused = nn.Linear(3, 1), nn.Linear(1, 7), nn.Linear(2, 30)
        self.frozen.requires_grad_(False)
        self.empty, self.scale = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.frozen(self.used(x)).sum() * self.scale + self.empty.sum()


def odd(rank, n, stage, said=None):
    model, optimizer = zerostage(Odd(), stage)
    model(torch.ones(2, 3)).backward()
    optimizer.step()
    if said is not None:
        engine_of(model).world.partition = Partition.from_stage(said, n)
    return audit(model, optimizer), audit(model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [2, 4])
def test_zerostage_with_few_odd_parameters(stage, n):
    for found in zip(*run(odd, n=n, stage=stage)):
        assert agree(found).stage == stage
        assert (found[0].parameters, found[0].frozen) == (4 + 14 + 90 + 0 + 1, 14)


@pytest.mark.parametrize("stage, said", [(0, 3), (1, 2), (2, 0), (3, 1)])
def test_zerostage_is_measured_not_asked(stage, said):
    found = agree([f[0] for f in run(odd, n=2, stage=stage, said=said, keep=False)])
    assert (found.stage, found.configured_stage) == (stage, said)
    assert f"Configured is zerostage stage {said} (stage {said}), measured is stage {stage}." == found.notes[0]


def test_moments_of_the_step():
    """Within SHARD_GRAD_OP's step the whole weights are really there, and at rest they are not."""
    for wrap, options in (("fsdp", {"strategy": "SHARD_GRAD_OP"}), ("fsdp2", {"reshard": False})):
        found = agree(run(measured, n=2, wrap=wrap, options=options, moment="after forward"))
        gathered = next(note for note in found.notes if "gathered at this moment" in note)
        assert found.stage == 2 and found.bytes["other"] >= 4 * full_size()
        assert int(gathered.split()[0].replace(",", "")) >= 4 * full_size()
        at_rest = agree(run(measured, n=2, wrap=wrap, options=options))
        assert not any("gathered at this moment" in note for note in at_rest.notes)
        assert any("100.0% of the weights are divided by 2 at rest but whole from forward" in note for note in at_rest.notes)


def test_before_the_first_step_what_exists_decides():
    found = agree(run(measured, n=2, wrap="zero_redundancy", moment="made"))
    assert found.stage == 1 and not found.has_moments
    assert any("fit the stages 0, 1, 2; 1 is the configured one" in note for note in found.notes)
    assert any("No moments exist yet" in note for note in found.notes)
    assert any("No gradients are held" in note for note in found.notes)
    for wrap, stage in (("fsdp", 3), ("fsdp2", 3), ("ddp", 0)):
        found = agree(run(measured, n=2, wrap=wrap, moment="made"))
        assert (found.stage, found.has_moments) == (stage, False)
        assert found.bytes["exp_avg"] == found.bytes["gradients"] == 0 and "exp_avg" not in found.formula


def test_after_the_step_gradients_are_not_measured():
    found = agree(run(measured, n=2, wrap="zero_redundancy", moment="after step"))
    assert found.stage == 1 and found.has_moments
    assert any("fit the stages 1, 2; 1 is the configured one" in note for note in found.notes)


@pytest.mark.parametrize(
    "wrap, options, degrees",
    [
        ("fsdp", {"strategy": "HYBRID_SHARD", "nodes": 2}, Partition(2, 2, 2)),
        ("fsdp", {"strategy": "_HYBRID_SHARD_ZERO2", "nodes": 2}, Partition(2, 2, 1)),
        ("fsdp2", {"nodes": 2}, Partition(2, 2, 2)),
        ("fsdp2", {"nodes": 2, "reshard": False}, Partition(2, 2, 1)),
        ("fsdp2", {"reshard": 2}, Partition(4, 4, 2)),
    ],
)
def test_hybrids_have_degrees_and_no_stage(wrap, options, degrees):
    found = agree(run(measured, n=4, wrap=wrap, options=options))
    assert (found.stage, found.configured_stage, found.degrees) == (None, None, degrees)


@pytest.mark.parametrize("wrap", ["fsdp", "fsdp2", "zero_redundancy"])
def test_one_rank_divides_nothing(wrap):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (found,) = run(measured, n=1, wrap=wrap)
    assert found.stage == 0 and found.degrees == Partition(1, 1, 1)
    if found.configured_stage:  # FSDP itself falls back to NO_SHARD
        assert "there is one rank" in found.notes[0] and found.configured in found.notes[0]


def in_this_process(rank, n):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fresh = audit(model)
    x, y = features(0, 0)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    return fresh, audit(model, optimizer), sum(p.numel() for p in model.parameters())


def test_plain_model_without_a_process_group():
    fresh, found, size = alone(in_this_process)
    assert fresh.stage == found.stage == 0 and fresh.ranks == 1
    assert fresh.bytes == {"weights": 4 * size, "gradients": 0, "master": 0, "exp_avg": 0, "exp_avg_sq": 0, "other": 0}
    assert found.bytes == {"weights": 4 * size, "gradients": 4 * size, "master": 0, "exp_avg": 4 * size, "exp_avg_sq": 0, "other": 0}
    assert found.bytes_per_parameter["exp_avg"] == 4.0 and found.has_moments
    with pytest.raises(ValueError, match="no parameters"):
        audit(nn.Identity())


def tied_frozen(rank, n):
    model = tiny_llama(tie=True)
    for p in model.model.layers.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model = DistributedDataParallel(model)
    model(**batch(rank, 0)).loss.backward()
    optimizer.step()
    return audit(model, optimizer)


def test_shared_parameters_count_once_and_frozen_ones_apart():
    found = agree(run(tied_frozen, n=2))
    size, untied = full_size(tie=True), full_size()
    assert found.parameters == size == untied - 64 * 32
    assert found.trainable == 64 * 32 + 32 and found.frozen == size - found.trainable
    assert found.stage == 0 and found.bytes["weights"] == 4 * size and found.bytes["exp_avg"] == 4 * found.trainable


def by_hand(rank, n):
    """The usual recipe: bf16 weights, the optimizer over fp32 copies of them."""
    model = mlp(8, 16, 4, dtype=torch.bfloat16)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters)
    x, y = features(rank, 0)
    nn.functional.mse_loss(model(x.bfloat16()), y.bfloat16()).backward()
    for master, p in zip(masters, model.parameters()):
        master.grad = p.grad.float()
    optimizer.step()
    for master in masters:
        master.grad = None
    return audit(model, optimizer)


def test_sixteen_bytes_by_hand():
    found = agree(run(by_hand, n=2))
    assert found.stage == 0
    per_parameter = {t: round(b, 1) for t, b in found.bytes_per_parameter.items() if t != "other"}
    assert per_parameter == {"weights": 2, "gradients": 2, "master": 4, "exp_avg": 4, "exp_avg_sq": 4} == found.formula
    assert any("all master weights and exp_avg and exp_avg_sq" in note and "stage 1 would divide" in note for note in found.notes)


# -- Configured is one thing, real another ---------------------------------------------------


def test_wrap_policy_that_matches_nothing():
    """FSDP keeps its root gathered from forward to backward; a root alone is all of the model."""
    found = agree(run(measured, n=2, wrap="fsdp", options={"policy": "NoSuchLayer"}))
    assert (found.configured_stage, found.stage) == (3, 2)
    assert found.largest_unit == ("the root", 1.0)
    assert "Configured is FSDP FULL_SHARD (stage 3), measured is stage 2" in found.notes[0]
    assert any("The largest unit, the root, is 100.0% of the model: gathering it" in note for note in found.notes)


@pytest.mark.parametrize("root", [True, False])
def test_fully_shard_that_matches_nothing(root):
    found = agree(run(measured, n=2, wrap="fsdp2", options={"wrapped": 0, "root": root, "reshard": None}))
    if root:
        assert (found.configured_stage, found.stage, found.largest_unit) == (3, 2, ("the root", 1.0))
    else:
        assert (found.configured, found.stage) == ("plain torch", 0)


def test_half_of_the_model_left_out():
    options = {"wrapped": 1, "root": False}
    results = run(measured, n=2, wrap="fsdp2", options=options, model={"layers": 4})
    found = agree(results)
    assert found.stage is None and found.degrees is None and found.configured_stage == 3
    note = next(note for note in found.notes if "of the weights are held whole by each of 2 ranks" in note)
    assert "model.layers.1" in note or "lm_head" in note or "embed_tokens" in note
    shard = sum(p.numel() for p in blocks(tiny_llama())[0].parameters())
    share = 1 - shard / full_size(layers=4)
    assert note.startswith(f"{share:.1%}")


@pytest.mark.parametrize("wrap", ["fsdp", "fsdp2"])
def test_optimizer_made_before_sharding(wrap):
    found = agree(run(measured, n=2, wrap=wrap, options={"early": True}))
    assert any("not parameters of the model" in note and "made before" in note for note in found.notes)
    assert not found.has_moments and any("No moments exist yet" in note for note in found.notes)


def one_rank_hoards(rank, n):
    model = mlp(8, 16, 4)
    optimizer = adamw(model)
    x, y = features(rank, 0)
    nn.functional.mse_loss(model(x), y).backward()
    if rank == 1:
        model.register_buffer("cache", torch.zeros(1000))
        optimizer.step()
    return audit(model, optimizer)


def test_a_rank_that_holds_more_is_named():
    results = run(one_rank_hoards, n=2)
    assert results[0].notes == results[1].notes and results[0].stage == results[1].stage
    assert any(note.startswith("Rank 1 holds") and "mostly more other" in note for note in results[0].notes)


def views_of_one_buffer(rank, n):
    """Parameters and moments that are views of flat buffers longer than they are."""
    model = mlp(8, 16, 4)
    flat = torch.zeros(512)
    start = 0
    for p in model.parameters():
        view = flat[start : start + p.numel()].view(p.shape)
        p.data = view.copy_(p.detach())
        start += p.numel()
    return audit(model), start


def test_a_storage_counts_once_and_whole():
    found, size = alone(views_of_one_buffer)
    assert found.bytes["weights"] == 4 * 512 and found.parameters == size < 512


def on_meta(rank, n):
    with torch.device("meta"):
        model = mlp()
    return audit(nn.Sequential(model, nn.Linear(2, 2)))


def test_meta_parameters_hold_nothing():
    found = alone(on_meta)
    assert found.bytes["weights"] == 4 * 6


def test_table():
    found = agree(run(measured, n=2, wrap="fsdp2"))
    lines = str(found).splitlines()
    assert lines[0] == "measured stage 3 on 2 ranks; configured FSDP2 fully_shard, reshard_after_forward=True"
    assert lines[1] == "divided by: optimizer 2, gradients 2, weights 2"
    rows = [line for line in lines if line.split()[0] in (*found.bytes, "total", "this")]
    assert len({len(row) for row in rows}) == 1 and len(rows) == 8
    as_json = found.to_json()
    assert as_json["stage"] == 3 and as_json["degrees"] == {"optimizer": 2, "gradients": 2, "weights": 2}
    assert all(isinstance(size, int) for size in as_json["bytes"].values())
