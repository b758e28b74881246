"""What rank 0 shows and writes: a progress bar, and one JSON object a line in the metrics file."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zerostage.train import account, check


class Report:
    """A context: the progress bar of `steps` steps and the metrics file at `path` (None: silent).

    Lines of the metrics file are flushed one by one, so a run that is interrupted leaves whole
    lines. A run that goes on after the step `resumed` continues the file, without what is of later
    steps. Where the output is no terminal, a line is printed per step instead of the bar.
    """

    def __init__(self, path: str | None, steps: int, resumed: int | None = None) -> None:
        self.path, self.steps, self.resumed = path, steps, resumed
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
            if self.resumed is not None:
                self._keep(self.resumed)
            self.file = open(self.path, "w" if self.resumed is None else "a", encoding="utf-8")
        self.task = self.progress.add_task("train", total=self.steps, completed=self.resumed or 0, numbers="")
        return self

    def __exit__(self, *_) -> None:
        self.progress.stop()
        if self.file:
            self.file.close()

    def _keep(self, last: int) -> None:
        """Leave what the metrics file has up to step `last`: one line a step, and one of each evaluation."""
        file = Path(self.path)
        if not file.exists():
            return
        kept, complete = [], last >= self.steps  # then the account comes no more, but the last evaluation again
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                values = json.loads(line)
            except ValueError:  # the end of a file on a disk that was full
                continue
            again = complete and "eval_loss" in values and values["step"] == last
            if values.get("step", last if complete else math.inf) <= last and not again:
                kept.append(line + "\n")
                if values.get("eval_loss") is not None:
                    self.losses.append((values["step"], values["eval_loss"]))
        partial = file.with_name(f"{file.name}.partial-{os.getpid()}")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(file)

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

    def going_on(self, lines: list[str], step: int | None) -> None:
        """What the run goes on from, in words, and after which step (None: from the start)."""
        for line in lines:
            self.console.print(line)
        if step is not None:
            self.write(event="resumed", step=step)
            if step >= self.steps:
                self.console.print(f"all {step} steps are done already; evaluating and saving what is asked for")

    def checkpoint(self, *, step: int, path: str, bytes: int, seconds: float, blocked_s: float) -> None:
        """A checkpoint that is published: `seconds` from its begin on, `blocked_s` of which training stood still."""
        self.write(event="checkpoint", step=step, path=path, bytes=bytes, seconds=seconds, blocked_s=blocked_s)
        self.console.print(f"checkpoint after step {step}: {path}, {bytes / 1e6:,.1f} MB in {seconds:.2f} s")

    def tested(self, bytes: int) -> None:
        self.console.print(f"--test-save: wrote {bytes / 1e6:,.1f} MB, read them back, all bits the same")

    def saved(self, folder: str) -> None:
        self.console.print(f"trained model: {folder}")
