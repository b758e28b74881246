"""Measure what DeepSpeed holds on the CPU: `python deepspeed_bytes.py`, where deepspeed is installed (`pip install deepspeed`).

Two ranks over gloo train a Llama of 19.8M parameters in bf16; the profiler sees each allocation. For each case of
CASES it prints bytes per parameter in the fourth step: at rest after it, and at most in forward, backward and step. At
rest the figure is of the rank with fewer: what gloo's threads free is not seen, so that a rank can only seem to hold too
much. The others are the most that a rank held above its own rest. `test_plan_deepspeed.py` has them as MEASURED, from
deepspeed 0.19.8 and torch 2.13.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile

SHAPE = dict(
    vocab_size=2048, hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False, use_cache=False,
)  # fmt: skip
SMALL = {"reduce_bucket_size": 1_500_000}
LIVE = {
    **SMALL,
    "stage3_prefetch_bucket_size": 1_000_000,
    "stage3_max_live_parameters": 4_000_000,
    "stage3_max_reuse_distance": 4_000_000,
}
WIDE = {"gradients": "fp32"}
#: zero_optimization, and what else differs from the defaults.
CASES = [
    ({"stage": 0}, {}),
    ({"stage": 1}, {}),
    ({"stage": 2}, {}),
    ({"stage": 3}, {}),
    ({"stage": 1, **SMALL}, {}),
    ({"stage": 2, **SMALL}, {}),
    ({"stage": 3, **LIVE}, {}),
    ({"stage": 1, **SMALL}, WIDE),
    ({"stage": 2, **SMALL}, WIDE),
    ({"stage": 3, **LIVE}, WIDE),
    ({"stage": 1, **SMALL}, {"accumulation": 2}),
    ({"stage": 2, **SMALL}, {"accumulation": 2}),
    ({"stage": 3, **LIVE}, {"accumulation": 2}),
    ({"stage": 2, **SMALL, "overlap_comm": True}, {}),
    ({"stage": 2, **SMALL, "contiguous_gradients": False}, {}),
    ({"stage": 3, **LIVE}, {"checkpointing": "full"}),
    ({"stage": 3, **SMALL}, {"checkpointing": "full"}),
    ({"stage": 3, **LIVE}, {"optimizer_kernel": "foreach"}),
    ({"stage": 3, **LIVE, "sub_group_size": 3_000_000}, {}),
]


def measure(zero: dict, other: dict) -> dict[str, float]:
    """Bytes per parameter of this rank: 'rest', 'forward', 'backward', 'step'."""
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    from bench.rank import Live, _allocations

    torch.manual_seed(0)
    accumulation = other.get("accumulation", 1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**6,
    }
    if "gradients" in other:
        config["data_types"] = {"grad_accum_dtype": other["gradients"]}
    marks: list[tuple[int, str]] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE)).train()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        if other.get("checkpointing") == "full":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), **{other.get("optimizer_kernel", "fused"): True})
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        for step in range(4):
            if step == 3:
                marks.clear()
            for _ in range(accumulation):
                tokens = torch.randint(SHAPE["vocab_size"], (1, 64))
                gc.collect()
                marks.append((time.time_ns(), "forward"))
                loss = engine(input_ids=tokens, labels=tokens).loss
                marks.append((time.time_ns(), "backward"))
                engine.backward(loss)
                marks.append((time.time_ns(), "step"))
                engine.step()
                marks.append((time.time_ns(), "between"))
                del loss
        gc.collect()
    live, most, phase = Live(), {"forward": 0, "backward": 0, "step": 0, "between": 0, "before": 0}, "before"
    events = _allocations(profiler.profiler.kineto_results.experimental_event_tree())
    for event in sorted(events, key=lambda event: event.start_time_ns):
        while marks and event.start_time_ns >= marks[0][0]:
            phase = marks.pop(0)[1]
            most[phase] = max(most[phase], live.bytes)
        live.change(event.extra_fields.ptr, event.extra_fields.alloc_size)
        most[phase] = max(most[phase], live.bytes)
    found = {"rest": live.bytes, **{name: most[name] for name in ("forward", "backward", "step")}}
    return {name: size / parameters for name, size in found.items()}


def work(rank: int, port: int, results) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
    sys.path.insert(0, str(Path(__file__).parents[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # its shared-memory collectives want a compiler
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    for case in CASES:
        found: list = [None, None]
        dist.all_gather_object(found, measure(*map(dict, case)))
        if rank == 0:
            rest = min(one["rest"] for one in found)
            most = {name: rest + max(one[name] - one["rest"] for one in found) for name in found[0]}
            results.put((case, most))
    dist.barrier()
    results.close()
    results.join_thread()
    os._exit(0)


if __name__ == "__main__":
    context = mp.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=work, args=(rank, 20000 + os.getpid() % 10000, queue)) for rank in range(2)]
    for process in ranks:
        process.start()
    for _ in CASES:
        (zero, other), found = queue.get(timeout=300)
        figures = {name: round(value, 3) for name, value in found.items()}
        print(f"    ({zero}, {other}, {figures}),", flush=True)
    for process in ranks:
        process.join(10)
