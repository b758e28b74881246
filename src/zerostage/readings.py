"""What a memory reading from outside a run says about its stage: `zerostage audit --used`.

Every stage and hybrid is planned (`planning.answer`), and its bytes are laid beside the reading. No torch here.
All sizes are whole bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

from pydantic import Field

from zerostage.mistakes import InputError, closest, number
from zerostage.partition import Partition
from zerostage.planning import answer, rows
from zerostage.planning.memory.engines import BUFFERS
from zerostage.planning.model import resolve as models
from zerostage.planning.run import ALSO, Run
from zerostage.planning.schema import Answer, Row
from zerostage.used import Used, half_a_digit, size
from zerostage.verdict import EXACT, EXPLAINS, Candidate, Kind, judge, rough, window

VERSION = 1
#: Ranks that read more than this above or below the median are named.
UNEVEN = 0.05


class Reading(Answer):
    version: int = VERSION
    model: dict[str, Any]
    run: dict[str, Any]
    method: str = Field(description="closed form, or training state only")
    ranks: int
    kind: Kind
    used: list[Used] = Field(description="one, or one a rank")
    judged: Used = Field(description="their median, which is laid beside the candidates")
    uneven: list[int] = Field(description="places in `used` that are more than 5% off the median")
    candidates: list[Candidate]
    configured: int | None = Field(None, description="the stage that was configured")
    agrees: bool | None = Field(None, description="whether that stage is among the explanations")
    notes: list[str] = Field(description="what follows, and what would tell explanations apart")
    assumed: list[str]

    @property
    def explanations(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.verdict in EXPLAINS]


def explain(
    used: Sequence[Used], model: Any = None, *, params: str | float | None = None, ranks: int, kind: Kind = "any",
    stage: int | None = None, gpus_per_node: int = 8, **run: Any,
) -> Reading:  # fmt: skip
    """Lay a reading beside every stage, and both hybrids where the ranks are several nodes of `gpus_per_node`.

    used: of one rank or of each. model, params and run as `zerostage.plan` takes them; checkpointing that is not given is
    tried in all its settings. stage: the configured one. Raises InputError, one line, for what cannot be used.
    """
    if kind not in get_args(Kind):
        raise InputError(f"--reading is {kind!r}, not one of {', '.join(get_args(Kind))}{closest(str(kind), get_args(Kind))}")
    if not used or len(used) > ranks:
        raise InputError(f"{len(used)} readings for {ranks} rank(s): give one, or one a rank")
    called = "rank" if len(used) == ranks else "reading"
    used = [one if one.name else one.model_copy(update={"name": f"{called} {i}"}) for i, one in enumerate(used)]
    judged = sorted(used, key=lambda one: one.bytes)[(len(used) - 1) // 2]
    plans = [answer.plan(model, params=params, ranks=[ranks], stage=stage, **run)]
    first = plans[0]
    said = {ALSO.get(name, name): value for name, value in run.items() if value is not None}
    modelled = first.method != "training state only"
    if modelled and "checkpointing" not in said and kind != "allocated":
        plans += [answer.plan(model, ranks=[ranks], **run, checkpointing=other) for other in ("selective", "none")]
    settings = Run(**first.run)
    count = number("params", params) if isinstance(params, str) else params
    architecture = models.resolve(model, params=count, lora_rank=settings.lora_rank)
    stages = BUFFERS[settings.engine].stages

    def again(partition: Partition, **changes: Any) -> Row:
        return rows.row(architecture, settings.model_copy(update=changes), partition, ranks, None)[0]

    parameters, fuzz = first.model["parameters"], _fuzz(params)
    much = None if modelled else rough(parameters, settings, "checkpointing" in said)
    candidates = []
    for partition in rows.partitions(ranks, gpus_per_node):
        # nothing divided is looked at whatever the engine calls its stages: it is what a wrap policy without a match leaves
        if partition.stage(ranks) not in (0, *stages):
            continue
        variants = {}
        for planned in plans:
            known = next((row for row in planned.rows if row.partition == tuple(vars(partition).values())), None)
            checkpointing = planned.run["checkpointing"]
            variants[checkpointing] = known or again(partition, checkpointing=checkpointing)
        candidate = judge(judged, variants, kind, fuzz, settings, parameters, much)
        if candidate.verdict == "implausible" and modelled:
            candidate.reason += _otherwise(candidate, judged, kind, said, partial(again, partition))
        candidates.append(candidate)
    uneven = [i for i, one in enumerate(used) if abs(one.bytes / judged.bytes - 1) > UNEVEN]
    reading = Reading(
        model=first.model, run=first.run, method=first.method, ranks=ranks, kind=kind, used=used, judged=judged,
        uneven=uneven, candidates=candidates, configured=stage, notes=[],
        assumed=[text for text in first.assumed if "activation checkpointing" not in text or len(plans) == 1],
    )  # fmt: skip
    if len(plans) > 1:
        reading.assumed.append("activation checkpointing full, selective or none: it was not given")
    if ranks > gpus_per_node and any(candidate.stage is None for candidate in candidates):
        reading.assumed.append(f"nodes of {gpus_per_node} GPUs, for the hybrids")
    if stage is not None:
        reading.agrees = stage in [candidate.stage for candidate in reading.explanations]
    reading.notes = _notes(reading, again)
    return reading


def _fuzz(params: str | float | None) -> float:
    """How far, relatively, a parameter count as '7B' may be from the model's."""
    if not isinstance(params, str):
        return 0.0
    digits = params.strip().lower().rstrip("kmbt").replace("_", "")
    return half_a_digit(digits) / float(digits) if digits != params.replace("_", "") or "e" in digits else 0.0


