"""DeepSpeed's and Megatron-LM's memory in closed form, against what DeepSpeed held, and published figures."""

from __future__ import annotations

import pytest
from deepspeed_bytes import CASES

from zerostage.partition import Partition
from zerostage.planning.memory.deepspeed import DeepSpeed
from zerostage.planning.memory.layers import Layers
from zerostage.planning.memory.megatron import Megatron
from zerostage.planning.memory.track import Track
from zerostage.planning.memory.walk import walk
from zerostage.planning.model.architecture import Architecture, Block, Weight
from zerostage.planning.run import Run

GiB = 2**30

#: By case of `deepspeed_bytes.py`, which printed them: bytes per parameter at rest, and at most in forward, backward and step.
MEASURED = [
    (14.0, 14.518, 18.0, 20.0),
    (8.0, 8.518, 60.512, 12.026),
    (8.0, 8.518, 60.509, 12.026),
    (58.536, 63.0, 62.642, 61.535),
    (8.0, 8.67, 11.032, 12.026),
    (8.0, 8.617, 9.666, 12.026),
    (8.152, 9.283, 9.398, 11.152),
    (12.0, 12.518, 16.0, 16.0),
    (8.0, 8.518, 10.984, 10.424),
    (9.152, 10.352, 10.587, 11.152),
    (8.0, 10.67, 11.032, 12.026),
    (8.0, 9.644, 10.666, 12.026),
    (8.152, 9.326, 9.428, 11.152),
    (8.0, 8.617, 9.818, 12.026),
    (8.0, 8.664, 9.495, 12.026),
    (8.152, 9.017, 9.115, 11.152),
    (8.152, 12.207, 10.429, 11.152),
    (8.152, 9.256, 9.395, 12.152),
    (8.232, 9.319, 9.455, 9.284),
]


def llama(hidden: int, layers: int, heads: int, kv: int, ffn: int, vocab: int) -> Architecture:
    head_dim = hidden // heads
    shapes = {
        "q": (hidden, hidden), "k": (kv * head_dim, hidden), "v": (kv * head_dim, hidden), "o": (hidden, hidden),
        "gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn), "norm1": (hidden,), "norm2": (hidden,),
    }  # fmt: skip
    blocks = tuple(Block(f"layers.{i}", heads, kv, head_dim, ffn) for i in range(layers))
    inside = [Weight((f"{block.name}.{name}.weight",), shape) for block in blocks for name, shape in shapes.items()]
    ends = Weight(("norm.weight",), (hidden,)), Weight(("head.weight",), (vocab, hidden))
    return Architecture("llama", "llama", hidden, vocab, blocks, (Weight(("embed.weight",), (vocab, hidden)), *inside, *ends))


