"""What one rank needs to train: the job that it joins, the data, the model and its optimizer, divided over the ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerostage
from zerostage.collectives import World
from zerostage.engine import require
from zerostage.mistakes import InputError
from zerostage.train import data, joining, model_folder
from zerostage.train import model as models
from zerostage.train.config import TrainConfig


@dataclass
class Run:
    """What one rank trains, on what, and with whom."""

    config: TrainConfig
    device: torch.device
    tokenizer: Any
    samples: data.Samples
    held_out: data.Samples | None
    model: nn.Module
    optimizer: torch.optim.Optimizer
    world: World


def prepare(config: TrainConfig) -> Run:
    """Join the job, read data and model, and divide the model over the ranks."""
    device = join(config)
    if config.trace and device.type != "cpu":
        raise InputError("--trace times the host, which runs ahead of a GPU: use --device cpu, or torch.profiler")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(config.seed + rank)  # dropout only: the weights are read, the order has its own seed
    folder = model_folder.find(config.model)
    _quiet_transformers()
    tokenizer = models.load_tokenizer(folder)
    samples, held_out = data.load_once_per_node(config, tokenizer)
    model = models.build(folder, config)
    check_vocabulary(model, samples, held_out)
    optimizer = models.build_optimizer(model, config)
    precision = zerostage.Precision() if config.precision == "bf16" else zerostage.Precision.full()
    model, optimizer = zerostage.shard(model, optimizer, config.stage, precision=precision, prefetch=config.prefetch)
    zerostage.load_weights(model, folder)
    model.config.dtype = next(model.parameters()).dtype  # built in fp32, trained and saved in this one
    return Run(config, device, tokenizer, samples, held_out, model, optimizer, require(model).world)


def join(config: TrainConfig) -> torch.device:
    """This process's device; joins the process group if there are several ranks."""
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
        joining.join(device)
    return device


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
