"""One rank of the real engine, running the real model without values or memory, and the life of every storage.

torch's FakeTensorMode computes shapes only, its fake process group stands for all other ranks, and what is
allocated and freed is written down by category. What it predicts is what the engine does, since it is the engine.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

import zerostage
from zerostage import collectives
from zerostage.engine import Engine, engine_of
from zerostage.mistakes import InputError
from zerostage.partition import Partition
from zerostage.planning.memory.track import Track
from zerostage.planning.run import Run
from zerostage.planning.simulation.builders import builder
from zerostage.planning.simulation.kernels import kernels_of, use_attention
from zerostage.planning.simulation.recompute import use_checkpointing, use_chunked_loss
from zerostage.planning.simulation.steps import Steps
from zerostage.precision import Precision

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: torch's allocator for CUDA gives out multiples of so many bytes.
_GRANULE = 512


@dataclass(frozen=True)
class Simulation:
    """track, first: memory over a later step and over the first one. at_rest: whole bytes by term between backward and step
    (gradients present, optimizer state made). sent: bytes sent by this rank in a step, by collective.
    """

    track: Track
    first: Track
    at_rest: dict[str, int]
    sent: dict[str, int]
    seconds: float


def simulate(
    build: Callable[[], nn.Module],
    run: Run,
    stage: int | Partition,
    ranks: int,
    *,
    batch: Callable[[], dict[str, Tensor]] | None = None,
    device: str = "cuda",
) -> Simulation:
    """Two steps of rank 0 of `ranks`: what it allocates, by term and over time.

    build: makes the model on the meta device. Called with a batch as keywords it must return its loss, or something
        that has a `loss`.
    batch: makes one micro-batch; called within FakeTensorMode. None: input_ids and labels, int64 [micro_batch, sequence].
    device: the machine whose kernels and collectives are simulated: 'cuda' with NCCL, or 'cpu' with gloo, there with the
        attention that torch takes on a CPU unless `run.attention` is eager. All of it runs on the CPU.

    Takes seconds and no memory to speak of. Raises InputError for a run that the engine does not have, and
    RuntimeError where torch.distributed is in use in this process.
    """
    started = time.perf_counter()
    _check(run, device)
    try:
        if ranks < 1:
            raise ValueError(f"ranks is {ranks}; it must be 1 or more")
        (stage if isinstance(stage, Partition) else Partition.from_stage(stage, ranks)).check(ranks)
    except ValueError as error:
        raise InputError(str(error)) from None
    if dist.is_initialized():
        raise RuntimeError("a simulation needs a process of its own: torch.distributed is initialised in this one")
    with ExitStack() as stack:
        stack.enter_context(_fake_ranks(ranks))
        model = build()
        if getattr(model, "config", None) is not None and hasattr(model.config, "use_cache"):
            model.config.use_cache = False  # a training step has no use for keys and values of earlier tokens
        use_attention(model, "cpu" if device == "cpu" and run.attention != "eager" else run.attention)
        use_checkpointing(model, run.checkpointing)
        if run.loss != "whole":
            use_chunked_loss(model, run.chunks, head_too=run.loss == "chunked_head")
        head, vocabulary = _head(model)
        stack.enter_context(_pieces_of(device))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(kernels_of("cpu" if device == "cpu" else "flash" if run.attention == "eager" else run.attention))
        steps = Steps(model, run, vocabulary, 1 if device == "cpu" else _GRANULE)
        stack.enter_context(steps.lives)
        _make_fake(model)
        engine = _shard(model, run, stage, device)
        stack.callback(zerostage.close, model)
        steps.watch(engine, head)
        batches = [(batch or (lambda: _tokens(run)))() for _ in range(run.accumulation)]
        at_rest = {}
        for _ in range(2):
            zerostage.traffic(model).reset()
            try:
                at_rest = steps.step(batches)
            except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
                raise InputError(
                    f"what {type(model).__name__} computes depends on values ({error.args[0]}), which a simulation has not: "
                    "use the closed form, or code without that"
                ) from None
            except TypeError as error:
                if "argument" not in str(error):
                    raise
                raise InputError(
                    f"{type(model).__name__} does not take what a simulation gives it, input_ids and labels [micro-batch, sequence] "
                    f"({error}): wrap it in a module that does and returns the loss"
                ) from None
        sent = zerostage.traffic(model).bytes
    first, later = steps.lives.tracks()
    return Simulation(later, first, at_rest, sent, time.perf_counter() - started)


def of(model: Any, run: Run, partition: Partition, ranks: int) -> tuple[Track, int, dict[str, int]]:
    """`simulate` for what the user names as a model (see `builders.builder`), on GPUs.

    Returns the track of a later step, the first step's peak, and the bytes at rest by term. Where torch.distributed is in
    use, it runs in a fresh process, and an nn.Module or 'module:function' must be such as can be made there.
    """
    if dist.is_initialized():
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            return fresh.submit(_of, model, run, partition, ranks).result()
    return _of(model, run, partition, ranks)


def _of(model: Any, run: Run, partition: Partition, ranks: int) -> tuple[Track, int, dict[str, int]]:
    found = simulate(builder(model), run, partition, ranks)
    return found.track, found.first.peak, found.at_rest


def _check(run: Run, device: str) -> None:
    refused = {
        f"the engine {run.engine}": run.engine != "zerostage",
        f"the optimizer {run.optimizer}, which is not elementwise": run.optimizer == "adafactor",
        f"moments in {run.moments}": run.moments not in (None, run.master if run.master != "none" else run.weights),
        "offload": run.offload != "none",
        "LoRA (build the model with its adapters and freeze it instead)": run.lora_rank > 0,
        f"the implementation {run.implementation}": run.implementation != "transformers",
        "fused kernels": run.fused_kernels,
        "a fused loss": run.loss == "fused",
        "a shifted copy of the logits": run.shifted_copy,
        "logits kept while backward runs": run.keep_logits,
        "tensor parallelism": run.tensor > 1,
        "an fp32 reduction beside narrower gradients (use gradients fp32)": bool(run.fp32_reduce)
        and (run.gradients or run.weights) != "fp32",
        f"the device {device} (use cuda or cpu)": device not in ("cuda", "cpu"),
    }
    for what, wanted in refused.items():
        if wanted:
            raise InputError(f"the simulation does not have {what}: it runs zerostage's own engine; use the closed form instead")


@contextmanager
def _fake_ranks(ranks: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _pieces_of(device: str) -> Iterator[None]:
    """Let the engine work in pieces of the size that it takes on `device`, though its tensors say 'cpu'."""
    before = collectives.CHUNK
    collectives.CHUNK = before if device == "cpu" else collectives.LARGE_CHUNK
    try:
        yield
    finally:
        collectives.CHUNK = before


def _make_fake(model: nn.Module) -> None:
    """Put fake parameters and buffers in the place of those on the meta device; shared ones stay shared."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers, module.__dict__):
            for name, tensor in held.items():
                if isinstance(tensor, Tensor) and tensor not in made:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    made[tensor] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
                if isinstance(tensor, Tensor):
                    held[name] = made[tensor]


