"""One stage or hybrid beside a memory reading: what is left over, and whether a step explains that. All sizes are whole bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from zerostage.planning.model.architecture import usual_depth
from zerostage.planning.run import ITEMSIZE, Run
from zerostage.planning.schema import STATE, Answer, Bytes, Row
from zerostage.used import Used, size

GIB = 2**30
#: What a figure may be of: what nvidia-smi shows, or torch.cuda.memory_reserved(), max_memory_allocated() over a step, or
#: memory_allocated() between two steps. any: one of them, it is not known which.
Kind = Literal["any", "nvidia-smi", "reserved", "peak", "allocated"]
#: Of `Candidate.expected`, where only a parameter count is known.
ROUGHLY = "roughly"
Verdict = Literal["exact", "explains", "below the peak", "implausible", "impossible"]
#: Those that count as an explanation.
EXPLAINS = ("exact", "explains", "below the peak")
#: How far a run may be from its plan: of what a step needs beside the training state, and of that. 95 of the 101 readings of
#: published runs whose settings are known lie within; four of the other six are of tensor parallelism.
MARGIN, STATE_MARGIN = 0.15, 0.02
#: Bytes outside torch's allocator: a bare CUDA context, and one with NCCL's channels and other libraries.
CONTEXT = (GIB // 4, 2 * GIB)
#: A reading within this of the training state is the training state; between steps there are a few batches and workspaces.
EXACT, BETWEEN = 0.01, GIB // 16


class Candidate(Answer):
    """One stage or hybrid beside the reading."""

    layout: str = Field(description="'stage 2', 'hybrid 8 x 8'")
    stage: int | None = Field(description="0 to 3; None for a hybrid")
    partition: tuple[int, int, int] = Field(description="the degrees that divide optimizer, gradients and weights")
    bytes: Bytes = Field(description="a rank's, by term, as in a plan")
    state: int = Field(description="training state with the engine's fixed buffers")
    left: int = Field(description="the reading less `state`; negative: so much is missing")
    expected: dict[str, tuple[int, int]] = Field(
        description="by activation checkpointing: beside `state`, a reading of this kind has from here to there; 'roughly' where "
        "only a parameter count is known"
    )
    peak_allocated: int | None = Field(description="of a step; None where only the training state is known")
    checkpointing: list[str] = Field(
        description="the settings of it with which this explains the reading, the nearest first; `bytes` are the first one's"
    )
    verdict: Verdict
    reason: str


def state(row: Row) -> int:
    """The training state of a rank, with the engine's fixed buffers."""
    return sum(getattr(row.bytes, term) for term in STATE)


def rough(parameters: int, run: Run, checkpointing_said: bool) -> int:
    """Bytes beside the training state that would be much for a transformer of so many parameters: all that can be said then.

    Its usual shape is N = 12 L h^2 with h = 128 L. A layer keeps 34 bytes per token and hidden element without its scores
    (Korthikanti et al. 2022, section 4.1), or its input, 2 bytes, under full checkpointing; logits of a vocabulary of 128k
    and their gradient take 12 bytes each; eight layers' weights are gathered or reduced.
    """
    layers = max(1.0, usual_depth(parameters))
    hidden = 128 * layers
    kept = 34 + 2 * layers if checkpointing_said and run.checkpointing == "full" else 34 * layers
    return round(run.tokens * (hidden * kept + 12 * 128e3) + 8 * 2 * parameters / layers) + CONTEXT[1]


def window(row: Row, kind: Kind) -> tuple[int, int]:
    """From where to where a reading of `kind` is expected."""
    rest, beside = state(row), max(0, row.peak_allocated - state(row))
    margin = round(MARGIN * beside + STATE_MARGIN * rest)
    if kind == "allocated":
        return rest - row.bytes.gradients, round(rest * (1 + EXACT)) + BETWEEN
    low = row.peak_allocated - margin + (CONTEXT[0] if kind == "nvidia-smi" else 0)
    if kind == "peak":
        return max(rest, low), row.peak_allocated + margin
    return max(rest, low), row.reserved_high + margin + (0 if kind == "reserved" else CONTEXT[1])


