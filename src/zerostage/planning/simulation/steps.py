"""The steps of a simulated run, with marks of where each is."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

import zerostage
from zerostage.autograd import in_backward, tensors_in
from zerostage.engine import Engine
from zerostage.mistakes import InputError
from zerostage.planning.run import Run
from zerostage.planning.simulation.lives import Lives

#: Under what terms the engine's own account and the optimizer's states go here.
TERMS = {"in_flight": "reduce", "momentum_buffer": "exp_avg"}


class Steps:
    """Runs steps and marks on the record where each is."""

    def __init__(self, model: nn.Module, run: Run, vocabulary: int | None, granule: int) -> None:
        self.model, self.run, self.vocabulary = model, run, vocabulary
        self.lives = Lives(granule, self._whose)
        self._in_loss = False

    def _whose(self, tensor: Tensor) -> str:
        return "logits" if self._in_loss and tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary else "activations"

    def watch(self, engine: Engine, head: nn.Module | None) -> None:
        self.engine = engine
        for unit in engine.units:
            for module in unit.modules:
                if module is not self.model and module is not head:
                    module.register_forward_pre_hook(lambda *_, name=unit.name: self._forward(name))
                    module.register_forward_hook(lambda _, args, output, name=unit.name: self._passed(output, name))
        if head is not None:
            head.register_forward_pre_hook(lambda *_: self._loss())

    def _mark(self, at: str, phase: str) -> None:
        self._in_loss = at in ("loss", "backward loss")
        self.lives.mark(at, phase)

    def _forward(self, name: str) -> None:
        if not in_backward():
            self._mark(f"forward {name}", "forward")

    def _loss(self) -> None:
        if not in_backward() and not self._in_loss:
            self._mark("loss", "loss")

    def _passed(self, output: Any, name: str) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad and not in_backward():
                tensor.register_hook(lambda _: self._mark(f"backward {name}", "backward"))
                return

    def _ask(self) -> None:
        """Have the engine say which storages are whose."""
        for term, tensors in self.engine.storages().items():
            self.lives.belongs(TERMS.get(term, term), tensors)

    def step(self, batches: list[dict[str, Tensor]]) -> dict[str, int]:
        """One step; returns the bytes by term between its backward and its update."""
        driver = self.engine.driver
        self._ask()
        self.lives.begin()
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            self._mark("forward", "forward")
            with ExitStack() as stack:
                if self.run.keep_local and not last:
                    stack.enter_context(zerostage.no_sync(self.model))
                self._micro_batch(batch)
        self._ask()
        held = zerostage.memory(self.model).measured
        at_rest = {TERMS.get(term, term): size for term, size in held.items() if term not in ("gathered", "in_flight")}
        self._mark("step", "step")
        # values that nobody has: every gradient is finite, and there are no bits of the weights to keep a mark of
        driver.known_norm = tuple(flat.version for flat in driver.flats), 0.0
        driver.updates = max(1, driver.updates)
        driver.optimizer.step()
        self._ask()
        driver.optimizer.zero_grad()
        return at_rest

    def _micro_batch(self, batch: dict[str, Tensor]) -> None:
        output = self.model(**batch)
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if not isinstance(loss, Tensor) or loss.dim():
            given, got = ", ".join(batch), type(output).__name__
            raise InputError(f"the model must return its loss, or something that has a loss, for a batch of {given}, not a {got}")
        del output  # and the logits with it, as in `loss = model(**batch).loss`
        if self.run.accumulation > 1:
            loss = loss / self.run.accumulation
        self._mark("backward loss", "backward")
        loss.backward()
