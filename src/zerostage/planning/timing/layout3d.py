"""Tensor x pipeline x data: which layouts fit, how long they take, and when they are the answer instead of ZeRO.

Communication after Narayanan et al. 2021 ("Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM"), memory after Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models").
Activations are approximate here: 34 bytes per token, hidden element and layer, flash attention, sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerostage.mistakes import InputError
from zerostage.partition import GRADIENTS, OPTIMIZER, WEIGHTS, Partition
from zerostage.planning.model.architecture import Architecture, Block, Weight, usual_depth
from zerostage.planning.run import Run
from zerostage.planning.timing.duration import Duration
from zerostage.planning.timing.hardware import Machine
from zerostage.planning.timing.network import collective_s
from zerostage.planning.timing.work import Seconds, Worker, flops_per_token

#: How many times the critical tokens a micro-batch must have for stage 3 over nodes to be recommended. Exactly the
#: critical number would do if every transfer were hidden. IDEFICS-80B had 1.2 times as many, 11 s of communication and
#: 18 s of computation by the formulas, and took 49 s: gathers were waited for, messages were small, and the network
#: was not as fast for 512 ranks as for a test. What was not hidden (31 s) was 2.75 times the formula's communication.
MARGIN = 2.0
ACTIVATION = 34  # bytes; Korthikanti et al., equation 2, without the scores that flash attention does not store


@dataclass(frozen=True)
class Layout3D:
    """Degrees, bytes and seconds of one layout; a step has as many tokens as `ranks` data-parallel ranks would."""

    tensor: int
    pipeline: int
    data: int
    micro_batch: int
    micro_batches: int  # of one pipeline in a step
    state_bytes: int  # of the fullest rank
    activation_bytes: int
    fits: bool
    step_s: float
    compute_s: float
    bubble_s: float
    tokens_per_s_per_gpu: float
    mfu: float

    @property
    def memory_bytes(self) -> int:
        return self.state_bytes + self.activation_bytes

    @property
    def name(self) -> str:
        return f"tensor {self.tensor} x pipeline {self.pipeline} x data {self.data}"


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def stand_in(architecture: Architecture) -> Architecture:
    """Equal layers for a model of which only the size is known: a width of 128 a layer, 12 h^2 parameters in each.

    That is the shape of a dense transformer (Kaplan et al. 2020 count 12 l h^2; most have h / l near 100 to 130).
    """
    layers = max(4, 4 * round(usual_depth(architecture.parameters) / 4))
    h = max(128, 128 * round((architecture.parameters / (12 * layers)) ** 0.5 / 128))
    f = 128 * round(8 * h / 3 / 128)
    names = [f"layers.{i}" for i in range(layers)]
    shapes = {"q": (h, h), "k": (h, h), "v": (h, h), "o": (h, h), "gate": (f, h), "up": (f, h), "down": (h, f)}
    weights = tuple(Weight((f"{name}.{part}",), shape) for name in names for part, shape in shapes.items())
    blocks = tuple(Block(name, h // 128, h // 128, 128, f) for name in names)
    return Architecture(architecture.name, "equal layers", h, 0, blocks, weights)


def tensor_degrees(architecture: Architecture, machine: Machine) -> list[int]:
    """Degrees within a node that divide heads and MLP width, and the key-value heads or are divided by them (replicas)."""
    return [
        t
        for t in _divisors(machine.gpus_per_node)
        if all(
            block.heads % t == 0 and block.ffn % t == 0 and (block.kv_heads % t == 0 or t % block.kv_heads == 0)
            for block in architecture.blocks
        )
    ]


def layouts(architecture: Architecture, run: Run, machine: Machine) -> list[Layout3D]:
    """Every layout of the machine's ranks with some tensor or pipeline parallelism, those that fit first, fastest first.

    Raises InputError for a model of which only the size is known: its layers cannot be divided.
    """
    if not architecture.blocks:
        raise InputError(f"{architecture.name}: a 3D layout needs the model's layers; give a model name or a config.json")
    machine.check(run.weights)
    found = []
    for t in tensor_degrees(architecture, machine):
        for p in _divisors(machine.ranks // t):
            if t * p > 1 and p <= len(architecture.blocks):
                found.append(best_micro_batch(architecture, run, machine, t, p))
    return sorted(found, key=lambda layout: (not layout.fits, layout.step_s))


def best_micro_batch(architecture: Architecture, run: Run, machine: Machine, tensor: int, pipeline: int) -> Layout3D:
    """The layout with the best size of a micro-batch that divides the tokens of the step, no larger than the run's."""
    data = machine.ranks // (tensor * pipeline)
    sequences = machine.ranks * run.micro_batch * run.accumulation // data  # of one pipeline in a step
    sizes = [b for b in _divisors(sequences) if b <= run.micro_batch]
    tried = [timed(architecture, run, machine, tensor, pipeline, b) for b in sizes]
    return min(tried, key=lambda layout: (not layout.fits, layout.step_s))


