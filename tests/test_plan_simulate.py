"""The simulation against what real ranks over gloo really allocate, and what it promises beyond them."""

from __future__ import annotations

import resource
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from allocations import Allocations, live_storages, recorded
from ranks import run
from torch import nn

import zerostage
from zerostage import collectives
from zerostage.mistakes import InputError
from zerostage.planning.memory.track import Track
from zerostage.planning.memory.walk import walk
from zerostage.planning.memory.zerostage import Zerostage
from zerostage.planning.model.resolve import resolve
from zerostage.planning.run import Run
from zerostage.planning.simulation.builders import builder
from zerostage.planning.simulation.recompute import use_checkpointing, use_chunked_loss
from zerostage.planning.simulation.simulate import Simulation, of, simulate
from zerostage.planning.simulation.steps import TERMS

VOCABULARY = 2048


def build(family: str, attention: str | None = None) -> nn.Module:
    import transformers as t

    common = dict(vocab_size=VOCABULARY, use_cache=False)
    wide = dict(hidden_size=192, intermediate_size=512, num_hidden_layers=3, num_attention_heads=6, head_dim=32)
    config = {
        "llama": lambda: t.LlamaConfig(**common, **wide, num_key_value_heads=2),
        "gpt2": lambda: t.GPT2Config(**common, n_embd=192, n_layer=3, n_head=6, n_positions=256),
        "qwen3": lambda: t.Qwen3Config(**common, **wide, num_key_value_heads=3, tie_word_embeddings=True),
        "gemma2": lambda: t.Gemma2Config(**common, **wide, num_key_value_heads=3, query_pre_attn_scalar=32, sliding_window=96),
    }[family]()
    return t.AutoModelForCausalLM.from_config(config, **({"attn_implementation": attention} if attention else {})).train()


def on_meta(family: str, attention: str | None = None) -> nn.Module:
    with torch.device("meta"):
        return build(family, attention)


def measured(rank: int, n: int, family: str, stage: Any, asked: dict[str, Any], attention: str | None = None) -> dict[str, Any]:
    """The peaks of a rank's first and third step by the allocator's events, and what it holds between backward and step."""
    settings = Run(**asked)
    left = sum(live_storages().values())  # by earlier tests in this process
    model = build(family, attention)
    use_checkpointing(model, settings.checkpointing)
    if settings.loss != "whole":
        use_chunked_loss(model, settings.chunks, settings.loss == "chunked_head")
    if settings.optimizer == "adamw":
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9 if settings.optimizer == "momentum" else 0)
    precision = zerostage.Precision() if settings.weights == "bf16" else zerostage.Precision.full()
    which = {"partition": stage} if isinstance(stage, zerostage.Partition) else {"stage": stage}
    zerostage.shard(model, optimizer, precision=precision, prefetch=settings.prefetch, **which)
    tokens = torch.randint(VOCABULARY, (settings.micro_batch, settings.sequence))
    time.sleep(0.2)  # the transport's own threads let go of the initial values a little later
    found: dict[str, Any] = {"peaks": []}
    for number in range(3):
        held = sum(live_storages().values()) - left
        with recorded() if number != 1 else nullcontext(Allocations()) as during:
            for micro in range(settings.accumulation):
                last = micro == settings.accumulation - 1
                with zerostage.no_sync(model) if settings.keep_local and not last else nullcontext():
                    output = model(input_ids=tokens, labels=tokens)
                    loss = output if isinstance(output, torch.Tensor) else output.loss
                    del output
                    (loss / settings.accumulation if settings.accumulation > 1 else loss).backward()
                    del loss
            found["at_rest"] = zerostage.memory(model).measured
            optimizer.step()
            optimizer.zero_grad()
        found["peaks"].append(held + during.peak)
    found["sent"] = zerostage.traffic(model).bytes
    zerostage.close(model)
    return found


#: Three families, each stage with and without checkpointing, on 2 and 4 ranks.
SETTINGS = [
    ("llama", 0, 2, "none"), ("llama", 1, 4, "full"), ("llama", 2, 2, "full"), ("llama", 3, 4, "none"),
    ("gpt2", 0, 2, "full"), ("gpt2", 1, 2, "none"), ("gpt2", 2, 4, "full"), ("gpt2", 3, 2, "none"),
    ("gemma2", 0, 2, "none"), ("gemma2", 1, 2, "full"), ("gemma2", 2, 2, "none"), ("gemma2", 3, 4, "full"),
]  # fmt: skip


