"""What no engine can avoid, measured by itself: the optimizer's arithmetic and the cheapest transport of the bytes.

Beside it comes the compute of forward and backward, which is an engine of its own in the list.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from bench import task

REPEATS = 5
PIECE = 131_072


def measure(rank: int, ranks: int) -> dict[str, float]:
    """Seconds, as medians: AdamW over all and over 1/ranks of the parameters, and each transport of all bf16 weights."""
    count = sum(parameter.numel() for parameter in task.model().parameters())
    count += -count % (64 * ranks)
    found = {"optimizer, whole": _adamw(count), "optimizer, divided": _adamw(count // ranks)}
    # values, not zeros: memory that was never written to is read from one cached page
    whole = torch.randn(count).bfloat16()
    other, part = torch.randn(count).bfloat16(), torch.randn(count // ranks).bfloat16()

    def pairs() -> None:
        mine, theirs = whole.chunk(ranks), other.chunk(ranks)
        works = []
        for step in range(1, ranks):
            peer = (rank + step) % ranks
            works += [dist.irecv(theirs[peer], peer), dist.isend(mine[peer], peer)]
        for work in works:
            work.wait()

    for name, transport in {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, part),
        "all_to_all_single": lambda: dist.all_to_all_single(other, whole),
        "isend and irecv": pairs,
    }.items():
        found[name] = _median(transport)
    return found


def seconds(stage: int, compute: float, parts: dict[str, float]) -> float:
    """The least that a step of a stage can take: compute, optimizer, and the stage's passes over the weights."""
    exchange = min(parts["all_to_all_single"], parts["isend and irecv"])
    reduce_scatter = min(parts["reduce_scatter_tensor"], exchange)
    all_gather = min(parts["all_gather_into_tensor"], exchange)
    if stage == 0:
        return compute + parts["optimizer, whole"] + min(parts["all_reduce"], reduce_scatter + all_gather)
    return compute + parts["optimizer, divided"] + reduce_scatter + (2 if stage == 3 else 1) * all_gather


def _adamw(count: int) -> float:
    master, first, second = (torch.rand(count) for _ in range(3))
    gradient, weight = torch.randn(count).bfloat16(), torch.zeros(count, dtype=torch.bfloat16)
    beta1, beta2 = task.OPTIMIZER["betas"]
    settings = {name: task.OPTIMIZER[name] for name in ("lr", "weight_decay", "eps")}
    step = torch.ones(())

    def update() -> None:
        for start in range(0, count, PIECE):
            part = slice(start, start + PIECE)
            torch._fused_adamw_(
                [master[part]], [gradient[part].float()], [first[part]], [second[part]], [], [step],
                beta1=beta1, beta2=beta2, amsgrad=False, maximize=False, **settings,
            )  # fmt: skip
            weight[part].copy_(master[part])

    return _median(update)


def _median(work: Callable[[], None]) -> float:
    found = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])
