"""One row of the answer: a setting's memory, whether it fits the card, its traffic and its time."""

from __future__ import annotations

from zerostage.partition import STAGES, Partition
from zerostage.planning.memory.buffers import Buffers
from zerostage.planning.memory.engines import BUFFERS
from zerostage.planning.memory.track import Track
from zerostage.planning.memory.walk import walk
from zerostage.planning.model.architecture import Architecture
from zerostage.planning.run import Run
from zerostage.planning.schema import PASSING, STATE, Bytes, Row
from zerostage.planning.timing.duration import Duration, step
from zerostage.planning.timing.habits import Traffic
from zerostage.planning.timing.hardware import Machine


def partitions(ranks: int, ranks_per_node: int) -> list[Partition]:
    """Stages 0 to 3, and the two hybrids where there are several nodes."""
    found = [Partition.from_stage(stage, ranks) for stage in STAGES]
    if 1 < ranks_per_node < ranks and ranks % ranks_per_node == 0:
        found += [Partition.node_local_weights(ranks, ranks_per_node), Partition.hybrid(ranks_per_node)]
    return list(dict.fromkeys(found))


def layout(partition: Partition, ranks: int) -> str:
    stage = partition.stage(ranks)
    if stage is not None:
        return f"stage {stage}"
    o, g, w = partition.optimizer, partition.gradients, partition.weights
    return f"hybrid {w} x {ranks // w}" if o == g == w else f"stage 3, weights within {w}"


def row(
    architecture: Architecture,
    run: Run,
    partition: Partition,
    ranks: int,
    machine: Machine | None,
    timed: bool = True,
    simulated: tuple[Track, int, dict[str, int]] | None = None,
) -> tuple[Row, Track | None, Duration | None]:
    """The row, the memory of its step over time (None where only a parameter count is known), and its time.

    simulated: what `simulate.py` found: the track of a later step, the peak of the first one, and the bytes at rest.
    """
    duration = step(architecture, run, machine, partition, ranks) if machine and timed and run.tensor == 1 else None
    buffers = BUFFERS[run.engine](architecture, run, partition, ranks, Track())
    if simulated:
        track, first, rest = simulated
    else:
        track = walk(architecture, run, partition, ranks) if architecture.modelled else _state_only(architecture, run, partition, ranks)
        rest = buffers.sizes()
        # the first step makes the optimizer's states at its end
        states = rest["exp_avg"] + rest["exp_avg_sq"]
        first = max(size - states * (phase != "step") for phase, size in track.phases.items())
    traffic = Traffic(run, partition, ranks)
    context = machine.card.context_bytes if machine else 0
    usable = machine.card.usable_bytes if machine else None
    # The caching allocator takes from the driver at least the peak, where every freed block is used again at once, and at
    # most what each term needs at most, where none is ever used for another (and what another stream may still use).
    low, high = track.peak, sum(track.highest.values()) + buffers.pending()
    used = high + context if usable is None else min(high + context, usable)
    left = machine.card.left(track.peak) if machine else 0
    terms = {name: rest.get(name, 0) for name in STATE}
    most = {name: track.highest.get(name, 0) for name in PASSING}
    answer = Row(
        stage=partition.stage(ranks), layout=layout(partition, ranks), partition=_degrees(partition), ranks=ranks, engine=run.engine,
        bytes=Bytes(**terms, **most, context=context), phases=track.phases, first_step=first, peak_allocated=track.peak,
        peak_phase=track.peak_phase, reserved_low=low, reserved_high=high, device_used=used,
        fits=left >= 0, left=left,
        sent_bytes_per_step=round(sum(traffic.sent(buffers.stored(unit) / buffers.c, buffers.padded(unit, True)) for unit in buffers.units)),
    )  # fmt: skip
    if duration:
        answer.compute_s, answer.communication_s = duration.compute_s, duration.communication_s
        answer.exposed_s, answer.step_s = duration.exposed_s, duration.step_s
        answer.tokens_per_s_per_gpu, answer.mfu = duration.tokens_per_s_per_gpu, duration.mfu
    return answer, track, duration


def _degrees(partition: Partition) -> tuple[int, int, int]:
    return partition.optimizer, partition.gradients, partition.weights


def state_bytes(architecture: Architecture, run: Run) -> int:
    """Weights, gradients and optimizer states of the whole model, as one rank alone would hold them."""
    buffers = Buffers(architecture, run, Partition(1, 1, 1), 1, Track())
    return sum(size for term, size in buffers.sizes().items() if term != "buffers")


def checkpoint_bytes(architecture: Architecture, run: Run) -> int:
    """What a checkpoint takes on the disk: weights, masters and moments, wherever they are kept while training."""
    sizes = Buffers(architecture, run.model_copy(update={"offload": "none"}), Partition(1, 1, 1), 1, Track()).sizes()
    return sum(sizes[term] for term in ("weights", "master", "exp_avg", "exp_avg_sq"))


def _state_only(architecture: Architecture, run: Run, partition: Partition, ranks: int) -> Track:
    """Where no activations are known: the state between backward and the end of the step."""
    track = Track()
    buffers = BUFFERS[run.engine](architecture, run, partition, ranks, track)
    track.mark("optimizer step", "step")
    for term, size in buffers.sizes().items():
        track.change(term, size)
    return track