def encoder(hidden: int, layers: int, heads: int, vocab: int, positions: int) -> Architecture:
    """DeepSpeedExamples, training/bf16_master_weight/train.py."""
    h, f = hidden, 4 * hidden
    shapes = {
        "in_proj.weight": (3 * h, h), "out_proj.weight": (h, h), "ff.0.weight": (f, h), "ff.2.weight": (h, f),
        "in_proj.bias": (3 * h,), "out_proj.bias": (h,), "ff.0.bias": (f,), "ff.2.bias": (h,),
        "norm1.weight": (h,), "norm1.bias": (h,), "norm2.weight": (h,), "norm2.bias": (h,),
    }  # fmt: skip
    names = [f"layers.{i}" for i in range(layers)]
    blocks = tuple(Block(name, heads, heads, h // heads, f, gated=False, norm="layer", activation="gelu") for name in names)
    inside = [Weight((f"{name}.{part}",), shape) for name in names for part, shape in shapes.items()]
    before = Weight(("embedding.weight",), (vocab, h)), Weight(("pos_embedding.weight",), (positions, h))
    after = Weight(("output_proj.weight",), (vocab, h)), Weight(("output_proj.bias",), (vocab,))
    return Architecture("encoder", "gpt2", h, vocab, blocks, (*before, *inside, *after))


@pytest.mark.parametrize(("case", "measured"), list(zip(CASES, MEASURED, strict=True)))
def test_equals_what_deepspeed_held(case: tuple[dict, dict], measured: tuple[float, float, float, float]) -> None:
    zero, other = case
    rest, forward, backward, step = measured
    model = llama(512, 6, 8, 4, 1408, 2048)
    options = {"checkpointing": "none", **other, **{key: value for key, value in zero.items() if key != "stage"}}
    track = walk(model, Run(sequence=64, engine="deepspeed", **options), Partition.from_stage(zero["stage"], 2), 2)
    count = model.parameters
    assert track.total / count == pytest.approx(rest, rel=0.01)
    assert track.peak / count == pytest.approx(max(forward, backward, step), rel=0.03)
    assert track.phases["forward"] / count == pytest.approx(forward, rel=0.05)
    if not (zero["stage"] == 1 and other.get("gradients")):  # there gloo's all-gather has a buffer that is larger than the rest
        assert track.phases["step"] / count == pytest.approx(step, rel=0.02)
    if zero["stage"] == 3 and "stage3_max_live_parameters" not in zero and other:
        return  # everything is gathered ahead at once; when it is let go of in backward is not followed
    assert max(track.phases["loss"], track.phases["backward"]) / count == pytest.approx(backward, rel=0.05)


@pytest.mark.parametrize(("master", "end", "peak"), [("fp32", 25.74, 31.38), ("bf16", 16.17, 18.93)])
def test_published_zero_3_of_6_86_billion_on_four_h100(master: str, end: float, peak: float) -> None:
    """The size of its bucket is not printed. 1e8 elements explain what is there beside 16 (10) bytes per parameter."""
    run = Run(engine="deepspeed", sequence=512, master=master, reduce_bucket_size=100_000_000)
    track = walk(encoder(4096, 32, 32, 50000, 512), run, Partition.from_stage(3, 4), 4)
    assert track.total / GiB == pytest.approx(end, rel=0.005)
    assert track.peak / GiB == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [4, 16, 64])
def test_states_are_those_of_the_zero_paper(stage: int, ranks: int) -> None:
    """Rajbhandari et al. 2020, table 1: 7.5e9 parameters, 16 bytes each on one rank. Buffers are not in it."""
    count = 7_500_000_000
    model = Architecture("7.5B", "parameters", 0, 0, (), (Weight(("all",), (count,)),))
    sizes = DeepSpeed(model, Run(engine="deepspeed"), Partition.from_stage(stage, ranks), ranks, Track()).sizes()
    divided = {1: (1, 1), 2: (1, ranks), 3: (ranks, ranks)}[stage]
    states = 2 * count / divided[0] + 2 * count / divided[1] + 12 * count / ranks
    assert sum(sizes.values()) - sizes["buffers"] == pytest.approx(states)


def test_buckets_are_as_large_as_asked_for_whatever_the_model() -> None:
    model = llama(512, 2, 8, 8, 1408, 2048)
    small, default = (
        walk(model, Run(engine="deepspeed", sequence=64, reduce_bucket_size=size), Partition.from_stage(3, 2), 2)
        for size in (10_000_000, None)
    )
    assert default.total - small.total == 2 * 490_000_000


def test_overlapping_takes_a_second_bucket() -> None:
    model = llama(512, 2, 8, 8, 1408, 2048)
    one, two = (
        walk(model, Run(engine="deepspeed", sequence=64, overlap_comm=overlap), Partition.from_stage(2, 2), 2)
        for overlap in (False, True)
    )
    assert two.phases["backward"] - one.phases["backward"] == 2 * 500_000_000


def test_stage_2_keeps_gradients_of_whole_weights() -> None:
    """Each of 64 ranks keeps all weights that reach into its slice: here the whole embedding, of 23 slices, and more."""
    model = llama(512, 1, 8, 8, 1408, 8192)
    sizes = DeepSpeed(model, Run(engine="deepspeed"), Partition.from_stage(2, 64), 64, Track()).sizes()
    assert 2 * 8192 * 512 <= sizes["gradients"] < 2 * (8192 * 512 + 2 * 512 * 1408)
    fp32 = DeepSpeed(model, Run(engine="deepspeed", gradients="fp32"), Partition.from_stage(2, 64), 64, Track()).sizes()
    assert fp32["gradients"] == 4 * model.parameters // 64


def test_offloaded_states_leave_weights_and_buckets_on_the_card() -> None:
    model = llama(512, 6, 8, 4, 1408, 2048)
    for offload, weights in (("optimizer", model.parameters), ("optimizer+weights", 0)):
        run = Run(engine="deepspeed", offload=offload, stage3_param_persistence_threshold=0)
        sizes = DeepSpeed(model, run, Partition.from_stage(3, 2), 2, Track()).sizes()
        assert {term: size for term, size in sizes.items() if size} == {
            **({"weights": weights} if weights else {}),
            "buffers": 2 * 500_000_000,
        }


@pytest.mark.parametrize(("gradients", "whole", "divided"), [(None, 6, 12), ("bf16", 4, 12)])
def test_megatron_bytes_per_parameter(gradients: str | None, whole: int, divided: int) -> None:
    """Megatron-LM's table of the distributed optimizer: 6 + 12/d (4 + 12/d with bf16 gradients), 18 (16) without."""
    model = llama(512, 6, 8, 4, 1408, 2048)
    for stage, ranks in ((0, 8), (1, 8), (1, 64)):
        run = Run(engine="megatron", gradients=gradients, sequence=64)
        track = walk(model, run, Partition.from_stage(stage, ranks), ranks)
        d = ranks if stage else 1
        assert 0 <= track.total - (model.parameters * whole + model.parameters * divided // d) <= 4  # the loss, an fp32 number
    half = Megatron(model, Run(engine="megatron", tensor=2, gradients=gradients), Partition.from_stage(1, 8), 8, Track()).sizes()
    assert sum(half.values()) == pytest.approx(model.parameters / 2 * (whole + divided / 8))


@pytest.mark.parametrize("tensor", [1, 8])
def test_activations_of_a_layer_are_korthikantis(tensor: int) -> None:
    """Korthikanti et al. 2022, equation 4: s b h / t x 34 bytes, 2 of them dropout masks, which no longer exist."""
    model = encoder(4096, 1, 32, 51200, 2048)
    run = Run(engine="megatron", implementation="megatron", sequence=2048, checkpointing="none", tensor=tensor)
    tape = Layers(model, run).block(model.blocks[0])
    log_sum_exp = 4 * 2048 * 32 // tensor
    means = 2 * 8 * 2048 // tensor
    assert 0 <= tape.saved() + tape.start.size - 32 * 2048 * 4096 // tensor <= log_sum_exp + means


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", ["none", "optimizer", "optimizer+weights"])
@pytest.mark.parametrize("bucket", [1000, 1_500_000, None])
def test_nothing_is_freed_twice_and_nothing_stays(stage: int, offload: str, bucket: int | None) -> None:
    model = llama(512, 3, 8, 4, 1408, 2048)
    for gradients in (None, "fp32"):
        for accumulation in (1, 2):
            run = Run(
                engine="deepspeed", sequence=64, offload=offload, gradients=gradients, accumulation=accumulation,
                reduce_bucket_size=bucket, overlap_comm=True,
            )  # fmt: skip
            track = walk(model, run, Partition.from_stage(stage, 4), 4)
            assert min(min(moment.bytes.values()) for moment in track.moments) >= 0
            assert min(track.now.values()) >= 0
            assert {term: track.now[term] for term in ("gathered", "reduce", "optimizer_temporaries")} == {
                "gathered": 0, "reduce": 0, "optimizer_temporaries": 0,
            }  # fmt: skip
