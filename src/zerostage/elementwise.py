"""Which optimizers can run on divided parameters: those that update each element by itself."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import nn

_ELEMENTWISE = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad,
                torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD,
                torch.optim.Rprop)  # fmt: skip


def bare_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings with no state and no hooks, whose groups the caller sets."""
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.__dict__.pop("step", None)  # an LR scheduler may have wrapped the user's
    copy._optimizer_step_pre_hooks, copy._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    copy.state = defaultdict(dict)
    return copy


def states_per_element(optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device) -> int:
    """How many numbers the optimizer keeps for each element of a parameter of `group`: a trial step tells."""
    trial, parameter = bare_copy(optimizer), nn.Parameter(torch.zeros(2, device=device))
    parameter.grad = torch.zeros_like(parameter)
    trial.param_groups = [{**group, "params": [parameter]}]
    trial.step()
    return sum(isinstance(value, torch.Tensor) and value.shape == (2,) for value in trial.state[parameter].values())


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers whose update of one element depends on others.

    torch's elementwise ones are known. Any other class is tried out: three steps on a small
    matrix must give what they give on its two flattened halves, stepped one after the other.
    Raises ValueError with the reason.
    """
    if type(optimizer) in _ELEMENTWISE:
        return
    name = type(optimizer).__name__
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(8, 32, generator=generator) for _ in range(4))

    def trained(pieces: list[torch.Tensor], cut: Any) -> list[torch.Tensor]:
        trial = bare_copy(optimizer)
        parameters = [nn.Parameter(piece.clone()) for piece in pieces]
        settings = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        for gradient in gradients:
            for parameter, part in zip(parameters, cut(gradient)):
                parameter.grad = part.clone()
                trial.param_groups = [{**settings, "params": [parameter]}]
                trial.step()
        return [parameter.detach().flatten() for parameter in parameters]

    reason = "its update of an element depends on the other elements of the same parameter, or on how often it is called"
    try:
        whole = trained([start], lambda tensor: [tensor])[0]
        parts = torch.cat(trained(list(start.flatten().chunk(2)), lambda tensor: tensor.flatten().chunk(2)))
        if torch.allclose(whole, parts, rtol=1e-5, atol=1e-7):
            return
    except Exception as error:
        reason = f"it fails on one-dimensional parts of a parameter: {type(error).__name__}: {error}"
    raise ValueError(
        f"{name} cannot run on divided parameters: {reason}. Use an elementwise optimizer (AdamW, Adam, SGD, RMSprop, "
        "Lion, ...); LAMB, Muon, Adafactor and their like need whole parameters"
    )
