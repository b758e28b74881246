"""What the audit says about precision, against weights that really stayed as they were."""

import json

import pytest
import torch
from models import batch, joined_batch, tiny_llama
from ranks import alone, run
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from zerostage import Precision, audit, precision_audit, shard

BF16 = torch.bfloat16
NORMS = [f"model.layers.{i}.{name}_layernorm.weight" for i in (0, 1) for name in ("input", "post_attention")]
NORMS.append("model.norm.weight")
ALL = [name for name, _ in tiny_llama().named_parameters()]


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-4, "weight_decay": 0.0, "foreach": True, **options})


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def train(model, optimizer, steps=3, rank=0, data=batch):
    """Train; the weights before and after the last step."""
    for step in range(steps):
        data_of_step = data(rank, step)
        model(**data_of_step).loss.backward()
        before = values(model)
        optimizer.step()
        optimizer.zero_grad()
    return before, values(model)


def plain(rank, n, dtype=None, lr=1e-4):
    model = tiny_llama(dtype=dtype)
    optimizer = adamw(model, lr=lr)
    before, after = train(model, optimizer)
    return audit(model, optimizer), before, after, optimizer


@pytest.mark.parametrize("lr, low, high", [(1e-5, 0.8, 0.99), (1e-4, 0.1, 0.6), (1e-3, 0.0, 0.1)])
def test_the_share_of_lost_updates_is_that_of_weights_that_stayed(lr, low, high):
    found, before, after, optimizer = alone(plain, dtype=BF16, lr=lr)
    given = [state["exp_avg"] != 0 for state in optimizer.state.values()]
    stayed = sum(int(((a == b) & g).sum()) for a, b, g in zip(before, after, given))
    really = stayed / sum(int(g.sum()) for g in given)
    assert low < really < high
    assert found.precision.lost == pytest.approx(really, abs=0.01)
    assert found.precision.would_be_lost is None
    assert found.precision.sampled == sum(int(g.sum()) for g in given)
    share = f"{found.precision.lost:.1%}"
    assert f"Rounding to 16 bits loses an estimated {share} of the updates of weights without masters." in found.notes


def test_what_would_be_lost_is_what_rounding_of_each_update_loses():
    found, before, after, _ = alone(plain)
    lost = given = 0
    for a, b in zip(before, after):
        kept = a.to(BF16)
        lost += int(((kept.float() + (b - a)).to(BF16) == kept)[a != b].sum())
        given += int((a != b).sum())
    assert found.precision.would_be_lost == pytest.approx(lost / given, abs=0.01) and 0.1 < lost / given < 0.6
    assert found.precision.lost is None and found.precision.without_master == []
    assert found.precision.narrow_moments == found.precision.narrow_norms == found.precision.narrow_tables == []
    assert found.precision.narrow_moments_share == found.precision.without_master_share == 0


def test_everything_that_is_narrow_is_named():
    found, *_ = alone(plain, dtype=BF16)
    assert found.precision.without_master == found.precision.narrow_moments == ALL
    assert found.precision.without_master_share == found.precision.narrow_moments_share == 1
    assert found.precision.narrow_norms == NORMS
    assert found.precision.narrow_tables == ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]
    text = str(found)
    for part in ("100.0% of the trainable weights are kept in 16 bits", "model.norm.weight", "inv_freq", "100.0% of the moments"):
        assert part in text, text
    assert json.loads(json.dumps(found.to_json()))["precision"]["narrow_norms"] == NORMS


def mixed(rank, n, how):
    model = tiny_llama()
    if how == "part":
        model.lm_head.to(BF16)
        model.model.norm.register_forward_hook(lambda module, args, output: output.to(BF16))
        optimizer = adamw(model)
    elif how == "copies":  # the optimizer has fp32 copies of a bf16 model's weights
        model.to(BF16)
        copies = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
        optimizer = torch.optim.AdamW(copies, lr=1e-4)
    elif how == "state":  # the optimizer keeps them in its state
        model.to(BF16)
        optimizer = adamw(model)
        for p in model.parameters():
            optimizer.state[p]["master_param"] = p.detach().float()
    else:
        model.to(BF16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9 if how == "momentum" else 0)
    if how not in ("copies", "state"):
        train(model, optimizer)
    return audit(model, optimizer), sum(p.numel() for p in model.parameters()), model.lm_head.weight.numel()


def test_masters_wherever_an_optimizer_keeps_them_and_weights_partly_without():
    found, whole, head = alone(mixed, how="part")
    assert found.precision.without_master == found.precision.narrow_moments == ["lm_head.weight"]
    assert found.precision.without_master_share == found.precision.narrow_moments_share == head / whole
    assert found.precision.lost is not None and found.precision.would_be_lost is not None
    for how in ("copies", "state"):
        assert alone(mixed, how=how)[0].precision.without_master == [], how
    found, *_ = alone(mixed, how="momentum")
    assert found.precision.without_master == found.precision.narrow_moments == ALL and 0 < found.precision.lost < 1
    found, *_ = alone(mixed, how="sgd")  # no state, so no update to tell
    assert found.precision.without_master == ALL and found.precision.lost is None and found.precision.narrow_moments_share is None


