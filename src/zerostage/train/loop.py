"""The training loop of one rank."""

from __future__ import annotations

import math
import os
import time
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import zerostage
from zerostage.mistakes import InputError
from zerostage.train import account, check, data, model_folder
from zerostage.train import model as models
from zerostage.train.config import TrainConfig
from zerostage.train.report import Report


def train(config: TrainConfig) -> None:
    """Train as `config` says, as one rank of the job that the environment describes."""
    rank, ranks, device = join(config)
    if config.trace and device.type != "cpu":
        raise InputError("--trace times the host, which runs ahead of a GPU: use --device cpu, or torch.profiler")
    torch.manual_seed(config.seed + rank)  # dropout only: the weights are read, the order has its own seed
    folder = model_folder.find(config.model)
    _quiet_transformers()
    tokenizer = models.load_tokenizer(folder)
    samples, held_out = data.load_once_per_node(config, tokenizer)
    steps = config.steps or math.ceil(config.epochs * (len(samples) // config.global_batch))

    model = models.build(folder, config)
    check_vocabulary(model, samples, held_out)
    count = sum(parameter.numel() for parameter in model.parameters())
    optimizer = models.build_optimizer(model, config)
    precision = zerostage.Precision() if config.precision == "bf16" else zerostage.Precision.full()
    model, optimizer = zerostage.shard(model, optimizer, config.stage, precision=precision, prefetch=config.prefetch)
    zerostage.load_weights(model, folder)
    buffers, updates = check.buffers_of(model), 0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor(config, steps))

    metrics = config.metrics or f"runs/{Path(config.model).name}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.jsonl"
    with Report(metrics if rank == 0 else None, steps) as report:
        report.start(config, len(samples), 0 if held_out is None else len(held_out), count, device)
        before = evaluate(model, held_out, config, rank, ranks, device)
        report.held_out(0, before)
        model.train()
        for step in range(steps):
            began = time.perf_counter()
            zerostage.traffic(model).reset()
            indices = data.step_indices(len(samples), config.global_batch, step, config.seed)
            micro_batches = [samples.batch(part) for part in data.rank_share(indices, rank, ranks, config.micro_batch)]
            rate = schedule.get_last_lr()[0]
            with zerostage.trace(model) if config.trace and step == steps - 1 else nullcontext() as trace:
                loss = accumulate(model, micro_batches, ranks, device)
                norm = zerostage.clip_grad_norm_(model, config.clip or math.inf)
                optimizer.step()
            if not optimizer.skipped:
                schedule.step()
                updates += 1
            # Here all terms exist: gradients until they are dropped, moments since the first step.
            ledger = zerostage.memory(model, optimizer)
            checked = updates <= 2 and not optimizer.skipped
            if step == steps - 1:
                traffic = traffic_of_step(model, len(micro_batches))
            if checked or step == steps - 1:
                if device.type == "cuda":
                    torch.cuda.synchronize()
                paused = time.perf_counter()
                audit = zerostage.audit(model, optimizer)
                began += time.perf_counter() - paused  # the audit is no part of the step
            optimizer.zero_grad()
            report.step(
                step=step + 1,
                loss=loss,
                grad_norm=float(norm),
                lr=rate,
                seconds=time.perf_counter() - began,
                tokens=config.global_batch * config.sequence_length,
                peak=ledger.peak.get("allocated", ledger.peak["engine"]),
                skipped=optimizer.skipped,
            )
            if checked:
                report.audit(check.record(step + 1, audit, config.stage), ranks)
                if config.strict:
                    check.insist(step + 1, audit, ledger, buffers, config.stage, ranks)
            if config.eval_every and (step + 1) % config.eval_every == 0 and step + 1 < steps:
                report.held_out(step + 1, evaluate(model, held_out, config, rank, ranks, device))
                model.train()
        report.held_out(steps, evaluate(model, held_out, config, rank, ranks, device))
        report.account(account.account(ledger, audit, traffic, ranks, config.stage))
        if config.trace:
            report.trace(trace, config.trace)
        if config.save:
            report.saved(models.save(model, tokenizer, config.save, rank))
    zerostage.close(model)
    if dist.is_initialized():
        dist.destroy_process_group()


def join(config: TrainConfig) -> tuple[int, int, torch.device]:
    """This process's rank, the number of ranks, and its device; joins the process group if there are several."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
        if local >= torch.cuda.device_count():
            raise InputError(
                f"local rank {local} has no GPU: {torch.cuda.device_count()} found; use fewer --ranks or --device cpu"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if config.threads or device.type == "cpu":
        torch.set_num_threads(config.threads or int(os.environ.get("OMP_NUM_THREADS", "1")))
    if "RANK" in os.environ and not dist.is_initialized():
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
    if not dist.is_initialized():
        return 0, 1, device
    return dist.get_rank(), dist.get_world_size(), device


def learning_rate_factor(config: TrainConfig, steps: int):
    """The factor on the peak learning rate at a step: linear warm-up from 1/warmup_steps, then a cosine."""
    floor = config.min_learning_rate / config.learning_rate

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        progress = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def accumulate(model, micro_batches, ranks: int, device) -> float:
    """Forward and backward of all micro-batches of a step; the mean loss over the global batch's valid tokens.

    The engine averages gradients over ranks, so each loss is the sum over its tokens times
    ranks / valid tokens of the whole global batch: every token of a step has the same
    weight, however the valid ones fall on ranks and micro-batches.
    """
    valid = total(sum(int((labels != data.IGNORED).sum()) for _, labels in micro_batches), device)
    sum_of_losses = torch.zeros((), dtype=torch.float64, device=device)
    for inputs, labels in micro_batches:
        sum_of_losses += backward(model, inputs, labels, ranks / valid, device)
    return total(sum_of_losses, device) / valid


def backward(model, inputs, labels, scale: float, device) -> torch.Tensor:
    """Back-propagate `scale` times the sum of the losses, and return the sum, fp64.

    The loss and what is left of its graph end with this call, before the next forward.
    """
    loss = loss_sum(model, inputs, labels, device)
    (loss * scale).backward()
    return loss.detach().double()


def loss_sum(model, inputs, labels, device) -> torch.Tensor:
    """The sum, in fp32, of the losses of the tokens that have a label."""
    logits = model(input_ids=torch.from_numpy(inputs).to(device), use_cache=False).logits
    labels = torch.from_numpy(labels).to(device)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


@torch.no_grad()
def evaluate(model, held_out, config: TrainConfig, rank: int, ranks: int, device) -> float | None:
    """The mean loss per token of the held-out samples, the same on all ranks, or None without any."""
    if not held_out:
        return None
    model.eval()
    # Every rank runs the same number of forwards, or the gathers of one would wait for ever;
    # -1 stands for a row without targets.
    batch = config.micro_batch * ranks
    indices = [*range(len(held_out)), *[-1] * (-len(held_out) % batch)]
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for start in range(rank * config.micro_batch, len(indices), batch):
        inputs, labels = held_out.batch(indices[start : start + config.micro_batch])
        sums[0] += loss_sum(model, inputs, labels, device).double()
        sums[1] += int((labels != data.IGNORED).sum())
    if dist.is_initialized():
        dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def total(value, device) -> float:
    """The sum of `value` over all ranks."""
    value = torch.as_tensor(value, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(value)
    return float(value)


def traffic_of_step(model, micro_batches: int) -> dict[str, dict[str, int]]:
    """Bytes expected and measured, and calls, by collective, since the last reset."""
    traffic = zerostage.traffic(model)
    expected = traffic.expected(micro_batches=micro_batches)
    return {"expected": dict(expected), "measured": dict(traffic.bytes), "calls": dict(traffic.calls)}


def check_vocabulary(model, *parts) -> None:
    """Raise InputError when the tokenizer gives ids that the model's embedding does not have."""
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(int(part.tokens.max()) for part in parts if part is not None)
    if largest >= rows:
        raise InputError(
            f"the tokenizer gives token {largest} but the model has {rows} embeddings: they do not belong together"
        )


def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
