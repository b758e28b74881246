"""What `device_check` measures on one device: one rank beside other engines, and one rank of many with fake peers."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import zerostage
from bench import task
from zerostage.engine import engine_of
from zerostage.partition import Partition

#: Dense bf16 FLOP/s by the vendor's data sheets; the first name that occurs in the device's counts.
PEAK_FLOPS = {"H200 NVL": 835e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12}
FORMULA = (
    "MFU = tokens/s * (6 * parameters + 12 * layers * hidden * length) / peak FLOP/s: forward and backward, nothing that is "
    "recomputed, attention not halved for its causal mask (Chowdhery et al., PaLM, appendix B)"
)
WARM_UP = 3


def llama(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, length: int) -> dict[str, Any]:
    """A config by transformers' names; a rank's batch is one sequence of `length` tokens."""
    return dict(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocab, max_position_embeddings=length, attn_implementation="sdpa",
    )  # fmt: skip


LLAMA_70B = llama(layers=80, hidden=8192, intermediate=28672, heads=64, kv_heads=8, vocab=128256, length=4096)
TINY = llama(layers=3, hidden=128, intermediate=384, heads=4, kv_heads=2, vocab=512, length=32)


def batch(shape: dict[str, Any], step: int) -> dict[str, torch.Tensor]:
    """Random int64 tokens [1, length]; they repeat every 4 steps, so that losses fall."""
    generator = torch.Generator().manual_seed(1 + step % 4)
    tokens = torch.randint(shape["vocab_size"], (1, shape["max_position_embeddings"]), generator=generator).to(here())
    return {"input_ids": tokens, "labels": tokens}


def compute_tables(model: nn.Module) -> None:
    """Rotary tables are buffers that no file holds; a model from the meta device needs them made."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    with torch.device(here()):
        model.model.rotary_emb = LlamaRotaryEmbedding(model.config)


