"""What each engine sends in a step, in which pieces, and what it hides behind computation."""

from __future__ import annotations

from dataclasses import dataclass

from zerostage.partition import Partition
from zerostage.planning.run import ITEMSIZE, Run
from zerostage.planning.timing.hardware import Machine
from zerostage.planning.timing.network import collective_s


@dataclass(frozen=True)
class Habits:
    """One engine's way to communicate."""

    fp32_reduce: bool = False  # gradients of fp32 masters travel as fp32 where the run does not say
    reduce: str = "reduce_scatter"  # or 'exchange' (all-to-all, summed by the receiver)
    ahead: int | None = 1  # units gathered ahead; None: the run's prefetch
    hides_gathers: bool = True
    modules: int = 1  # messages into which a unit's gather falls
    gather_copies: int = 0  # bytes per parameter copied on the card around a gather
    reduce_copies: int = 4  # and around a reduction, for bf16 gradients
    host_s: float = 100e-6  # the engine's own work on the host for each visit of a unit
    reuse: float = float("inf")  # parameters between two uses above which gathered ones are freed in between


# zerostage: gathers in place, copies gradients once into the buffer that is sent, then reads what it received.
# fsdp2: copies out of the gathered buffer (read, write) and into the reduced one, widened (`_fsdp_collectives.py`).
# fsdp1: flat parameters are views of the gathered buffer.
# deepspeed: stage 3 gathers module by module (each linear layer by itself), from Python hooks before and after each
#   module, and waits for a gather where it is needed: the prefetch of 5e7 elements (its default) is less than one weight
#   of a large model. Parameters with more than 1e9 others before their next use are freed (`stage3_max_reuse_distance`),
#   so that a recomputed block of more than 5e8 is gathered a third time. The hooks take about 0.5 ms a module: a step of
#   512 tokens of a 7B on H100 (0.1 s of computation) takes 0.6 s (DeepSpeedExamples, training/bf16_master_weight).
# ddp: buckets of 25 MB are all-reduced behind backward. megatron: distributed optimizer, fp32 gradients.
HABITS: dict[str, Habits] = {
    "zerostage": Habits(reduce="exchange", ahead=None, reduce_copies=6),
    "fsdp2": Habits(fp32_reduce=True, gather_copies=4, reduce_copies=6, host_s=200e-6),
    "fsdp1": Habits(host_s=200e-6),
    "deepspeed": Habits(ahead=0, hides_gathers=False, modules=7, gather_copies=4, host_s=7 * 0.5e-3, reuse=1e9),
    "ddp": Habits(),
    "megatron": Habits(fp32_reduce=True),
}

DDP_BUCKET = 25 * 2**20


@dataclass(frozen=True)
class Message:
    """A collective of `ranks` ranks that are `stride` apart, on a buffer of `size` bytes in all, cut into `pieces`."""

    kind: str  # as `network.collective_s` has them
    size: float
    ranks: int
    stride: int = 1
    pieces: float = 1.0

    @property
    def sent(self) -> float:
        """Bytes that each rank sends."""
        return self.size * (self.ranks - 1) / self.ranks * (2 if self.kind == "all_reduce" else 1)

    def seconds(self, machine: Machine) -> float:
        pieces = max(1.0, self.pieces)
        return pieces * collective_s(machine, self.kind, self.size / pieces, self.ranks, self.stride)


@dataclass(frozen=True)
class Messages:
    """The collectives of one unit."""

    gather: list[Message]  # of its weights, before a forward or a backward
    reduce: list[Message]  # of its gradients
    publish: list[Message]  # of its updated weights, after the step


class Traffic:
    """The collectives of one run under one partition."""

    def __init__(self, run: Run, partition: Partition, ranks: int) -> None:
        self.run, self.partition, self.ranks = run, partition, ranks
        self.habits = HABITS[run.engine]
        self.item = ITEMSIZE[run.weights]
        wide = self.habits.fp32_reduce and run.master == "fp32" if run.fp32_reduce is None else run.fp32_reduce
        own = ITEMSIZE[run.gradients] if run.gradients else 4 if run.engine == "ddp" and run.master == "fp32" else self.item
        self.reduced_item = 4 if wide else own
        #: FSDP's look-alike of stage 2 keeps what forward gathered; the masters alone are at rest, so nothing is published.
        self.kept = run.engine in ("fsdp1", "fsdp2") and partition.weights == 1 and partition.gradients > 1
        self.gathers = partition.weights > 1 or self.kept

    @property
    def ahead(self) -> int:
        """Units gathered ahead of the one that computes."""
        return self.run.prefetch if self.habits.ahead is None else self.habits.ahead

    def messages(self, parameters: float, trainable: float) -> Messages:
        """Of a unit of `parameters` parameters, of which `trainable` have gradients.

        Reduction goes up the levels of the partition: within the group that shares weights, then gradients, then optimizer
        states, then between replicas; each level moves the slice that the one before left.
        """
        w, g, o, replicas = self.partition.levels(self.ranks)
        among = self.partition.gradients if self.kept else w
        gather = [Message("all_gather", parameters * self.item, among, 1, self.habits.modules)]
        exchange = self.habits.reduce == "exchange"
        # DeepSpeed's stage 1 and 2 all-reduce whole gradients (stage_1_and_2.py, allreduce_and_scatter)
        whole = self.run.engine == "deepspeed" and self.partition.weights == 1 and self.partition.optimizer > 1
        kind = "all_reduce" if whole else self.habits.reduce
        pieces = trainable * self.reduced_item / DDP_BUCKET if self.run.engine == "ddp" else 1.0
        reduce, item, stride = [], self.reduced_item, 1
        for ranks in (w, g, o):
            if ranks > 1:
                reduce.append(Message(kind, trainable * item / stride, ranks, stride, pieces))
                stride *= ranks
                item = max(4, item) if exchange else item  # what a level has summed travels on in fp32
        if exchange:  # each sums a part of what it received, then they hand the sums round
            reduce.append(Message("exchange", trainable * item / stride, replicas, stride))
            reduce.append(Message("all_gather", trainable * self.reduced_item / stride, replicas, stride))
        else:
            reduce.append(Message("all_reduce", trainable * item / stride, replicas, stride, pieces))
        own = trainable * self.item
        publish = [Message("all_gather", own / (w * g), o, w * g), Message("all_gather", own / w, g, w)]
        return Messages(gather if self.gathers else [], reduce, [] if self.kept else publish)

    def sent(self, parameters: float, trainable: float) -> float:
        """Bytes that a rank sends in a step for such a unit."""
        found, passes = self.messages(parameters, trainable), self.run.accumulation
        gathers = passes if self.kept else 2 * passes  # for forward and, where they have gone, for backward
        counts = ((gathers, found.gather), (1 if self.run.keep_local else passes, found.reduce), (1, found.publish))
        return sum(count * message.sent for count, messages in counts for message in messages)
