"""What the schedule asks of autograd, and the shapes in which modules pass tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def transformed() -> bool:
    """Whether a torch.func transform (grad, vmap, ...) is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def tensors_in(value: Any, seen: set[int] | None = None, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors within a module's inputs or outputs, however they are packed."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    seen = set() if seen is None else seen
    if depth > 5 or id(value) in seen or isinstance(value, (str, bytes, int, float, type, nn.Module, type(None))):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        items: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple, set)):
        items = value
    else:
        items = getattr(value, "__dict__", {}).values()
    for item in list(items):
        yield from tensors_in(item, seen, depth + 1)


_BETWEEN = "zerostage gathers and frees weights between the modules of a sharded model"


def not_compiled(function: Any) -> Any:
    """Keep torch.compile out of a function of the engine and of all that it calls.

    What it does must happen anew each time, and a graph that had it inside would depend on
    what is gathered at the moment.
    """
    return torch.compiler.disable(function, reason=_BETWEEN)


def explain_fullgraph() -> None:
    """To be called when a forward has raised: where torch.compile met the engine, say first what to compile instead."""
    error = sys.exc_info()[1]
    if _BETWEEN in str(error):
        error.args = (
            f"fullgraph=True cannot hold here: {_BETWEEN}. Compile its blocks with it before zerostage.shard, as in "
            f"`for block in blocks: block.compile(fullgraph=True)`, or leave it out. torch.compile reports:\n{error}",
        )


def will_run(parameter: nn.Parameter) -> bool:
    """Whether autograd's task under way will accumulate a gradient for the parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False  # see `accumulates`


def accumulates() -> bool:
    """Whether the task under way is a backward, and no torch.autograd.grad, which gives gradients to its caller."""
    node = torch.autograd.graph.get_gradient_edge(torch.empty(0, requires_grad=True)).node
    try:
        torch._C._will_engine_execute_node(node)
        return True
    except RuntimeError:
        return False
