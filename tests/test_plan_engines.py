"""The closed form beside what torch's engines really allocate: FSDP2, FSDP1, DDP, and the activations of families.

Bytes come from the allocator's events. FSDP's collectives go to torch's fake process group: the engine does all its
work, for any number of ranks, and on one thread, whose frees the profiler sees (gloo frees and copies on threads of
its own). DDP's reducer needs a real one: two ranks over gloo.
"""

from __future__ import annotations

import gc
import time
from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from bench.rank import Live, _allocations
from zerostage.partition import Partition
from zerostage.planning.memory.buffers import Buffers
from zerostage.planning.memory.track import Track
from zerostage.planning.memory.walk import _backward, _forward, parts, walk
from zerostage.planning.model.resolve import resolve
from zerostage.planning.run import Run

ROWS, LENGTH = 2, 128
SIZES = dict(
    vocab_size=1024, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, intermediate_size=688,
    max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
GEMMA = dict(SIZES, head_dim=32, tie_word_embeddings=True, query_pre_attn_scalar=32, sliding_window=512)
GPT2 = dict(
    vocab_size=1024, n_embd=256, n_layer=4, n_head=8, n_positions=512, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
CLASSIC = dict(
    vocab_size=1024, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, intermediate_size=1024,
    max_position_embeddings=512, residual_dropout=0.0, embedding_dropout=0.0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
FAMILIES = {
    "llama": SIZES,
    "qwen2": SIZES,
    "qwen3": dict(SIZES, head_dim=32),
    "gpt2": GPT2,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "phi3": SIZES,
    "starcoder2": CLASSIC,
    "opt": dict(CLASSIC, ffn_dim=1024, dropout=0.0, word_embed_proj_dim=256),
    "mixtral": dict(SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": dict(SIZES, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256),
}


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def configuration(family, attention="sdpa", vocab=1024):
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[family](**{**FAMILIES[family], "vocab_size": vocab}, use_cache=False)
    config._attn_implementation = attention
    return config


def built(family, checkpointing="none", attention="sdpa", dtype=torch.float32, vocab=1024):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(configuration(family, attention, vocab)).to(dtype).train()
    if checkpointing != "none":
        options = {"context_fn": every_second_product} if checkpointing == "selective" else {}
        for block in blocks(model):
            block.forward = partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False, **options)
    return model


def blocks(model):
    return next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 4)


def every_second_product():
    """torchtitan's policy: the results of attention and of the first, third, ... aten.mm are kept."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    count = {True: 0, False: 0}

    def policy(ctx, operation, *_, **__):
        product = operation == torch.ops.aten.mm.default
        count[ctx.is_recompute] += product
        attention = operation == torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return (
            CheckpointPolicy.MUST_SAVE
            if attention or product and count[ctx.is_recompute] % 2
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return create_selective_checkpoint_contexts(policy)


def batch(step=0):
    tokens = torch.randint(3, 256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens.clone()}


def measured(run):
    """{phase: (most bytes, bytes at its end)} of the phases that `run(mark)` marks, and 'start' before the first."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        times = []
        run(lambda name: times.append((time.time_ns(), name)))
    found, live, rest = {}, Live(), times[1:]
    most, began = 0, times[0][0]
    events = _allocations(profiler.profiler.kineto_results.experimental_event_tree())
    for event in sorted(events, key=lambda event: event.start_time_ns):
        while rest and event.start_time_ns >= rest[0][0]:
            found[rest.pop(0)[1]], most = (most, live.bytes), live.bytes
        live.change(event.extra_fields.ptr, event.extra_fields.alloc_size)
        most = max(most, live.bytes) if event.start_time_ns >= began else live.bytes
    for _, name in rest:
        found[name], most = (most, live.bytes), live.bytes
    return found


# Activations


class Alone(Buffers):
    """One process that drops each gradient as soon as it is there, and whose weights are not counted."""

    def sizes(self):
        return dict.fromkeys(super().sizes(), 0)

    def arrive(self, unit, elements):
        self.track.change("reduce", elements * self.c)
        self.track.change("reduce", -elements * self.c)


def expected_activations(family, checkpointing, dtype, attention, vocab):
    architecture = resolve(configuration(family, vocab=vocab).to_dict())
    kernel = "eager" if attention == "eager" else "flash"
    run = Run(micro_batch=ROWS, sequence=LENGTH, checkpointing=checkpointing, attention=kernel, weights=dtype, master="none")
    track = Track()
    track.mark("forward", "forward")
    buffers = Alone(architecture, run, Partition.from_stage(0, 1), 1, track)
    sequence = parts(architecture, run, buffers)
    _forward(sequence, run, buffers, track)
    saved = track.total
    track.phases.clear()
    _backward(sequence, run, buffers, track)
    return saved, max(track.phases.values())


def passes(model):
    """A forward and a backward, for `measured`."""
    data = batch()

    def run(mark):
        mark("start")
        loss = model(**data).loss
        mark("forward")
        loss.backward()
        mark("backward")

    return run


#: The peak is in the loss with the larger vocabulary, and else in a block. (In bf16 the CPU's products take scratch memory.)
@pytest.mark.parametrize(
    "checkpointing, dtype, vocab", [("none", "bf16", 2048), ("selective", "bf16", 2048), ("full", "fp32", 256)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_activations(family, checkpointing, dtype, vocab):
    attention = "eager" if family == "gemma2" else "sdpa"
    model = built(family, checkpointing, attention, {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype], vocab)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    found = measured(passes(model))
    # each checkpoint keeps the CPU's random state
    states = 0 if checkpointing == "none" else len(blocks(model)) * torch.get_rng_state().numel()
    saved, peak = expected_activations(family, checkpointing, dtype, attention, vocab)
    assert saved == pytest.approx(found["forward"][1] - states, rel=0.01)
    assert peak == pytest.approx(found["backward"][0] - states, rel=0.03)


def test_eager_attention_saves_the_scores():
    model = built("llama", attention="eager", dtype=torch.bfloat16)
    assert expected_activations("llama", "none", "bf16", "eager", 1024)[0] == pytest.approx(measured(passes(model))["forward"][1], rel=0.01)


# Engines


def train(make, mark, steps=3):
    model, optimizer, context = make()
    for step in range(steps):
        data = batch(step)
        gc.collect()
        last = step == steps - 1
        note = mark if last else lambda _: None
        note("start")
        with context():
            loss = model(**data).loss
        note("forward")
        loss.backward()
        note("backward")
        del loss
        optimizer.step()
        note("step")
        optimizer.zero_grad()
        gc.collect()
        note("rest")


def adamw(parameters, kernel):
    return torch.optim.AdamW(parameters, lr=1e-3, **{kernel: True})


def fsdp2(family, checkpointing, precision, reshard, kernel):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = built(family, checkpointing, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    mixed = {"mixed": dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), "low": dict(param_dtype=torch.bfloat16)}
    mixed["low"]["reduce_dtype"] = torch.bfloat16
    options = dict(
        mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
        mp_policy=MixedPrecisionPolicy(**mixed.get(precision, {})),
        reshard_after_forward=reshard,
    )
    for block in blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model, adamw(model.parameters(), kernel), partial(torch.autocast, "cpu", enabled=False)


def fsdp1(family, checkpointing, precision, reshard, kernel):
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = built(family, checkpointing)
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(blocks(model)[0])}),
        sharding_strategy=ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    return model, adamw(model.parameters(), kernel), partial(torch.autocast, "cpu", enabled=False)


def trained(rank, n, engine, size=None, **options):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if size is None:
        return measured(lambda mark: train(partial(globals()[engine], **options), mark))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        return measured(lambda mark: train(partial(globals()[engine], **options), mark))
    finally:
        dist.destroy_process_group()


#: dtypes of what computes, of what is updated, and whether gradients travel in fp32
PRECISIONS = {
    "mixed": dict(weights="bf16", master="fp32", fp32_reduce=True),
    "low": dict(weights="bf16", master="fp32", fp32_reduce=False),
    "bf16": dict(weights="bf16", master="none"),
    "fp32": dict(weights="fp32", master="none"),
}


def expected(engine, stage, size, family, checkpointing, **options):
    """{phase: bytes at most}; the loss counts where it is computed, in forward, and where it begins backward."""
    architecture = resolve(configuration(family).to_dict())
    run = Run(micro_batch=ROWS, sequence=LENGTH, checkpointing=checkpointing, engine=engine, **options)
    track = walk(architecture, run, Partition.from_stage(stage, size), size)
    found = {}
    for moment in track.moments:
        name = "forward" if moment.at == "loss" else "backward" if moment.at.startswith("backward") else moment.phase
        found[name] = max(found.get(name, 0), sum(moment.bytes.values()))
    return found


FSDP = [
    ("fsdp2", 3, 2, "llama", "none", "mixed", "fused"),
    ("fsdp2", 3, 4, "llama", "full", "mixed", "foreach"),
    ("fsdp2", 2, 4, "llama", "none", "low", "fused"),
    ("fsdp2", 2, 4, "llama", "full", "mixed", "fused"),
    ("fsdp2", 3, 4, "qwen3", "selective", "mixed", "fused"),
    ("fsdp2", 3, 4, "llama", "full", "bf16", "fused"),
    ("fsdp2", 3, 4, "gpt2", "full", "mixed", "fused"),
    ("fsdp2", 3, 8, "llama", "full", "fp32", "fused"),
    ("fsdp1", 3, 2, "llama", "none", "low", "fused"),
    ("fsdp1", 3, 4, "llama", "full", "low", "foreach"),
    ("fsdp1", 2, 4, "llama", "none", "low", "fused"),
    ("fsdp1", 2, 4, "llama", "full", "low", "fused"),
]


@pytest.mark.parametrize("engine, stage, size, family, checkpointing, precision, kernel", FSDP)
def test_fsdp(engine, stage, size, family, checkpointing, precision, kernel):
    options = dict(family=family, checkpointing=checkpointing)
    found = ranks.run(
        trained, n=1, group=False, engine=engine, size=size, precision=precision, reshard=stage == 3, kernel=kernel, **options
    )[0]
    say = expected(engine, stage, size, optimizer_kernel=kernel, **options, **PRECISIONS[precision])
    assert say["backward"] == pytest.approx(found["backward"][0], rel=0.02)
    assert say["step"] == pytest.approx(found["step"][0], rel=0.005)


def ddp(view, autocast, zero, kernel, checkpointing):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = torch.nn.parallel.DistributedDataParallel(built("llama", checkpointing), gradient_as_bucket_view=view)
    if zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, **{kernel: True})
    else:
        optimizer = adamw(model.parameters(), kernel)
    return model, optimizer, partial(torch.autocast, "cpu", torch.bfloat16, enabled=autocast)


@pytest.mark.parametrize(
    "view, autocast, zero, kernel, checkpointing",
    [
        (False, False, False, "fused", "none"),
        (True, False, False, "foreach", "none"),
        (False, True, False, "fused", "none"),
        (True, True, False, "fused", "none"),
        (False, False, True, "fused", "none"),
    ],
)
def test_ddp(view, autocast, zero, kernel, checkpointing):
    options = dict(view=view, autocast=autocast, zero=zero, kernel=kernel, checkpointing=checkpointing)
    # gloo frees on threads of its own, which the profiler does not always see: what it says is never too little
    several = [one for _ in range(2) for one in ranks.run(trained, n=2, engine="ddp", **options)]
    found = {phase: min(one[phase] for one in several) for phase in several[0]}
    dtypes = dict(weights="bf16", master="fp32") if autocast else PRECISIONS["fp32"]
    say = expected("ddp", int(zero), 2, "llama", checkpointing, optimizer_kernel=kernel, bucket_view=view, **dtypes)
    assert say["forward"] == pytest.approx(found["forward"][0], rel=0.01)
    assert say["backward"] == pytest.approx(found["backward"][0], rel=0.02)
    assert say["step"] == pytest.approx(found["step"][0], rel=0.005)


@pytest.mark.parametrize("loss", ["whole", "fused", "chunked", "chunked_head"])
@pytest.mark.parametrize("engine, stage", [("fsdp2", 3), ("fsdp1", 2), ("ddp", 0), ("deepspeed", 3), ("megatron", 1), ("zerostage", 2)])
def test_what_a_step_takes_it_gives_back(engine, stage, loss):
    architecture = resolve(configuration("llama").to_dict())
    for checkpointing in ("none", "selective", "full"):
        for fused, attention in ((False, "flash"), (True, "eager")):
            options = dict(engine=engine, loss=loss, checkpointing=checkpointing, fused_kernels=fused, attention=attention)
            track = walk(architecture, Run(sequence=256, accumulation=2, **options), Partition.from_stage(stage, 4), 4)
            assert all(size >= 0 for moment in track.moments for size in moment.bytes.values())
            passing = ("activations", "logits", "gathered", "reduce", "optimizer_temporaries")
            assert {term: track.now[term] for term in passing if track.now[term]} == {}