def judge(
    used: Used, variants: dict[str, Row], kind: Kind, fuzz: float, run: Run, parameters: int, much: int | None
) -> Candidate:  # fmt: skip
    """Lay `used` beside one setting.

    variants: its row by activation checkpointing. fuzz: how far, relatively, `parameters` may be from the model's. much:
    an upper bound of what is not training state, where only that is known.
    """
    row = next(iter(variants.values()))
    rest, gradients = state(row), row.bytes.gradients
    if much is None or kind == "allocated":
        windows = {name: window(one, kind) for name, one in variants.items()}
    else:
        windows = {ROUGHLY: (rest, rest + much)}
        if run.engine in ("fsdp1", "fsdp2") and row.stage == 2:  # whole weights from forward to backward
            whole = ITEMSIZE[run.weights] * parameters
            windows = {ROUGHLY: (rest if kind == "any" else rest + whole, rest + whole + much)}
    low, high = min(start for start, _ in windows.values()), max(end for _, end in windows.values())
    covers = [name for name, (start, end) in windows.items() if used.high >= start and used.low <= end]
    covers.sort(key=lambda name: abs(2 * used.bytes - sum(windows[name])))  # the nearest first
    row = variants[covers[0]] if covers and covers[0] in variants else row
    left, about = used.bytes - rest, size(abs(used.bytes - rest))
    floor = rest - gradients if kind == "allocated" else rest
    verdict: Verdict
    if used.high < floor * (1 - fuzz):
        verdict, reason = "impossible", f"the training state alone is {size(floor)}{_unless(used, row, kind)}"
    elif kind in ("any", "allocated") and rest * (1 - fuzz) <= used.high and used.low <= rest * (1 + fuzz + EXACT):
        verdict, reason = "exact", f"its training state is {size(rest)}"
        if kind == "any" and left > 0:
            reason += f", which leaves {about} for all else of a step"
        if used.high < low:
            reason += f" ({size(low - rest)} or more): read between steps"
    elif used.high < low * (1 - fuzz):
        verdict, reason = "implausible", f"too little: {size(low)} or more are expected"
        if kind == "any":
            verdict = "below the peak"
            reason = f"leaves {about}, less than the {size(low - rest)} of a step: read at another moment, or of a smaller step"
    elif covers or used.low <= high * (1 + fuzz) and len(windows) == 1:
        verdict, reason = "explains", f"leaves {about} for activations, gathered units, logits and context"
        if kind == "allocated":
            reason = f"its training state {f'without {about} of its gradients' if left < 0 else f'and {about}'}"
        elif ROUGHLY not in windows:
            reason += f"; expected are {_ranges(windows, covers, rest)}"
    else:
        verdict, reason = "implausible", f"leaves {about} unexplained: "
        if ROUGHLY in windows:
            reason += f"{size(high - rest)} beside the training state would be much for {run.tokens:,} tokens a rank"
        else:
            reason += f"expected are {_ranges(windows, windows, rest)}"
    return Candidate(
        layout=row.layout, stage=row.stage, partition=row.partition, bytes=row.bytes, state=rest, left=left,
        expected={name: (start - rest, end - rest) for name, (start, end) in windows.items()},
        peak_allocated=row.peak_allocated if much is None else None, checkpointing=[] if ROUGHLY in windows else covers,
        verdict=verdict, reason=reason,
    )  # fmt: skip


def _ranges(windows: dict[str, tuple[int, int]], names: Iterable[str], rest: int) -> str:
    found = [f"{size(windows[name][0] - rest)} to {size(windows[name][1] - rest)}" for name in names]
    if len(windows) > 1:
        found = [f"{text} with checkpointing {name}" for text, name in zip(found, names)]
    return ", ".join(found)


def _unless(used: Used, row: Row, kind: Kind) -> str:
    """When a reading below the training state is possible after all."""
    moments = row.bytes.exp_avg + row.bytes.exp_avg_sq
    if moments and used.high >= state(row) - moments:
        return f" ({size(state(row) - moments)} before the first step is done)"
    if kind == "any" and used.high >= state(row) - row.bytes.gradients:
        return f" ({size(state(row) - row.bytes.gradients)} without gradients, as torch.cuda.memory_allocated() after zero_grad)"
    return ""