def compare(simulated: Simulation, found: dict[str, Any]) -> None:
    first, _, later = found["peaks"]
    for way, expected, got in (("first", first, simulated.first.peak), ("later", later, simulated.track.peak)):
        print(f"{way}: simulated {got:,} bytes, measured {expected:,} bytes, {got / expected - 1:+.3%}")
        assert got == pytest.approx(expected, rel=0.01)
    state = {TERMS.get(term, term): size for term, size in found["at_rest"].items() if term not in ("gathered", "in_flight")}
    assert simulated.at_rest == state
    sent = {name: size // 3 for name, size in found["sent"].items() if name in ("all_gather", "reduce_scatter")}
    assert {name: simulated.sent[name] for name in sent} == sent


@pytest.mark.parametrize("family, stage, n, checkpointing", SETTINGS)
def test_the_simulated_peak_is_what_ranks_over_gloo_allocate(family: str, stage: int, n: int, checkpointing: str) -> None:
    asked = dict(micro_batch=2, sequence=128, checkpointing=checkpointing)
    simulated = simulate(lambda: on_meta(family), Run(**asked), stage, n, device="cpu")
    for found in run(measured, n=n, family=family, stage=stage, asked=asked):
        compare(simulated, found)


#: Knobs beside stage, ranks and checkpointing.
KNOBS = {
    "fp32": ("llama", 3, 2, dict(weights="fp32", master="none")),
    "accumulated": ("llama", 2, 2, dict(accumulation=2)),
    "kept local": ("llama", 3, 2, dict(accumulation=2, keep_local=True, optimizer="momentum")),
    "selective": ("llama", 3, 2, dict(checkpointing="selective", prefetch=0)),
    "chunked": ("gemma2", 3, 2, dict(loss="chunked", chunks=4)),
    "chunked head": ("qwen3", 3, 2, dict(loss="chunked_head", chunks=4)),
    "node-local": ("llama", zerostage.Partition(4, 4, 2), 4, dict(checkpointing="full", optimizer="sgd")),
    "eager": ("llama", 3, 2, dict(attention="eager")),
    # most of the peak is gathered weights, and gradients sent and received
    "few tokens, stage 2": ("llama", 2, 4, dict(sequence=8)),
    "few tokens, stage 3": ("gpt2", 3, 4, dict(sequence=8)),
}


@pytest.mark.parametrize("knob", KNOBS)
def test_so_it_is_with_the_other_knobs(knob: str) -> None:
    family, stage, n, more = KNOBS[knob]
    asked = dict(micro_batch=2, sequence=128, checkpointing="none") | more
    attention = "eager" if asked.get("attention") == "eager" else None
    simulated = simulate(lambda: on_meta(family), Run(**asked), stage, n, device="cpu")
    for found in run(measured, n=n, family=family, stage=stage, asked=asked, attention=attention):
        compare(simulated, found)


def at_most(term: str, **asked: Any) -> int:
    return simulate(lambda: on_meta("llama"), Run(**{"checkpointing": "none"} | asked), 3, 2).track.highest[term]


def test_only_eager_attention_stores_scores() -> None:
    for kernel in ("flash", "efficient"):
        short, middle, long = (at_most("activations", sequence=length, attention=kernel) for length in (512, 1024, 2048))
        assert (long - middle) / (middle - short) == pytest.approx(2, rel=1e-3)
    scores = 3 * 6 * 1024 * 1024 * 2  # of three layers and six heads, in bf16
    assert at_most("activations", sequence=1024, attention="eager") > at_most("activations", sequence=1024) + scores


class Grouped(nn.Module):
    """Attention of 8 query heads and 2 heads of keys and values, each of width 32."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(64, 32 * count, bias=False) for count in (8, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (head(x).unflatten(-1, (-1, 32)).transpose(1, 2) for head in self.heads)
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).sum()


def test_flash_attention_keeps_queries_keys_values_output_and_one_number_a_row() -> None:
    with torch.device("meta"):
        model = Grouped()
    batch = {"x": (2, 256, 64)}
    found = simulate(
        lambda: model, Run(checkpointing="none"), 0, 2,
        batch=lambda: {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in batch.items()},
    )  # fmt: skip
    forward = [moment for moment in found.track.moments if moment.phase == "forward"][-1]
    rows, heads = 2 * 256, 8 + 2 + 2 + 8  # queries, keys, values, output
    sizes = (rows * 64 * 2, rows * 32 * heads * 2, rows * 8 * 4, 512)  # input, these, log-sum-exp, the loss's smallest block
    assert forward.bytes["activations"] == sum(sizes)


def test_a_chunked_loss_takes_less_for_logits() -> None:
    whole, chunked, head = (at_most("logits", sequence=512, loss=loss) for loss in ("whole", "chunked", "chunked_head"))
    assert whole > 1.3 * chunked > 1.3 * 3 * head


def test_the_account_by_lives_is_the_account_by_storages() -> None:
    found = simulate(lambda: on_meta("llama"), Run(sequence=128, checkpointing="full"), 2, 4, device="cpu")
    (step,) = (moment for moment in found.track.moments if moment.phase == "step")
    assert {term: step.bytes[term] for term in found.at_rest} == found.at_rest
    most = max((moment.bytes for moment in found.track.moments), key=lambda own: sum(own.values()))
    assert sum(most.values()) == found.track.peak and all(found.track.highest[term] >= size for term, size in most.items())
    expected = {"forward model.layers.1", "loss", "backward model.layers.1", "step"}
    assert expected <= {moment.at for moment in found.track.moments}
    # the first step makes the optimizer's states at its end
    states = found.at_rest["exp_avg"] + found.at_rest["exp_avg_sq"]  # and four bytes a parameter, the count of its steps
    assert found.track.phases["backward"] - found.first.phases["backward"] == pytest.approx(states, abs=1000)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_experts_can_be_simulated(family: str) -> None:
    config: dict[str, Any] = dict(model_type=family, vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    config |= dict(num_attention_heads=4, num_key_value_heads=4)
    if family == "deepseek_v3":
        config |= dict(n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, kv_lora_rank=16, q_lora_rank=16)
        config |= dict(qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, moe_intermediate_size=32, first_k_dense_replace=1)
    track, first, rest = of(config, Run(sequence=64), zerostage.Partition(4, 4, 4), 4)
    assert track.peak > first > rest["master"] == 2 * rest["weights"]


def in_use(rank: int, n: int, config: dict[str, Any]) -> int:
    return of(config, Run(sequence=64), zerostage.Partition(4, 4, 4), 4)[0].peak


def test_where_a_process_group_is_in_use_it_runs_in_another_process() -> None:
    config = dict(model_type="llama", vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    config |= dict(num_attention_heads=4, num_key_value_heads=2)
    assert run(in_use, n=1, config=config) == [in_use(0, 1, config)]


@pytest.mark.parametrize(
    "asked, stage, n, message",
    [
        (dict(engine="fsdp2"), 3, 2, "does not have the engine fsdp2"),
        (dict(optimizer="adafactor"), 3, 2, "adafactor"),
        (dict(tensor=2), 3, 2, "tensor parallelism"),
        ({}, 4, 2, "stage is 4"),
        ({}, zerostage.Partition(4, 4, 4), 6, "must divide 6"),
    ],
)
def test_what_the_engine_does_not_have_is_refused(asked: dict[str, Any], stage: Any, n: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulate(lambda: on_meta("llama"), Run(**asked), stage, n)


class Counting(nn.Module):
    """Its output depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.zeros(len(input_ids.nonzero()), 4, dtype=torch.bfloat16)).sum()


