"""One step, walked through: the tapes of the model's parts in order, with the engine's buffers around them.

This is the closed form. It takes milliseconds and needs no torch. `simulate.py` runs the real engine instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerostage.mistakes import InputError
from zerostage.partition import Partition
from zerostage.planning.memory.buffers import Buffers
from zerostage.planning.memory.engines import BUFFERS
from zerostage.planning.memory.layers import Layers
from zerostage.planning.memory.tape import Tape
from zerostage.planning.memory.track import Track
from zerostage.planning.model.architecture import Architecture, Unit
from zerostage.planning.run import Run


@dataclass
class Part:
    """A part of a forward: its tape, and the units whose weights it uses."""

    name: str
    tape: Tape
    units: list[Unit]
    block: bool = False


def parts(architecture: Architecture, run: Run, buffers: Buffers) -> list[Part]:
    """The parts of a forward in the order in which they run: embedding, blocks, head with the loss."""
    layers = Layers(architecture, run)
    blocks, before, after = {}, [], []
    tables = [w for w in architecture.weights if len(w.shape) == 2 and w.shape[0] == architecture.vocab]
    first_block = next((i for i, w in enumerate(architecture.weights) if architecture.block_of(w.name)), 0)
    for index, weight in enumerate(architecture.weights):
        unit = buffers.of[weight.name]
        place = architecture.block_of(weight.name)
        group = blocks.setdefault(place, []) if place else before if index < first_block else after
        if unit not in group:
            group.append(unit)
    head = buffers.of[tables[-1].name] if tables else None
    if head is not None and head not in after:
        after.append(head)
    trained = [w for w in tables if w.trainable]
    found = [Part("embedding", layers.embedding(bool(trained)), before)]
    found += [Part(block.name, layers.block(block), blocks.get(block.name, []), True) for block in architecture.blocks]
    return [*found, Part("head and loss", layers.head(bool(trained) and not run.lora_rank), after)]


def walk(architecture: Architecture, run: Run, partition: Partition, ranks: int) -> Track:
    """The memory of one step of one rank, any but the first.

    Raises InputError where the architecture's activations are not modelled.
    """
    if not architecture.modelled:
        raise InputError(
            f"the activations of '{architecture.name}' ({architecture.family}) are not modelled in closed form: give --simulate"
        )
    # the first micro-batch, the last, and one like all others between them: more would change no figure
    run = run.model_copy(update={"accumulation": min(run.accumulation, 3)})
    track = Track()
    buffers = BUFFERS[run.engine](architecture, run, partition, ranks, track)
    buffers.start()
    sequence = parts(architecture, run, buffers)
    for micro in range(run.accumulation):
        buffers.reduces = not run.keep_local or micro == run.accumulation - 1
        _forward(sequence, run, buffers, track)
        _backward(sequence, run, buffers, track)
    track.mark("optimizer step", "step")
    buffers.step()
    buffers.zero_grad()
    return track


def _owner(part: Part, elements: int) -> Unit:
    """The unit that has the weight whose gradient of `elements` has come; a block has just one."""
    if len(part.units) > 1:
        for unit in part.units:
            if any(weight.numel == elements for weight in unit.weights):
                return unit
    return max(part.units, key=lambda unit: unit.numel)


def _following(sequence: list[Part], position: int, step: int) -> list[Unit]:
    rest = sequence[position + 1 :] if step > 0 else sequence[:position][::-1]
    return [unit for part in rest for unit in part.units]


def _forward(sequence: list[Part], run: Run, buffers: Buffers, track: Track) -> None:
    save = {"none": "all", "selective": "policy", "full": "nothing"}[run.checkpointing]
    last_use = {unit.name: i for i, part in enumerate(sequence) for unit in part.units}
    for i, part in enumerate(sequence):
        track.mark(f"forward {part.name}" if i < len(sequence) - 1 else "loss", "forward" if i < len(sequence) - 1 else "loss")
        following = _following(sequence, i, 1)
        for unit in part.units:
            buffers.need(unit, following)
        kept = save if part.block else "all"
        for event in part.tape.events("forward", kept, kept != "all"):
            track.change(event.term, event.size)
        for unit in part.units:
            buffers.leave(unit, last_use[unit.name] == i)
    buffers.end_forward()
    if run.keep_logits:
        track.change("logits", _kept_logits(run, buffers))


def _kept_logits(run: Run, buffers: Buffers) -> int:
    return 4 * run.tokens * buffers.architecture.vocab // run.tensor


def _backward(sequence: list[Part], run: Run, buffers: Buffers, track: Track) -> None:
    for i in range(len(sequence) - 1, -1, -1):
        part = sequence[i]
        track.mark(f"backward {part.name}", "loss" if i == len(sequence) - 1 else "backward")
        following = _following(sequence, i, -1)
        for unit in part.units:
            buffers.need(unit, following)
        if part.block and run.checkpointing != "none":
            for event in part.tape.events("recompute", "policy" if run.checkpointing == "selective" else "nothing"):
                track.change(event.term, event.size)
        for event in part.tape.events("backward", i < len(sequence) - 1, not (part.block and run.checkpointing != "none")):
            if event.term == "gradient":
                buffers.arrive(_owner(part, event.size), event.size)
            else:
                track.change(event.term, event.size)
        if part.block and run.checkpointing != "none":
            track.change(part.tape.start.term, -part.tape.start.size)
        if i == len(sequence) - 1:
            track.change(part.tape.end.term, -part.tape.end.size)  # the loss itself
        last = {unit.name for earlier in sequence[:i] for unit in earlier.units}
        for unit in part.units:
            if unit.name not in last:
                buffers.reduce(unit, following)
    buffers.end_backward()
    if run.keep_logits:
        track.change("logits", -_kept_logits(run, buffers))