def timed(
    architecture: Architecture, run: Run, machine: Machine, tensor: int, pipeline: int, micro_batch: int | None = None
) -> Layout3D:
    """Memory and time of one layout. Tensor ranks are neighbours, then data, then pipeline (Megatron's order).

    A step of m micro-batches through p stages takes (m + p - 1) times the slowest stage's forward and backward (1F1B).
    With sequence parallelism each layer gathers and reduce-scatters b s h elements twice in forward, twice in backward,
    and again what is recomputed. Replicas reduce-scatter fp32 gradients and gather bf16 weights (distributed optimizer),
    hidden behind the last micro-batch's backward except for one layer's.
    """
    t, p, blocks = tensor, pipeline, architecture.blocks
    if machine.ranks % (t * p) or t not in tensor_degrees(architecture, machine) or p > len(blocks):
        raise InputError(
            f"tensor {t} x pipeline {p} does not divide {machine.ranks} ranks ({machine.gpus_per_node} a node), "
            f"{len(blocks)} layers, heads and MLP width; possible tensor degrees: {tensor_degrees(architecture, machine)}"
        )
    d = machine.ranks // (t * p)
    b = micro_batch or run.micro_batch
    m = max(1, machine.ranks * run.micro_batch * run.accumulation // (d * b))
    tokens, h = b * run.sequence, architecture.hidden
    worker = Worker(architecture, run, machine.card, tensor=t, tokens=tokens)
    repeated = [unit for unit in architecture.units if unit.name in architecture.block_names]
    layers = [worker.unit(unit) for unit in repeated]
    layer = Seconds(*(sum(getattr(own, what) for own in layers) / len(layers) for what in ("forward", "backward")))
    head = worker.head()
    per_stage = -(-len(blocks) // p)

    passes = 2 + (run.checkpointing == "full")  # forward, backward, and forward again
    one = collective_s(machine, "all_gather", 2 * tokens * h, t) + collective_s(machine, "reduce_scatter", 2 * tokens * h, t)
    tensor_layer = 2 * one * passes
    stage = per_stage * (layer.forward + layer.backward + tensor_layer)
    # the last stage has the head as well: it is the slowest unless it has fewer layers
    stage = max(stage, (len(blocks) - per_stage * (p - 1)) * stage / per_stage + head.forward + head.backward)
    between = 0.0
    if p > 1:
        size, rate = 2 * tokens * h / t, machine.card.link_bytes_per_s
        if machine.network and machine.ranks > machine.gpus_per_node:
            rate = machine.network.bytes_per_s * machine.network.reached / machine.gpus_per_node
        between = 2 * size / rate
    inside = sum(unit.numel for unit in repeated)
    outside, inner = architecture.parameters - inside, inside / len(blocks) * per_stage
    own = (inner + (outside if p == 1 or architecture.tied else outside / 2)) / t  # embedding first, head last
    data = collective_s(machine, "reduce_scatter", 4 * own, d, t) + collective_s(machine, "all_gather", 2 * own, d, t)
    hidden = min(data * (1 - 1 / per_stage), per_stage * layer.backward)
    update = worker.update(own / d)
    compute = m * (len(blocks) / p * (layer.forward + layer.backward) + (head.forward + head.backward) / p) + update
    step = (m + p - 1) * (stage + between) + data - hidden + update

    state = own * (WEIGHTS + GRADIENTS + OPTIMIZER / d)
    per_layer = ACTIVATION * tokens * h / t
    flying = min(m, p) * per_stage  # 1F1B: the first stage holds a micro-batch for each stage
    kept = {"full": 2 * tokens * h / t * flying + per_layer, "selective": per_layer * flying, "none": per_layer * flying}
    logits = 8 * tokens * architecture.vocab / t  # bf16 and fp32, and the gradient in the place of one
    activations = kept[run.checkpointing] if p > 1 else kept[run.checkpointing] + logits
    if p > 1:
        activations = max(activations, kept[run.checkpointing] / min(m, p) + logits)
    total = tokens * m * d / machine.ranks
    return Layout3D(
        t, p, d, b, m, round(state), round(activations),
        machine.card.left(round(state + activations)) >= 0,
        step, compute, (p - 1) * stage, total / step,
        flops_per_token(architecture, run.sequence) * total / step / machine.card.flops_peak,
    )  # fmt: skip


def reversal(
    architecture: Architecture,
    run: Run,
    machine: Machine,
    zero: Sequence[tuple[Partition, bool, Duration]],
    found: Sequence[Layout3D] | None = None,
) -> tuple[Layout3D | None, list[str]]:
    """Whether a 3D layout is the answer: that layout, or None where ZeRO is, with the reasons in words and numbers.

    zero: (partition, whether it fits, its time). found: the layouts, made here where None. Rules: nothing of ZeRO
    fits: a layout that does. Weights that need not be divided: ZeRO. Stage 3 whose gathers leave the node, with fewer than
    MARGIN times the critical tokens in a micro-batch: the faster of a layout and ZeRO with nothing hidden. Else ZeRO: it
    needs no change of the model.
    """
    fitting = [(partition, time) for partition, fits, time in zero if fits]
    critical = machine.critical_tokens
    flat = [time for partition, time in fitting if partition.weights > machine.gpus_per_node]
    if fitting and (critical is None or not flat or any(partition.weights == 1 for partition, _ in fitting)):
        return None, []
    if not architecture.blocks:
        architecture = stand_in(architecture)
    options = layouts(architecture, run, machine) if found is None else found
    best = next((layout for layout in options if layout.fits), None)
    if not fitting:
        if best is None:
            return None, [
                "no stage fits, and no tensor x pipeline x data layout of these ranks does either: more or larger cards"
            ]
        return best, [
            f"no stage fits on {machine.ranks} x {machine.card.name}; {best.name} does, with "
            f"{best.memory_bytes / 1e9:.0f} GB a rank "
            f"(activations by the approximation of 34 bytes per token, element and layer)"
        ]
    time = min(flat, key=lambda time: time.step_s)
    within = min((time for partition, time in fitting if partition.weights <= machine.gpus_per_node), key=lambda t: t.step_s, default=None)
    critical *= 0.75 if run.checkpointing == "full" else 1.0
    critical *= architecture.parameters / architecture.active_parameters  # all experts travel, a token computes with some
    network = machine.network.bytes_per_s / 1e9
    numbers = (
        f"a micro-batch has {run.tokens:,} tokens a GPU; stage 3 computes as long as it communicates at {critical:,.0f} tokens "
        f"({machine.card.flops / 1e12:.0f} TFLOP/s over {network:g} GB/s a node"
        f"{', three quarters of it with recomputation' if run.checkpointing == 'full' else ''})"
    )
    if run.tokens >= MARGIN * critical:
        reasons = [f"{numbers}: {run.tokens / critical:.1f} times as many, so the network carries three model sizes a step"]
        if best is not None:
            reasons.append(f"the best 3D layout, {best.name}, would take {best.step_s:.2f} s a step, stage 3 {time.step_s:.2f} s")
        if within is not None and within.step_s < time.step_s:
            reasons.append(f"with weights gathered within a node, which takes more memory, a step would take {within.step_s:.2f} s")
        return None, reasons
    reasons = [
        f"{numbers}: {run.tokens / critical:.1f} times as many, under the {MARGIN:g} that leave room for what is not hidden"
    ]
    slower = max(time.step_s, time.unhidden_s)
    reasons.append(
        f"stage 3 communicates {time.communication_s:.1f} s and computes {time.compute_s:.1f} s a step: {time.step_s:.1f} s as "
        f"{run.engine} overlaps them, {slower:.1f} s where nothing is hidden"
    )
    if within is not None:
        reasons.append(
            f"with weights gathered within a node a step would take {within.step_s:.1f} s, or {within.unhidden_s:.1f} s where nothing is hidden"
        )
        slower = min(slower, within.unhidden_s)
    if best is None:
        return None, [*reasons, "no 3D layout fits: raise the tokens of a micro-batch, or take a faster network"]
    if best.step_s >= slower:
        return None, [*reasons, f"the best 3D layout, {best.name}, takes longer still: {best.step_s:.1f} s"]
    reasons.append(f"{best.name} keeps the bulk of the traffic within nodes: {best.step_s:.1f} s a step ({best.mfu:.0%} MFU)")
    return best, reasons