def _otherwise(candidate: Candidate, used: Used, kind: Kind, said: dict, again: Callable[..., Row]) -> str:
    """Which setting that was not given would explain the reading."""
    left = used.low - candidate.state
    below = {end: name for name, (_, end) in candidate.expected.items() if end < left}
    if below and "micro_batch" not in said and kind != "allocated":
        checkpointing = below[max(below)]
        one, two = (window(again(checkpointing=checkpointing, micro_batch=n), kind)[1] for n in (1, 2))
        more = 1 + math.ceil((used.low - one) / (two - one)) if two > one else 0
        return f"; a micro-batch of {more} or more would explain it" if more else ""
    if not below and "sequence" not in said:
        least = said.get("checkpointing", "full")
        if used.high >= window(again(checkpointing=least, micro_batch=1, sequence=1), kind)[0]:
            return "; shorter sequences would explain it"
    return ""


def _notes(reading: Reading, again: Callable[..., Row]) -> list[str]:
    found, notes = reading.explanations, []
    if reading.method == "training state only":
        unknown = "name the model for" if reading.model["family"] == "parameters" else "of this model nothing is known of"
        notes.append(f"Only the training state can be compared: {unknown} activations, gathered units and logits.")
    if reading.kind == "any":
        notes.append(
            "Taken to be read when at least one step is done. Say what the figure is for a sharper answer: --reading nvidia-smi, "
            "reserved, peak (max_memory_allocated) or allocated (memory_allocated between steps)."
        )
    for place in reading.uneven:
        one, median = reading.used[place], reading.judged.bytes
        times = f"{one.bytes / median:.2f} times the median, {size(median)}, which is judged here"
        notes.append(f"{one.name[0].upper()}{one.name[1:]} holds {size(one.bytes)}, {times}.")
    if 1 < len(reading.used) < reading.ranks:
        notes.append(f"{len(reading.used)} of {reading.ranks} ranks were read.")
    if reading.configured is not None and not reading.agrees:
        why = ": one rank divides nothing, so that every stage is stage 0" if reading.ranks == 1 and reading.configured else ""
        notes.insert(0, f"Configured is stage {reading.configured}, which does not explain the reading{why}.")
    if not found:
        notes.append("Nothing that was compared explains the reading: check the ranks, the engine and the settings of the run.")
    elif len(found) == 1:
        notes.append(f"Of what was compared, only {found[0].layout} explains the reading. What was not compared may, too.")
    else:
        notes += _apart(reading, found, again)
    return notes


def _apart(reading: Reading, found: list[Candidate], again: Callable[..., Row]) -> list[str]:
    """What would tell the explanations apart."""

    def each(sizes: list[int]) -> str:
        return ", ".join(f"{size(value)} for {one.layout}" for one, value in zip(found, sizes))

    def differ(sizes: list[int]) -> bool:
        return max(sizes) > (1 + UNEVEN) * min(sizes)

    notes = [f"{len(found)} explanations remain; one reading cannot tell them apart:"]
    states = [one.state for one in found]
    if differ(states):
        notes.append(f"- torch.cuda.memory_allocated() between backward and zero_grad: {each(states)}.")
    more = [_on_twice(one, reading.ranks) - one.state for one in found]
    if max(more) - min(more) > 2 * EXACT * reading.judged.bytes:
        changes = [size(change, signed=True) if change else "no change" for change in more]
        each_changes = ", ".join(f"{change} for {one.layout}" for change, one in zip(changes, found))
        notes.append(f"- The same reading on {2 * reading.ranks} ranks: {each_changes}.")
    if reading.method != "training state only":
        run = reading.run
        fewer = {"micro_batch": 1} if run["micro_batch"] > 1 else {"sequence": max(1, run["sequence"] // 4)}
        words = "a micro-batch of 1" if run["micro_batch"] > 1 else f"sequences of {fewer['sequence']} tokens"
        peaks = [again(Partition(*one.partition), **fewer).peak_allocated for one in found]
        if differ(peaks):
            notes.append(f"- torch.cuda.max_memory_allocated() over a step with {words}: {each(peaks)}.")
    notes.append("- zerostage.audit(model, optimizer) inside the run measures it.")
    return notes


def _on_twice(one: Candidate, ranks: int) -> int:
    """The training state on twice the ranks: what all of them divide is halved."""
    optimizer, gradients, weights = (2 if degree == ranks > 1 else 1 for degree in one.partition)
    b = one.bytes
    return (b.master + b.exp_avg + b.exp_avg_sq) // optimizer + b.gradients // gradients + b.weights // weights + b.buffers