def here() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def count(shape: dict[str, Any]) -> int:
    """Parameters of a model, built without memory."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in task.model(**shape).parameters())


def flops(shape: dict[str, Any], parameters: int) -> float:
    """FLOP of one step; see FORMULA."""
    length = shape["max_position_embeddings"]
    return length * (6 * parameters + 12 * shape["num_hidden_layers"] * shape["hidden_size"] * length)


def largest_that_fits(free: int) -> dict[str, Any]:
    """A Llama of 1B to 3B parameters whose training state and activations take at most 80% of `free` bytes."""
    for layers in range(28, 7, -4):
        shape = llama(layers, hidden=3072, intermediate=8192, heads=24, kv_heads=8, vocab=32768, length=4096)
        # counted: what a layer saves for backward; logits in bf16 and fp32, and the gradients of both
        activations = 4096 * (layers * (22 * 3072 + 8 * 8192) + 14 * 32768)
        if 16 * count(shape) + activations <= 0.8 * free:
            return shape
    raise RuntimeError(f"{free / 1e9:.1f} GB are free on the card: too few for a model of 1B parameters")


class Held:
    """Bytes that torch holds on the device, beyond those before the block: at each mark, and at most since the last one.

    On the card by the caching allocator's own counters, on the CPU from the profiler's events
    (there only after the block).
    """

    def __enter__(self) -> Held:
        gc.collect()
        self.at: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        if here() == "cuda":
            torch.cuda.empty_cache()
            self.before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        else:
            self.before = 0
            self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profiler.__enter__()
        return self

    def mark(self, name: str) -> None:
        gc.collect()
        if here() == "cuda":
            torch.cuda.synchronize()
            self.at[name] = torch.cuda.memory_allocated() - self.before
            self.peak[name] = torch.cuda.max_memory_allocated() - self.before
            torch.cuda.reset_peak_memory_stats()
        else:
            with record_function(f"mark {name}"):
                pass

    def __exit__(self, *error: Any) -> None:
        if here() == "cpu":
            self._profiler.__exit__(*error)
            now = most = 0
            for event in sorted(self._profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
                if event.name() == "[memory]":
                    now += event.nbytes()
                    most = max(most, now)
                elif event.name().startswith("mark "):
                    name = event.name().removeprefix("mark ")
                    self.at[name], self.peak[name], most = now, most, now


# One rank


def plain(model: nn.Module) -> torch.optim.Optimizer:
    """bf16 weights, gradients and moments: 8 bytes per parameter, and updates below 1/256 of a weight are lost."""
    model.to(torch.bfloat16)
    return torch.optim.AdamW(model.parameters(), fused=True, **task.OPTIMIZER)


def with_zerostage(model: nn.Module) -> torch.optim.Optimizer:
    on_meta = next(model.parameters()).is_meta  # where torch refuses fused=True; zerostage's own update is fused anyway
    optimizer = torch.optim.AdamW(model.parameters(), fused=None if on_meta else True, **task.OPTIMIZER)
    zerostage.shard(model, optimizer, stage=3, precision=zerostage.Precision())
    return optimizer


def with_fsdp2(model: nn.Module) -> torch.optim.Optimizer:
    """Layers, embedding and head apart, as zerostage divides such a model; fp32 weights, bf16 where they travel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    on_meta = next(model.parameters()).is_meta
    mesh = init_device_mesh(here(), (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (model.model.embed_tokens, *model.model.layers, model.lm_head, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    if on_meta:
        model.to_empty(device=here())
        compute_tables(model)
    return torch.optim.AdamW(model.parameters(), fused=True, **task.OPTIMIZER)


ENGINES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "zerostage": with_zerostage,
    "fsdp2": with_fsdp2,
    "plain": plain,
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: dict[str, torch.Tensor]) -> float:
    """One step, gradients left in place. Returns its loss, and so waits for the card."""
    loss = model(**tokens).loss
    loss.backward()
    optimizer.step()
    return loss.item()


def timed(engine: str, shape: dict[str, Any], steps: int) -> dict[str, Any]:
    """Seconds of each step, losses, and bytes: at rest without gradients, and at most in a step."""
    seconds, losses = [], []
    with Held() as held:
        with torch.device(here()):
            model = task.model(**shape)
        optimizer = ENGINES[engine](model)
        for number in range(WARM_UP + steps):
            if number == WARM_UP:
                held.mark("warm")
            tokens = batch(shape, number)
            began = time.perf_counter()
            losses.append(train(model, optimizer, tokens))
            optimizer.zero_grad()
            if here() == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        held.mark("steps")
    if engine == "zerostage":
        zerostage.close(model)
    found = {"seconds": seconds[WARM_UP:], "losses": [losses[0], losses[-1]], "before": held.before}
    return found | {"at_rest": held.at["warm"], "peak": held.peak["steps"]}


def one_card(tiny: bool, seconds: float) -> dict[str, Any]:
    """Every engine on one rank, in rounds: what else the machine does falls on all alike; ratios within rounds."""
    end, longest = time.monotonic() + seconds, 0.0
    dist.init_process_group("gloo" if tiny else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    shape = TINY if tiny else largest_that_fits(torch.cuda.mem_get_info()[0])
    engines: dict[str, list[Any]] = {name: [] for name in ENGINES}
    result: dict[str, Any] = {"shape": shape, "parameters": count(shape), "engines": engines, "formula": FORMULA}
    while len(engines["plain"]) < (1 if tiny else 5) and time.monotonic() + 1.2 * longest < end and "error" not in result:
        began = time.monotonic()
        for name in ENGINES:
            try:
                engines[name].append(timed(name, shape, 2 if tiny else 10))
            except Exception as error:
                result["error"] = f"{name}: {type(error).__name__}: {error}"
        longest = max(longest, time.monotonic() - began)
    result["device"] = device = "cpu" if tiny else torch.cuda.get_device_name()
    result["peak_flops"] = peak = next((speed for name, speed in PEAK_FLOPS.items() if name in device), None)
    medians = {name: [statistics.median(f["seconds"]) for f in rounds] for name, rounds in engines.items() if rounds}
    result["summary"] = {name: spread(values) for name, values in medians.items()}
    for name, row in result["summary"].items():
        row |= {key: max(figures[key] for figures in engines[name]) for key in ("at_rest", "peak")}
        row["flops"] = flops(shape, result["parameters"]) / row["median"]
        row["mfu"] = row["flops"] / peak if peak else None
    result["ratios"] = {
        f"zerostage / {other}": spread([a / b for a, b in zip(medians["zerostage"], medians[other])])
        for other in ("fsdp2", "plain")
        if {"zerostage", other} <= medians.keys()
    }
    return result


def spread(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "range": [min(values), max(values)], "rounds": values}


# One rank of many


def fake_world(engine: str, tiny: bool) -> dict[str, Any]:
    """Bytes of one rank of a model from the meta device: two steps with recomputed layers, of which the second is measured.

    The first step makes the optimizer's states, so that the second is the first that runs beside them.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    shape, ranks = (TINY, 8) if tiny else (LLAMA_70B, 64)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    found: dict[str, Any] = {"shape": shape, "ranks": ranks}
    began = time.monotonic()
    with Held() as held:
        with torch.device("meta"):
            model = task.model(**shape)
        compute_tables(model)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        found["plan"] = round(sum(Partition.from_stage(3, ranks).bytes(found["parameters"]).values()))
        optimizer = ENGINES[engine](model)
        fill(model)
        held.mark("built")
        found["seconds_to_build"] = time.monotonic() - began
        for number in range(2):
            tokens = batch(shape, number)
            optimizer.zero_grad()
            if number:
                held.mark("between")
            began = time.monotonic()
            found["loss"] = train(model, optimizer, tokens)
            found["seconds"] = time.monotonic() - began
            if getattr(optimizer, "skipped", False):
                raise RuntimeError("the step was skipped, for a gradient that is not finite: these are not a step's bytes")
        held.mark("step")
        ours = engine == "zerostage"
        found["terms"] = account = asdict(zerostage.memory(model, optimizer)) if ours else local_terms(model, optimizer)
    if ours and not account["expected"].items() <= account["measured"].items():
        found["error"] = "the measured bytes are not the expected ones"
    if ours and account["peak"]["engine"] > account["peak"]["bound"]:
        found["error"] = "more bytes were gathered and in flight than the bound allows"
    return found | {"build_peak": held.peak["built"], "at_rest": held.at["step"], "peak": held.peak["step"]}


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Small random values for this rank's slices, in place of a checkpoint's: from zeros no gradient would flow."""
    torch.manual_seed(0)
    if engine := engine_of(model):
        for flat in engine.flats:
            flat.master.normal_(std=0.02)
            flat.step_weights.copy_(flat.master)
            engine.loaded(name for names in flat.names for name in names)
    else:
        for parameter in model.parameters():
            parameter.to_local().normal_(std=0.02)


def local_terms(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, int]]:
    """The same account as zerostage's for DTensors: bytes of the local parts by term."""
    of = {"weights": lambda p: p, "gradients": lambda p: p.grad}
    of |= {name: lambda p, name=name: optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq")}
    return {"measured": {term: sum(get(p).to_local().nbytes for p in model.parameters()) for term, get in of.items()}}
