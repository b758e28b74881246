"""How long a step takes: computation and communication laid on two streams as the engine issues them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from zerostage.mistakes import InputError
from zerostage.partition import Partition
from zerostage.planning.model.architecture import Architecture, Unit, Weight, usual_depth
from zerostage.planning.run import ITEMSIZE, Run
from zerostage.planning.schema import Span
from zerostage.planning.timing.habits import Traffic
from zerostage.planning.timing.hardware import Machine
from zerostage.planning.timing.work import Seconds, Worker, flops_per_token

#: Of a card's compute, what NCCL's kernels take while they run: 15% within a node (up to 24 of 108 processors, and memory
#: bandwidth), 2% across nodes, where few channels suffice (Calculon's description of an A100, `processor_usage`).
TAKEN_WITHIN, TAKEN_ACROSS = 0.15, 0.02
#: Offloaded updates: PCIe 4 x16 as it is reached, and the memory of a host that CPU Adam streams through (28 bytes a
#: parameter; ZeRO-Offload, Ren et al. 2021, section 5).
PCIE, HOST_MEMORY = 20e9, 100e9


@dataclass(frozen=True)
class Duration:
    """Seconds of one step of one rank; rates are per rank (GPU)."""

    step_s: float
    compute_s: float  # forward, backward and update with nothing to wait for
    update_s: float
    communication_s: float  # all collectives, one after the other
    exposed_s: float  # step_s - compute_s
    tokens_per_s_per_gpu: float
    mfu: float
    spans: tuple[Span, ...]  # of the last micro-batch and the update
    assumed: tuple[str, ...] = field(default=())

    @property
    def unhidden_s(self) -> float:
        """The step if nothing were hidden."""
        return self.compute_s + self.communication_s


@dataclass(frozen=True)
class _Task:
    name: str
    compute: Seconds
    gather: float  # seconds of its collectives, as in `habits.Messages`
    reduce: float
    publish: float
    resident: bool
    parameters: int
    trainable: int


class _Streams:
    """Two streams and what waits for what."""

    def __init__(self, start: float) -> None:
        self.compute = self.link = start
        self.spans: list[Span] = []
        self.busy = 0.0  # of the link

    def send(self, name: str, seconds: float, earliest: float) -> float:
        """Issue a transfer; returns its end."""
        if seconds <= 0:
            return earliest
        begin = max(self.link, earliest)
        self.link = begin + seconds
        self.busy += seconds
        self.spans.append(Span(stream="communication", name=name, start_s=begin, end_s=self.link))
        return self.link

    def work(self, name: str, seconds: float, earliest: float = 0.0) -> float:
        begin = max(self.compute, earliest)
        self.compute = begin + seconds
        if seconds > 0:
            self.spans.append(Span(stream="compute", name=name, start_s=begin, end_s=self.compute))
        return self.compute


def step(architecture: Architecture, run: Run, machine: Machine, partition: Partition, ranks: int) -> Duration:
    """The time of one optimizer step of `ranks` ranks under `partition`.

    Raises InputError for tensor or pipeline parallelism (see `layout3d`), for ranks that the partition does not divide, and
    for a dtype that the card lacks.
    """
    if run.tensor > 1:
        raise InputError("the time of tensor parallelism is estimated for 3D layouts only")
    machine.check(run.weights)
    try:
        partition.check(ranks)
    except ValueError as error:
        raise InputError(str(error)) from None
    if ranks > machine.gpus_per_node and machine.network is None:
        raise InputError(
            f"{ranks} ranks need {math.ceil(ranks / machine.gpus_per_node)} nodes; the machine has one: give nodes and network"
        )
    assumed = list(machine.assumed)
    units = architecture.blocks_and_root if run.engine in ("fsdp1", "fsdp2") else architecture.units
    if not architecture.blocks:
        units = _pieces(architecture)
        assumed.append(f"{architecture.name}: only its size is known; taken as {len(units)} equal layers, with products only")
    worker = Worker(architecture, run, machine.card)
    traffic = Traffic(run, partition, ranks)
    tasks = _tasks(worker, traffic, machine, units)
    head = worker.head()

    passes = run.accumulation
    local = run.keep_local
    first = _Streams(0.0)
    if passes > 1:
        _micro_batch(first, tasks, head, traffic, reduce=not local)
    offset = (passes - 1) * max(first.compute, first.link)
    last = _Streams(offset)
    _micro_batch(last, tasks, head, traffic, reduce=True)
    last.compute = last.link = max(last.compute, last.link)
    update = _update(last, tasks, worker, run, machine, partition)
    total = max(last.compute, last.link)

    forward = sum(task.compute.forward for task in tasks) + head.forward
    backward = sum(task.compute.backward for task in tasks) + head.backward
    compute = passes * (forward + backward) + update
    model = flops_per_token(architecture, run.sequence) * run.tokens * passes
    return Duration(
        step_s=total, compute_s=compute, update_s=update,
        communication_s=(passes - 1) * first.busy + last.busy, exposed_s=max(0.0, total - compute),
        tokens_per_s_per_gpu=run.tokens * passes / total, mfu=model / total / machine.card.flops_peak,
        spans=tuple(last.spans), assumed=tuple(assumed),
    )  # fmt: skip


def _pieces(architecture: Architecture) -> tuple[Unit, ...]:
    """Equal layers for a model of which only the size is known: as many as a width of 128 per layer means (12 l h^2 = N)."""
    layers = max(1, round(usual_depth(architecture.parameters)))
    side = max(1, round(math.sqrt(architecture.parameters / layers)))
    return tuple(Unit(f"layers.{i}", (Weight((f"layers.{i}.weight",), (side, side)),)) for i in range(layers))


def _tasks(
    worker: Worker, traffic: Traffic, machine: Machine, units: Sequence[Unit]
) -> list[_Task]:
    """In forward order, resident units first, with what collectives cost computation added to it."""
    habits, known, tasks = traffic.habits, {}, []
    for unit in sorted(units, key=lambda unit: not unit.resident):
        trainable = sum(w.numel for w in unit.weights if w.trainable)
        stored = sum(w.numel * (w.bits / 8 / worker.item if w.bits else 1) for w in unit.weights)
        key = (stored, trainable)
        if key not in known:
            own = traffic.messages(*key)
            known[key] = [sum(m.seconds(machine) for m in part) for part in (own.gather, own.reduce, own.publish)]
        (gather, reduce, publish), own = known[key], worker.unit(unit)
        alone = traffic.ranks == 1
        copies = worker.moved_s(habits.gather_copies * unit.numel) if traffic.gathers and not alone else 0.0
        reduced = worker.moved_s(habits.reduce_copies * trainable * worker.item / 2) if not alone else 0.0
        forward, backward = own.forward + copies, own.backward + reduced + copies * (not traffic.kept)
        if not alone:  # the host does not run ahead of a card that waits for it
            visits = 1 if worker.run.checkpointing == "none" else 2  # a recomputed block is visited once more
            forward, backward = max(forward, habits.host_s), max(backward, visits * habits.host_s)
        taken = TAKEN_ACROSS if traffic.ranks > machine.gpus_per_node else TAKEN_WITHIN
        if habits.hides_gathers:
            forward += taken * min(forward, gather)
            backward += taken * min(backward, (0 if traffic.kept else gather) + reduce)
        tasks.append(_Task(unit.name, Seconds(forward, backward), gather, reduce, publish, unit.resident, unit.numel, trainable))
    return tasks


def _micro_batch(streams: _Streams, tasks: list[_Task], head: Seconds, traffic: Traffic, reduce: bool) -> None:
    """One forward and backward, transfers issued as `schedule.py` issues them.

    Forward: with unit i's start, unit i + prefetch is asked for, and a place for it is free when unit i - 1 is done.
    Backward: unit i - 1 is asked for while i computes, and i's gradients leave when it is done; a unit needs a gradient
    buffer, so it waits for the reduction of the one before the last.
    """
    habits = traffic.habits
    ahead = traffic.ahead if habits.hides_gathers else 0
    start = streams.compute
    ended: list[float] = []
    arrived: dict[int, float] = {}

    def gather(order: list[int], place: int, phase: str) -> None:
        """Ask for the units up to `ahead` places further, as places get free."""
        for at in range(place, min(len(order), place + ahead + 1)):
            index = order[at]
            if index in arrived:
                continue
            free = ended[at - 1 - ahead] if at - 1 - ahead >= 0 else start
            arrived[index] = streams.send(f"gather {tasks[index].name} ({phase})", tasks[index].gather, free)

    forward = list(range(len(tasks)))
    for place, index in enumerate(forward):
        gather(forward, place, "forward")
        ended.append(streams.work(f"forward {tasks[index].name}", tasks[index].compute.forward, arrived[index]))
    streams.work("loss", head.forward + head.backward)

    start, ended = streams.compute, []
    again = traffic.gathers and not traffic.kept
    arrived = {i: start for i, task in enumerate(tasks) if task.resident or not again}
    backward = [i for i in reversed(forward) if not tasks[i].resident] + [i for i in forward if tasks[i].resident]
    reduced: list[float] = []
    for place, index in enumerate(backward):
        task = tasks[index]
        gather(backward, place, "backward")
        if again and not task.resident and traffic.run.checkpointing == "full" and 2 * task.parameters > habits.reuse:
            arrived[index] = streams.send(f"gather {task.name} (again)", task.gather, arrived[index])
        buffer = reduced[-2] if len(reduced) >= 2 else start
        ended.append(streams.work(f"backward {task.name}", task.compute.backward, max(arrived[index], buffer)))
        if reduce and task.trainable:
            reduced.append(streams.send(f"reduce {task.name}", task.reduce, ended[-1]))


def _update(streams: _Streams, tasks: list[_Task], worker: Worker, run: Run, machine: Machine, partition: Partition) -> float:
    """The optimizer's step, unit by unit, each unit's weights published behind the update of the next. Returns its compute."""
    offloaded = run.offload != "none"
    total = 0.0
    for task in tasks:
        own = task.trainable / partition.optimizer
        if offloaded:  # gradients down, Adam in the host's memory shared by the node's cards, weights up
            seconds = own * (2 * ITEMSIZE[run.weights] / PCIE + 28 / (HOST_MEMORY / machine.gpus_per_node))
        else:
            seconds = worker.update(own)
        total += seconds
        done = streams.work(f"update {task.name}", seconds)
        streams.send(f"publish {task.name}", task.publish, done)
    return total
