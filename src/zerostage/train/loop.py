"""The training loop of one rank."""

from __future__ import annotations

import math
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerostage
from zerostage.train import account, check, data, ending
from zerostage.train import model as models
from zerostage.train.config import TrainConfig
from zerostage.train.losses import accumulate, agree, evaluate
from zerostage.train.progress import Checkpoints, Progress
from zerostage.train.report import Report
from zerostage.train.run import Run, prepare


@dataclass
class Measured:
    """What was measured in the last step, when all terms are there."""

    ledger: Any
    audit: Any
    traffic: dict[str, dict[str, int]]
    trace: Any


def train(config: TrainConfig) -> None:
    """Train as `config` says, as one rank of the job that the environment describes.

    Goes on from the newest checkpoint where there is one. Raises `ending.Stopped` where SIGTERM
    ended the run, after it was saved.
    """
    stopped = None
    run = prepare(config)
    try:
        train_and_report(run)
    except ending.Stopped as stop:
        stopped = stop
    zerostage.close(run.model)
    if dist.is_initialized():
        dist.destroy_process_group()
    if stopped:
        raise stopped


def train_and_report(run: Run) -> None:
    """All that a run does, from its first evaluation or its newest checkpoint to the saved model."""
    config = run.config
    checkpoints = Checkpoints(config, run.model, run.optimizer, run.samples, run.tokenizer)
    progress, lines = checkpoints.resume()
    left = data.steps_left(len(run.samples), config.global_batch, progress.position, config.epochs)
    steps = config.steps or progress.step + left
    resumed = progress.step if checkpoints.resumed else None
    metrics = config.metrics or f"runs/{Path(config.model).name}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.jsonl"
    with Report(metrics if run.world.rank == 0 else None, steps, resumed) as report:
        count = sum(parameter.numel() for parameter in run.model.parameters())
        report.start(config, len(run.samples), 0 if run.held_out is None else len(run.held_out), count, run.device)
        report.going_on(lines, resumed)
        checkpoints.check(progress, steps)
        if config.test_save and progress.step < steps:
            report.tested(checkpoints.test(progress))
        if resumed is None:
            report.held_out(0, evaluate(run))
        measured = run_steps(run, progress, steps, checkpoints, report)
        checkpoints.save(progress, report, last=True)
        report.held_out(progress.step, evaluate(run))
        if measured is not None:
            report.account(account.account(measured.ledger, measured.audit, measured.traffic, run.world.size, config.stage))
            if config.trace:
                report.trace(measured.trace, config.trace)
        if config.save:
            report.saved(models.save(run.model, run.tokenizer, config.save, run.world.rank))


def run_steps(run: Run, progress: Progress, steps: int, checkpoints: Checkpoints, report: Report) -> Measured | None:
    """Train up to step `steps`, counting in `progress`; what was measured in the last step, None where none was left.

    SIGTERM, on any rank, ends all ranks between two steps: raises `ending.Stopped` once the run is saved.
    """
    measured, done, buffers = None, 0, check.buffers_of(run.model)
    schedule = schedule_from(run.optimizer, run.config, steps, progress.updates)
    termination = ending.Termination() if run.config.checkpoints else None
    run.model.train()
    while progress.step < steps:
        step = progress.step + 1
        with ending.during(f"in step {step}"):
            began = time.perf_counter()
            zerostage.traffic(run.model).reset()
            micro_batches, position = next_batches(run, progress)
            valid, stop = agree(run.world, micro_batches, termination is not None and termination.asked)
            if stop:
                path = checkpoints.save(progress, report, last=True)
                termination.close(stopped=True)
                raise ending.Stopped(f"stopped by SIGTERM after step {progress.step}: saved {path}; go on with the same command")
            with zerostage.trace(run.model) if run.config.trace and step == steps else nullcontext() as trace:
                loss = accumulate(run, micro_batches, valid)
                norm = zerostage.clip_grad_norm_(run.model, run.config.clip or math.inf)
                run.optimizer.step()
            updated = not run.optimizer.skipped
            rate = schedule.get_last_lr()[0]
            if updated:
                schedule.step()
            progress.step, progress.updates, progress.position = step, progress.updates + updated, position
            done += updated
            # Here all terms exist: gradients until they are dropped, moments since the first step.
            ledger = zerostage.memory(run.model, run.optimizer)
            checked = updated and done <= 2
            if checked or step == steps:
                traffic = traffic_of_step(run.model, len(micro_batches))
                if run.device.type == "cuda":
                    torch.cuda.synchronize()
                paused = time.perf_counter()
                measured = Measured(ledger, zerostage.audit(run.model, run.optimizer), traffic, trace)
                began += time.perf_counter() - paused  # the audit is no part of the step
            run.optimizer.zero_grad()
            report.step(
                step=step,
                loss=loss,
                grad_norm=float(norm),
                lr=rate,
                seconds=time.perf_counter() - began,
                tokens=run.config.global_batch * run.config.sequence_length,
                peak=ledger.peak.get("allocated", ledger.peak["engine"]),
                skipped=not updated,
            )
            if checked:
                report.audit(check.record(step, measured.audit, run.config.stage), run.world.size)
                if run.config.strict:
                    check.insist(step, measured.audit, ledger, buffers, run.config.stage, run.world.size)
        checkpoints.poll(report)
        if step < steps:
            between(run, progress, checkpoints, report)
    if termination:
        termination.close()
    return measured


def next_batches(run: Run, progress: Progress) -> tuple[list, data.Position]:
    """This rank's micro-batches of the next step, and the position in the data after it."""
    indices, position = data.take(len(run.samples), run.config.global_batch, progress.position, run.config.seed)
    parts = data.rank_share(indices, run.world.rank, run.world.size, run.config.micro_batch)
    return [run.samples.batch(part) for part in parts], position


def between(run: Run, progress: Progress, checkpoints: Checkpoints, report: Report) -> None:
    """What is due between two steps. The evaluation first: a run that goes on from the checkpoint has it behind it."""
    if run.config.eval_every and progress.step % run.config.eval_every == 0:
        report.held_out(progress.step, evaluate(run))
        run.model.train()
    if checkpoints.due(progress.step):
        checkpoints.save(progress, report)


def learning_rate_factor(config: TrainConfig, steps: int):
    """The factor on the peak learning rate at a step: linear warm-up from 1/warmup_steps, then a cosine."""
    floor = config.min_learning_rate / config.learning_rate

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        progress = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def schedule_from(optimizer, config: TrainConfig, steps: int, updates: int):
    """The learning rate's schedule over `steps`, after `updates` of them."""
    for group in optimizer.param_groups:
        group["initial_lr"] = config.learning_rate
    return torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor(config, steps), last_epoch=updates - 1)


def traffic_of_step(model, micro_batches: int) -> dict[str, dict[str, int]]:
    """Bytes expected and measured, and calls, by collective, since the last reset."""
    traffic = zerostage.traffic(model)
    expected = traffic.expected(micro_batches=micro_batches)
    return {"expected": dict(expected), "measured": dict(traffic.bytes), "calls": dict(traffic.calls)}
