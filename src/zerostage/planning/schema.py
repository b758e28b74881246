"""The answer of the planner as data: what `--json` prints and the page draws.

All sizes are whole bytes, all times seconds. `version` is raised when a key changes its meaning or goes away.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

VERSION = 1
#: Terms of `Bytes`: what is there at rest, and what comes and goes within a step.
STATE = ("weights", "gradients", "master", "exp_avg", "exp_avg_sq", "buffers")
PASSING = ("gathered", "reduce", "activations", "logits", "optimizer_temporaries")
#: Of `Moment` and `Row.phases`, in order.
PHASES = ("forward", "loss", "backward", "step")


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Bytes(Answer):
    """What a rank holds, by term: at rest, or at most at any time of a step. No moment needs all of them."""

    weights: int = Field(0, description="weights at rest")
    gradients: int = Field(0, description="kept gradients, at most")
    master: int = Field(0, description="the copy that the optimizer updates")
    exp_avg: int = 0
    exp_avg_sq: int = 0
    gathered: int = Field(0, description="gathered weights, at most")
    reduce: int = Field(0, description="gradients being filled, sent and received, at most")
    activations: int = Field(0, description="saved and passing activations, at most, without logits")
    logits: int = Field(0, description="logits, loss and their gradients, at most")
    optimizer_temporaries: int = Field(0, description="temporaries of the optimizer's step, at most")
    buffers: int = Field(0, description="fixed communication buffers of the engine")
    context: int = Field(0, description="outside the allocator: CUDA context, NCCL")


class Moment(Answer):
    """A point of the memory of one step over time."""

    at: str = Field(description="what happens: 'forward model.layers.3', 'loss', 'backward model.layers.3', 'step'")
    phase: str = Field(description="forward, loss, backward or step")
    bytes: dict[str, int] = Field(description="by term, the same keys as `Bytes`; their sum is what is allocated")


class Span(Answer):
    """A piece of the step's time line on one stream."""

    stream: str = Field(description="compute or communication")
    name: str
    start_s: float
    end_s: float


class Row(Answer):
    """One setting: a stage (or a hybrid) on a number of ranks."""

    stage: int | None = Field(description="0 to 3; None for a hybrid")
    layout: str = Field(description="'stage 3', 'hybrid 8 x 4', 'tensor 8 x pipeline 4 x data 2'")
    partition: tuple[int, int, int] = Field(description="the degrees that divide optimizer, gradients and weights")
    ranks: int
    engine: str
    bytes: Bytes
    phases: dict[str, int] = Field(description="allocated at most in each phase of a later step: forward, loss, backward, step")
    first_step: int = Field(description="peak of the first step, when there is no optimizer state before its end")
    peak_allocated: int = Field(description="maximum over the phases")
    peak_phase: str
    reserved_low: int = Field(description="what torch's caching allocator will hold, from here ...")
    reserved_high: int = Field(description="... to here")
    device_used: int = Field(description="what nvidia-smi will show, at most: reserved_high and the context, but no more than the card has")
    fits: bool = Field(description="whether peak_allocated and context stay within 95% of what the card really has")
    left: int = Field(description="95% of the card's usable bytes, less peak_allocated and context; negative: so much is missing")
    sent_bytes_per_step: int
    compute_s: float | None = None
    communication_s: float | None = None
    exposed_s: float | None = None
    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = Field(None, description="model FLOPs (no recomputation) per second over the card's peak")


class Choice(Answer):
    """A knob that could be turned, and what it would bring."""

    change: str = Field(description="in words: 'full activation checkpointing'")
    peak_allocated: int
    fits: bool
    step_s: float | None = None


class Recommendation(Answer):
    stage: int | None
    ranks: int | None = Field(description="None: nothing that was tried fits")
    layout: str
    tensor: int = 1
    pipeline: int = 1
    data: int | None = None
    engine: str = "zerostage"
    fits: bool
    reasons: list[str]
    choices: list[Choice] = Field(default_factory=list, description="cheaper or roomier settings, best first")
    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    activation_room: int | None = Field(None, description="bytes left on the card for activations beside the training state")
    largest_micro_batch: int | None = None
    longest_sequence: int | None = None
    gpu_hours: float | None = Field(None, description="for the asked number of tokens")
    row: Row | None = None


class Plan(Answer):
    version: int = VERSION
    model: dict[str, Any] = Field(description="name, family, parameters, active_parameters, trainable_parameters, layers, hidden, ...")
    machine: dict[str, Any] = Field(description="gpu, nodes, gpus_per_node, usable_bytes, network_gb_s, link_gb_s, ... or empty")
    run: dict[str, Any]
    method: str = Field(description="closed form, simulation, or training state only")
    rows: list[Row]
    asked: Row | None = Field(None, description="the one setting that was asked for (--stage and the machine's ranks)")
    recommendation: Recommendation | None = None
    timeline: list[Moment] = Field(default_factory=list, description="memory of one step of the asked row, or else of the recommended one")
    spans: list[Span] = Field(default_factory=list, description="compute and communication of that step")
    assumed: list[str] = Field(default_factory=list, description="what was not given and therefore assumed")
    left_out: list[str] = Field(default_factory=list, description="what no figure contains")
