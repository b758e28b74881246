"""The decision: which stage, how many ranks, what else would fit, and when the answer is not ZeRO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zerostage.partition import GRADIENTS, WEIGHTS, Partition
from zerostage.planning.memory.engines import BUFFERS
from zerostage.planning.memory.track import Track
from zerostage.planning.model.adapters import linear_weights, with_lora
from zerostage.planning.model.architecture import Architecture
from zerostage.planning.rows import row, state_bytes
from zerostage.planning.run import Run
from zerostage.planning.schema import STATE, Choice, Recommendation, Row
from zerostage.planning.timing import layout3d
from zerostage.planning.timing.duration import Duration
from zerostage.planning.timing.hardware import FILL, Machine

#: Where nothing fits, no number of GPUs beyond this one is looked at.
MOST_RANKS = 16384
#: Estimates of time err by so much: a stage that is faster by less is not faster.
SURE = 0.25


@dataclass
class Candidate:
    """One setting that was looked at."""

    partition: Partition
    row: Row
    track: Track | None  # its memory over a step
    duration: Duration | None


def recommend(
    architecture: Architecture, run: Run, machine: Machine, candidates: list[Candidate], ranks_given: bool, tokens: float | None
) -> Recommendation:
    """Choose among `candidates` (any number of ranks). ranks_given: the largest number of ranks is there and shall be used."""
    counts = sorted({c.row.ranks for c in candidates})
    fitting = [n for n in counts if any(c.row.fits for c in candidates if c.row.ranks == n)]
    ranks = (counts[-1] if ranks_given else fitting[0]) if fitting and (not ranks_given or counts[-1] in fitting) else None
    if ranks is None:
        return _nothing_fits(architecture, run, machine, candidates)
    here = [c for c in candidates if c.row.ranks == ranks]
    best = _best([c for c in here if c.row.fits])
    reasons = [_state(architecture, run, best), *_why(architecture, here, best, machine)]
    if ranks_given and fitting[0] < ranks:
        smallest = _best([c for c in candidates if c.row.ranks == fitting[0] and c.row.fits])
        reasons.append(f"{_gpus(fitting[0])} would be enough, at {smallest.row.layout} ({_gb(smallest.row.peak_allocated)} a rank)")
    answer = _answer(best, machine, reasons)
    _other_layouts(answer, architecture, run, machine.with_ranks(ranks), here)
    if architecture.modelled and answer.row is not None:
        answer.largest_micro_batch = _largest(lambda n: _fits(architecture, run, machine, best, micro_batch=n), run.micro_batch, 1)
        answer.longest_sequence = _largest(lambda n: _fits(architecture, run, machine, best, sequence=n), run.sequence, 256)
        answer.choices = choices(architecture, run, machine, best)
    if tokens and answer.tokens_per_s_per_gpu:
        answer.gpu_hours = tokens / answer.tokens_per_s_per_gpu / 3600
        answer.reasons.append(f"{tokens:,.0f} tokens take {answer.gpu_hours:,.0f} GPU-hours, {answer.gpu_hours / ranks:,.1f} hours by the clock")
    return answer


def _best(fitting: list[Candidate]) -> Candidate:
    """The earliest stage, which sends least, unless another setting is faster by more than estimates err."""
    best = min(fitting, key=lambda c: (c.row.stage is None, c.row.stage or 0, sum(c.row.partition)))
    if best.row.step_s is None:
        return best
    fastest = min((c for c in fitting if c.row.step_s is not None), key=lambda c: c.row.step_s)
    return fastest if fastest.row.step_s < (1 - SURE) * best.row.step_s else best


def _answer(best: Candidate, machine: Machine, reasons: list[str]) -> Recommendation:
    state = sum(getattr(best.row.bytes, term) for term in STATE)
    stage = best.row.stage if best.row.stage is not None else 3 if best.partition.weights > 1 else None
    return Recommendation(
        stage=stage, ranks=best.row.ranks, layout=best.row.layout, data=best.row.ranks, engine=best.row.engine,
        fits=best.row.fits, reasons=reasons, row=best.row, step_s=best.row.step_s, tokens_per_s_per_gpu=best.row.tokens_per_s_per_gpu,
        activation_room=max(0, machine.card.usable_bytes - best.row.bytes.context - state),
    )  # fmt: skip


def _state(architecture: Architecture, run: Run, best: Candidate) -> str:
    """How much training state there is in all, and what a rank holds of it."""
    whole = state_bytes(architecture, run)
    held = sum(getattr(best.row.bytes, term) for term in STATE if term != "buffers")
    text = f"{architecture.parameters:,} parameters"
    if architecture.trainable_parameters != architecture.parameters:
        text += f", {architecture.trainable_parameters:,} of them trained,"
    elif whole == 16 * architecture.parameters:
        text += " x 16 bytes"
    return f"{text} are {_gb(whole)} of training state; a rank holds {_gb(held)} at {best.row.layout} on {_gpus(best.row.ranks)}"


def _why(architecture: Architecture, here: list[Candidate], best: Candidate, machine: Machine) -> list[str]:
    found = []
    card = machine.card
    room = FILL * card.usable_bytes - card.context_bytes
    earlier = [c for c in here if c.row.stage is not None and best.row.stage is not None and c.row.stage < best.row.stage]
    for c in earlier:
        if not c.row.fits:
            floor = (WEIGHTS * architecture.parameters if c.row.stage < 3 else 0) + (
                GRADIENTS * architecture.trainable_parameters if c.row.stage < 2 else 0
            )
            always = " at any number of ranks" if floor > FILL * card.usable_bytes and c.row.stage else ""
            found.append(f"{c.row.layout} needs {_gb(c.row.peak_allocated)} a rank, more than the {_gb(room)} that can be planned with{always}")
    found.append(
        f"{best.row.layout} needs {_gb(best.row.peak_allocated)} a rank at its peak ({best.row.peak_phase}) of "
        f"{_gb(room)} that can be planned with on the {card.name} ({FILL:.0%} of {_gb(card.usable_bytes)}, less {_gb(card.context_bytes)} "
        f"of context): {_gb(best.row.left)} are left"
    )
    if best.row.reserved_high + card.context_bytes > card.usable_bytes:
        found.append(
            f"torch may reserve up to {best.row.reserved_high / 2**30:.1f} GiB of the card's {card.usable_bytes / 2**30:.1f} GiB: should it run "
            "out by fragmentation, set PYTORCH_ALLOC_CONF=expandable_segments:True or take a later stage"
        )
    slower = [c for c in here if c.row.fits and c.row.step_s and best.row.step_s and best.row.step_s < (1 - SURE) * c.row.step_s]
    found += [f"{c.row.layout} fits, too, but takes {c.row.step_s:.2f} s a step where this takes {best.row.step_s:.2f} s" for c in slower]
    later = [c for c in here if c.row.stage is not None and best.row.stage is not None and c.row.stage > best.row.stage]
    for c in later:
        more = c.row.sent_bytes_per_step - best.row.sent_bytes_per_step
        if more > 0 and best.row.stage < 3 and c not in slower:
            found.append(
                f"{c.row.layout} is not needed: it would send {_gb(more)} more a rank and step "
                f"({c.row.sent_bytes_per_step / max(1, best.row.sent_bytes_per_step):.1f} times as much) for memory that is there"
            )
    if best.row.step_s:
        found.append(
            f"a step takes {best.row.step_s:.2f} s, {best.row.exposed_s:.2f} s of it waiting for the network: "
            f"{best.row.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, {100 * best.row.mfu:.0f}% of the card's FLOP/s"
        )
    return found


def _other_layouts(answer: Recommendation, architecture: Architecture, run: Run, machine: Machine, here: list[Candidate]) -> None:
    """Where the network cannot carry stage 3, tensor and pipeline parallelism instead."""
    layout, reasons = layout3d.reversal(architecture, run, machine, [(c.partition, c.row.fits, c.duration) for c in here])
    answer.reasons += reasons
    if layout is not None:
        answer.stage, answer.layout = None, layout.name
        answer.step_s, answer.tokens_per_s_per_gpu = layout.step_s, layout.tokens_per_s_per_gpu
        answer.reasons.append(
            f"{layout.name} holds about {_gb(layout.memory_bytes)} a rank and needs an engine that has it, Megatron-LM for example: "
            "zerostage has no tensor or pipeline parallelism"
        )
        answer.tensor, answer.pipeline, answer.data, answer.engine = layout.tensor, layout.pipeline, layout.data, "megatron"
        answer.ranks = layout.tensor * layout.pipeline * layout.data
        answer.activation_room = None
        answer.fits, answer.row = True, None


def _nothing_fits(architecture: Architecture, run: Run, machine: Machine, candidates: list[Candidate]) -> Recommendation:
    """The setting that lacks least on the largest number of ranks, and what would fit instead."""
    least = min(candidates, key=lambda c: (-c.row.ranks, c.row.peak_allocated))
    reasons = [
        _state(architecture, run, least),
        f"nothing fits on {_gpus(least.row.ranks)}: {least.row.layout} needs {_gb(least.row.peak_allocated)} a rank in its "
        f"{least.row.peak_phase} phase, {_gb(-least.row.left)} more than can be planned with on the {machine.card.name} "
        f"({FILL:.0%} of {_gb(machine.card.usable_bytes)} less the context)",
    ]
    answer = _answer(least, machine, reasons)
    answer.choices = choices(architecture, run, machine, least)
    ranks, enough = least.row.ranks, None
    last = max(stage for stage in BUFFERS[run.engine].stages if stage is not None)
    while ranks < MOST_RANKS and enough is None:
        ranks *= 2
        found = row(architecture, run, Partition.from_stage(last, ranks), ranks, None, timed=False)[0]
        if machine.card.left(found.peak_allocated) >= 0:
            enough = found
    if enough:
        answer.reasons.append(f"stage {last} fits from about {_gpus(enough.ranks)} ({_gb(enough.peak_allocated)} a rank)")
    else:
        answer.reasons.append(f"stage {last} fits at no number of ranks: what is not divided by them is too large already")
    turned = [choice for choice in answer.choices if choice.fits]
    if not turned and not run.lora_rank and architecture.modelled:
        adapted = with_lora(architecture, 16, linear_weights(architecture))
        frozen = row(adapted, run.model_copy(update={"lora_rank": 16}), least.partition, least.row.ranks, machine, timed=False)[0]
        if frozen.fits:
            answer.reasons.append(f"LoRA of rank 16 on all linear layers would fit ({_gb(frozen.peak_allocated)} a rank)")
    if turned:
        answer.reasons.append(f"{least.row.layout} on {_gpus(least.row.ranks)} fits with {turned[0].change} ({_gb(turned[0].peak_allocated)} a rank)")
        return answer
    _other_layouts(answer, architecture, run, machine.with_ranks(least.row.ranks), [c for c in candidates if c.row.ranks == least.row.ranks])
    return answer


def choices(architecture: Architecture, run: Run, machine: Machine, best: Candidate) -> list[Choice]:
    """What else could be turned: settings that fit and are faster first, then those with the smallest peak."""
    turned: dict[str, dict] = {
        "full activation checkpointing": {"checkpointing": "full"},
        "selective activation checkpointing": {"checkpointing": "selective"},
        "no activation checkpointing": {"checkpointing": "none"},
        "a chunked loss": {"loss": "chunked_head"},
        "micro-batches half as large, twice as many": {"micro_batch": run.micro_batch // 2, "accumulation": 2 * run.accumulation},
        "micro-batches twice as large, half as many": {"micro_batch": 2 * run.micro_batch, "accumulation": run.accumulation // 2},
        "FlashAttention": {"attention": "flash"},
    }
    if run.micro_batch > 1:
        one = {"micro_batch": 1, "accumulation": run.micro_batch * run.accumulation}
        turned["micro-batches of 1"] = one
        turned["micro-batches of 1 and full activation checkpointing"] = {**one, "checkpointing": "full"}
    turned["full activation checkpointing and a chunked loss"] = {"checkpointing": "full", "loss": "chunked_head"}
    found, seen = [], [run]
    for change, values in turned.items() if architecture.modelled else ():
        other = run.model_copy(update=values)
        if other in seen or not other.micro_batch or not other.accumulation:
            continue
        seen.append(other)
        answer = row(architecture, other, best.partition, best.row.ranks, machine.with_ranks(best.row.ranks))[0]
        found.append(Choice(change=change, peak_allocated=answer.peak_allocated, fits=answer.fits, step_s=answer.step_s))
    return sorted(found, key=lambda c: (not c.fits, c.step_s if c.fits and c.step_s else c.peak_allocated))


def _fits(architecture: Architecture, run: Run, machine: Machine, best: Candidate, **values: int) -> bool:
    return row(architecture, run.model_copy(update=values), best.partition, best.row.ranks, machine, timed=False)[0].fits


def _largest(fits: Callable[[int], bool], start: int, unit: int) -> int:
    """The largest multiple of `unit` that fits, from `start`, which does; above 64 units to within 1 in 64."""
    low, high = start, 2 * start
    while fits(high):
        low, high = high, 2 * high
        if high > 2**24:
            return low
    low, high = low // unit, -(-high // unit)
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * unit) else (low, middle)
    return max(start, low * unit)


def _gpus(ranks: int) -> str:
    return f"{ranks} GPU" + "s" * (ranks != 1)


def _gb(size: float) -> str:
    return f"{size / 1e9:,.{0 if abs(size) >= 1e11 else 1}f} GB"
