"""What rank 0 shows and writes: a progress bar, and one JSON object a line in the metrics file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zerostage.train import account, check


class Report:
    """A context: the progress bar of `steps` steps and the metrics file at `path` (None: silent).

    Lines of the metrics file are flushed one by one, so a run that is interrupted leaves whole
    lines. Where the output is no terminal, a line is printed per step instead of the bar.
    """

    def __init__(self, path: str | None, steps: int) -> None:
        self.path, self.steps = path, steps
        self.console = Console(quiet=path is None, highlight=False, soft_wrap=not Console().is_terminal)
        self.losses: list[tuple[int, float]] = []
        self.file = None
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=path is None or not self.console.is_terminal,
        )

    def __enter__(self) -> Report:
        if self.path:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "w", encoding="utf-8")
        self.task = self.progress.add_task("train", total=self.steps, numbers="")
        return self

    def __exit__(self, *_) -> None:
        self.progress.stop()
        if self.file:
            self.file.close()

    def write(self, **values: Any) -> None:
        """One line of metrics. JSON has no infinities, so a number that is not finite becomes null."""
        if self.file:
            plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
            self.file.write(json.dumps(plain) + "\n")
            self.file.flush()

    def start(self, config, samples: int, held_out: int, parameters: int, device) -> None:
        """Say what is about to run."""
        weights = "bf16 weights, fp32 master weights" if config.precision == "bf16" else "fp32"
        dropped = samples % config.global_batch
        self.console.print(
            f"{config.model}: {parameters:,} parameters, {weights}, ZeRO stage {config.stage} "
            f"on {config.ranks} rank{'s' * (config.ranks > 1)} ({device.type})"
        )
        self.console.print(
            f"{samples:,} training and {held_out:,} held-out sequences of {config.sequence_length:,} tokens; "
            f"a step: {config.global_batch} sequences = {config.micro_batch} x {config.accumulation} x {config.ranks} "
            "(micro-batch x accumulation x ranks)"
        )
        if dropped:
            self.console.print(
                f"{dropped} sequence{'s' * (dropped > 1)} of each epoch dropped: the last global batch would be short"
            )

    def held_out(self, step: int, loss: float | None) -> None:
        """The held-out loss after `step` steps."""
        if loss is None:
            return
        self.losses.append((step, loss))
        self.console.print(f"held-out loss {loss:.4f} " + (f"after step {step}" if step else "before"))
        self.write(step=step, eval_loss=loss)
        if step < self.steps:
            self.progress.start()

    def step(self, *, step: int, loss, grad_norm, lr, seconds, tokens, peak, skipped) -> None:
        """One optimizer step: `loss` per token, `seconds` for it, `tokens` of the global batch.

        `peak` bytes: the most so far, all that CUDA allocated or, on the CPU, all that the engine held.
        """
        speed = tokens / seconds
        self.write(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens_per_s=speed,
            step_s=seconds,
            peak_bytes=peak,
            **({"skipped": True} if skipped else {}),
        )
        numbers = f"loss {loss:.4f}  grad norm {grad_norm:.3f}  lr {lr:.2e}  {speed:,.0f} tokens/s"
        if skipped:
            self.console.print(f"step {step} skipped: a gradient is not finite; weights and states are untouched")
        self.progress.update(self.task, completed=step, numbers=numbers)
        if self.progress.disable:
            self.console.print(f"step {step}/{self.steps}  {numbers}")
        elif step == self.steps:
            self.progress.stop()

    def audit(self, record: dict[str, Any], ranks: int) -> None:
        """The audit after one of the first steps (what `check.record` returns), printed in a line and written."""
        self.write(**record)
        self.console.print(check.line(record, ranks))

    def account(self, record: dict[str, Any]) -> None:
        """The closing account, printed and written."""
        self.write(account=record)
        if len(self.losses) > 1:
            (_, before), (step, after) = self.losses[0], self.losses[-1]
            self.console.print(f"\nheld-out loss: {before:.4f} before, {after:.4f} after {step} steps\n")
        if self.path:
            account.show(self.console, record)
            self.console.print(f"metrics: {self.path}")

    def trace(self, trace: Any, path: str) -> None:
        """Where the last step's time went, printed and written."""
        self.write(trace=trace.split())
        if self.path:
            trace.save(path)
            self.console.print(f"\nlast step:\n{trace}\ntrace of it: {path}")

    def saved(self, folder: str) -> None:
        self.console.print(f"trained model: {folder}")