def test_nothing_is_told_before_the_first_step_at_rate_zero_or_without_an_optimizer():
    model = tiny_llama(dtype=BF16)
    optimizer = adamw(model, lr=0.0)
    found = audit(model, optimizer).precision
    assert (found.lost, found.would_be_lost, found.sampled, found.narrow_moments_share) == (None, None, 0, None)
    train(model, optimizer, 1)
    assert audit(model, optimizer).precision.lost is None
    assert audit(model).precision.without_master is None


def test_a_sample_says_nearly_the_same(monkeypatch):
    whole = alone(plain, dtype=BF16)[0].precision
    monkeypatch.setattr(precision_audit, "SAMPLE", 4000)
    part = alone(plain, dtype=BF16)[0].precision
    assert whole.sampled > 3 * part.sampled > 3000
    assert part.lost == pytest.approx(whole.lost, abs=0.05)


# -- The engines -----------------------------------------------------------------------------


def engine(rank, n, wrap, dtype=None, used=None, **options):
    """Three steps under an engine; `dtype` is that of the weights, `used` that of FSDP's mixed precision."""
    model = tiny_llama(dtype=dtype)
    kinds = {type(model.model.layers[0])}
    if wrap == "zerostage":
        model, optimizer = shard(model, adamw(model), **options)
    elif wrap in ("ddp", "zero_redundancy"):
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        settings = dict(lr=1e-4, weight_decay=0.0)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **settings) if wrap != "ddp" else adamw(model)
    elif wrap == "fsdp":
        precision = used and MixedPrecision(param_dtype=used)
        options.update(auto_wrap_policy=ModuleWrapPolicy(kinds), mixed_precision=precision, device_id=torch.device("cpu"))
        model = FullyShardedDataParallel(model, **options)
        optimizer = adamw(model)
    else:
        policy = MixedPrecisionPolicy(param_dtype=used)
        for block in model.model.layers:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = adamw(model)
    for step in range(3):
        model(**batch(rank, step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return audit(model, optimizer).precision


ENGINES = [
    ("ddp", {}),
    ("zero_redundancy", {}),
    ("fsdp", {}),
    ("fsdp", {"use_orig_params": True}),
    ("fsdp2", {}),
    ("zerostage", {"stage": 3}),
]
IDS = ["-".join([wrap, *map(str, options)]) for wrap, options in ENGINES]


def joined(rank, n):
    model = tiny_llama()
    optimizer = adamw(model)
    train(model, optimizer, data=lambda rank, step: joined_batch(2, step))
    return audit(model, optimizer).precision


@pytest.mark.parametrize("wrap, options", ENGINES, ids=IDS)
def test_each_engine_in_fp32_says_what_plain_torch_says_of_the_joined_batch(wrap, options):
    expected = alone(joined)
    one, other = run(engine, n=2, wrap=wrap, **options)
    assert one == other
    assert one.would_be_lost == pytest.approx(expected.would_be_lost, abs=0.005)
    copies = 2 if wrap == "ddp" else 1  # of the moments, on two ranks
    assert one.sampled == pytest.approx(copies * expected.sampled, rel=0.01)
    assert one.without_master == one.narrow_moments == one.narrow_norms == [] and one.lost is None


@pytest.mark.parametrize("wrap, options", ENGINES, ids=IDS)
def test_each_engine_in_bf16_names_what_has_no_master(wrap, options):
    if wrap == "zerostage":
        options = {**options, "precision": Precision(master=BF16)}
    one, other = run(engine, n=2, wrap=wrap, dtype=BF16, **options)
    assert one == other
    assert sorted(one.without_master) == sorted(one.narrow_moments) == sorted(ALL)
    assert one.without_master_share == one.narrow_moments_share == 1
    assert sorted(one.narrow_norms) == sorted(NORMS) and "model.rotary_emb.inv_freq" in one.narrow_tables
    assert 0.1 < one.lost < 0.6 and one.would_be_lost is None


def test_masters_keep_what_would_be_lost_and_norms_that_are_cast_are_named():
    shares = []
    for stage in range(4):
        found = run(engine, n=2, wrap="zerostage", stage=stage, precision=Precision())[0]
        assert found.without_master == found.narrow_moments == found.narrow_tables == [] and found.narrow_norms == NORMS
        shares.append(found.would_be_lost)
    assert len(set(shares)) == 1 and 0.1 < shares[0] < 0.6
    for wrap in ("fsdp", "fsdp2"):
        found = run(engine, n=2, wrap=wrap, used=BF16)[0]
        assert found.without_master == found.narrow_moments == [] and sorted(found.narrow_norms) == sorted(NORMS), wrap
        assert found.would_be_lost == pytest.approx(shares[0], abs=0.02), wrap