class Vector(Counting):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.zeros(2, 4, dtype=torch.bfloat16))


def test_after_a_failure_all_is_as_it_was() -> None:
    chunk, attention, resize = collectives.CHUNK, nn.functional.scaled_dot_product_attention, torch.UntypedStorage.resize_
    for kind, message in ((Counting, "depends on values"), (Vector, "must return its loss")):
        with torch.device("meta"):
            model = kind()
        with pytest.raises(InputError, match=message):
            simulate(lambda: model, Run(checkpointing="none"), 3, 2)
        assert not dist.is_initialized()
        assert collectives.CHUNK == chunk
        assert nn.functional.scaled_dot_product_attention is attention
        assert torch.UntypedStorage.resize_ is resize


def test_a_fifth_of_llama_70b_on_64_ranks_takes_seconds_and_no_memory() -> None:
    config = dict(model_type="llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers=16, num_attention_heads=64)
    config |= dict(num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False)
    found = simulate(builder(config), Run(sequence=4096), 3, 64)
    assert found.seconds < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 4e9
    parameters = 2 * 128256 * 8192 + 8192 + 16 * (2 * 8192 * 9216 + 3 * 8192 * 28672 + 2 * 8192)
    assert sum(found.at_rest.values()) - found.at_rest["buffers"] == pytest.approx(16 * parameters / 64, rel=1e-4)
    assert found.track.phases["backward"] == found.track.peak > 2 * found.track.phases["step"]


CLOSED = [
    ("llama", 0, "none", {}), ("llama", 1, "full", {"accumulation": 2}), ("llama", 2, "selective", {}),
    ("llama", 3, "full", {"loss": "chunked_head"}), ("llama", 3, "none", {"accumulation": 2, "keep_local": True}),
    ("gpt2", 0, "selective", {}), ("gpt2", 1, "none", {}), ("gpt2", 2, "full", {"loss": "chunked"}),
    ("gpt2", 3, "selective", {"accumulation": 2, "keep_local": True}), ("qwen3", 1, "selective", {}), ("qwen3", 2, "full", {}),
    ("qwen3", 3, "none", {"prefetch": 0}), ("gemma2", 3, "full", {"attention": "eager"}),
]  # fmt: skip


@pytest.mark.parametrize("family, stage, checkpointing, more", CLOSED)
def test_the_closed_form_is_within_5_percent(family: str, stage: int, checkpointing: str, more: dict[str, Any]) -> None:
    """Beside the simulation, which is within 0.2% of what ranks over gloo allocate."""
    attention = "eager" if "attention" in more else None
    architecture = resolve(on_meta(family, attention))
    asked = Run(micro_batch=2, sequence=128, checkpointing=checkpointing, **more)
    simulated = simulate(lambda: on_meta(family, attention), asked, stage, 4)
    partition = zerostage.Partition.from_stage(stage, 4)
    track = walk(architecture, asked, partition, 4)
    assert track.peak == pytest.approx(simulated.track.peak, rel=0.05)
    rest = Zerostage(architecture, asked, partition, 4, Track()).sizes()
    state = {term: size for term, size in simulated.at_rest.items() if size and term != "buffers"}
    assert {term: size for term, size in rest.items() if size} == state
