"""The losses of a step and of an evaluation: sums over this rank's tokens, means over those of all ranks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from zerostage.collectives import World
from zerostage.train import data, ending
from zerostage.train.run import Run


def agree(world: World, micro_batches, stop: bool) -> tuple[int, bool]:
    """The number of valid tokens of the whole global batch, and whether any rank was asked to stop: one collective."""
    values = torch.full((world.size + 1,), -1, dtype=torch.int64)
    values[world.rank] = sum(int((labels != data.IGNORED).sum()) for _, labels in micro_batches)
    values[-1] = stop
    *valid, stop = world.maximum(values, "the number of tokens of a step").tolist()
    return sum(valid), bool(stop)


def accumulate(run: Run, micro_batches, valid: int) -> float:
    """Forward and backward of all micro-batches of a step; the mean loss over the global batch's `valid` tokens.

    The engine averages gradients over ranks, so each loss is the sum over its tokens times
    ranks / valid tokens of the whole global batch: every token of a step has the same
    weight, however the valid ones fall on ranks and micro-batches.
    """
    sum_of_losses = torch.zeros((), dtype=torch.float64, device=run.device)
    for inputs, labels in micro_batches:
        sum_of_losses += backward(run.model, inputs, labels, run.world.size / valid, run.device)
    return math.fsum(run.world.collect(float(sum_of_losses), "the loss of a step")) / valid


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
def evaluate(run: Run) -> float | None:
    """The mean loss per token of the held-out samples, the same on all ranks, or None without any."""
    if not run.held_out:
        return None
    run.model.eval()
    # Every rank runs the same number of forwards, or the gathers of one would wait for ever;
    # -1 stands for a row without targets.
    batch = run.config.micro_batch * run.world.size
    indices = [*range(len(run.held_out)), *[-1] * (-len(run.held_out) % batch)]
    loss, tokens = torch.zeros((), dtype=torch.float64, device=run.device), 0
    with ending.during("in an evaluation"):
        for start in range(run.world.rank * run.config.micro_batch, len(indices), batch):
            inputs, labels = run.held_out.batch(indices[start : start + run.config.micro_batch])
            loss += loss_sum(run.model, inputs, labels, run.device).double()
            tokens += int((labels != data.IGNORED).sum())
        sums = [run.world.collect(float(value), f"the held-out {name}") for name, value in (("loss", loss), ("tokens", tokens))]
    return math.fsum(sums[0]) / math.fsum(sums[1])