def _shard(model: nn.Module, run: Run, stage: int | Partition, device: str) -> Engine:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise InputError("no parameter of the model is trained: there is no step to simulate")
    kernel = {run.optimizer_kernel: True} if run.optimizer_kernel else {}
    if run.optimizer == "adamw":
        optimizer: Any = torch.optim.AdamW(parameters, lr=1e-4, **kernel)
    else:
        optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9 if run.optimizer == "momentum" else 0.0, **kernel)
    weights = _DTYPES[run.weights]
    precision = Precision(weights, _DTYPES.get(run.gradients, weights), _DTYPES.get(run.master, weights))
    which: dict[str, Any] = {"partition": stage} if isinstance(stage, Partition) else {"stage": stage}
    zerostage.shard(model, optimizer, precision=precision, prefetch=run.prefetch, **which)
    engine = engine_of(model)
    if device == "cpu":  # the way over gloo, with nobody at the other end
        engine.world.streams = False
        engine.world.send = engine.world.receive = lambda *_: _Done()
    return engine


class _Done:
    def wait(self) -> None:
        pass


def _tokens(run: Run) -> dict[str, Tensor]:
    tokens = torch.zeros(run.micro_batch, run.sequence, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}


def _head(model: nn.Module) -> tuple[nn.Module | None, int | None]:
    """The module that makes the logits, and how many there are for a token."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)
    return head, None if weight is None else weight.shape[0]
