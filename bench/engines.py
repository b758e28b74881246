"""Each engine as its own documentation would have it used for this work: a function from a model to a training step.

A step takes a batch and returns the loss. Everything here runs on the CPU over gloo. The
optimizer is torch's AdamW as anybody would build it, which on a CPU means one parameter and
one operation at a time; torch's engines are measured once more with its fused kernel, asked
for by `fused=True`. DeepSpeed gets the fused one; zerostage uses it by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from bench import task

Step = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def _trainer(forward: Callable, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = forward(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _autocast(model: nn.Module) -> Callable:
    def forward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**batch).loss

    return forward


def compute(model: nn.Module) -> Step:
    """Forward and backward alone, in bf16; each gradient is dropped as soon as it is there."""
    model.to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        return loss.detach()

    return step


def distributed_data_parallel(model: nn.Module, **adamw: bool) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _trainer(_autocast(wrapped), torch.optim.AdamW(model.parameters(), **task.OPTIMIZER, **adamw))


def zero_redundancy_optimizer(model: nn.Module, **adamw: bool) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **task.OPTIMIZER, **adamw)
    return _trainer(_autocast(wrapped), optimizer)


def fsdp2(model: nn.Module, reshard: bool, **adamw: bool) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), **task.OPTIMIZER, **adamw)
    return _trainer(lambda batch: model(**batch).loss, optimizer)


def deepspeed(model: nn.Module, stage: int) -> Step:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": task.ROWS,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **task.OPTIMIZER)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def zerostage(model: nn.Module, stage: int) -> Step:
    import zerostage

    optimizer = torch.optim.AdamW(model.parameters(), **task.OPTIMIZER)
    zerostage.shard(model, optimizer, stage=stage, precision=zerostage.Precision())
    return _trainer(lambda batch: model(**batch).loss, optimizer)


_TORCH: dict[str, tuple[Callable[..., Step], int]] = {
    "DistributedDataParallel": (distributed_data_parallel, 0),
    "ZeroRedundancyOptimizer": (zero_redundancy_optimizer, 1),
    "FSDP2, no reshard": (partial(fsdp2, reshard=False), 2),
    "FSDP2": (partial(fsdp2, reshard=True), 3),
}
FUSED = ", fused AdamW"
#: By name as printed: how to build it, and the ZeRO stage that it is to be compared at.
ENGINES: dict[str, tuple[Callable[[nn.Module], Step], int | None]] = {
    "compute alone": (compute, None),
    **_TORCH,
    **{name + FUSED: (partial(build, fused=True), stage) for name, (build, stage) in _TORCH.items()},
    **{f"DeepSpeed {stage}": (partial(deepspeed, stage=stage), stage) for stage in range(4)},
    **{f"zerostage {stage}": (partial(zerostage, stage=stage), stage) for stage in range(4)},
}
