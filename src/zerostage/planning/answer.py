"""`zerostage.plan`: from what was asked to the whole answer."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from zerostage.mistakes import InputError, closest, number
from zerostage.partition import Partition
from zerostage.planning.inputs.sources import Given, read
from zerostage.planning.memory.engines import BUFFERS
from zerostage.planning.model import resolve as models
from zerostage.planning.model.architecture import Architecture
from zerostage.planning.recommend import Candidate, recommend
from zerostage.planning.rows import checkpoint_bytes, partitions, row, state_bytes
from zerostage.planning.run import ALSO, Run
from zerostage.planning.schema import Plan, Row
from zerostage.planning.timing import hardware
from zerostage.planning.timing.hardware import FILL, Machine

DEFAULT_RANKS = (8, 16, 32, 64)
#: Where the number of nodes is open: no plan looks further.
MOST_RANKS = 1024


def plan(
    model: Any = None,
    *,
    params: float | None = None,
    gpu: str | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    network: str | None = None,
    here: bool = False,
    calibration: str | os.PathLike | None = None,
    source: str | os.PathLike | None = None,
    stage: int | None = None,
    partition: Partition | None = None,
    ranks: int | list[int] | None = None,
    tokens: float | None = None,
    simulate: bool = False,
    **run: Any,
) -> Plan:
    """What every stage takes, what fits, which stage and how many GPUs to use, and how long a step takes.

    model: a built-in name, a Hugging Face config.json or folder, a hub id, 'module:function' that builds an nn.Module, or
    one; or only `params`, a number of parameters. The machines: `gpu` with `nodes`, `gpus_per_node` and `network` (one
    node's rate, '400GB/s' or '3.2Tb/s'), `here` (the cards in this machine), or `calibration` (a file that `zerostage
    calibrate` wrote). `source`: a DeepSpeed JSON, accelerate or FSDP YAML, or torchtitan TOML that is in use. `stage` or
    `partition` with `ranks` ask for one setting (`Plan.asked`). `tokens`: of the whole training, for its cost.
    simulate: run the real engine on the model under torch's fake tensors instead of the closed form. The rest are fields
    of `planning.run.Run`. Raises InputError, one line, for what cannot be used.
    """
    ranks, params, tokens = _checked(ranks, params, tokens, nodes, gpus_per_node)
    given = read(source, ranks if isinstance(ranks, int) else None) if source else Given("")
    assumed, left_out = list(given.assumed), [f"{key} in {source}" for key in given.ignored]
    fields = {**given.run, **_named(run)}
    settings = _run(fields)
    architecture = models.resolve(model if model is not None or params else given.model, params=params, lora_rank=settings.lora_rank)
    assumed += architecture.assumed
    options = {name: value for name, value in given.options(architecture.hidden).items() if name not in fields}
    left_out += [f"{name} in {source}" for name in options if name not in Run.model_fields]
    options = {name: value for name, value in options.items() if name in Run.model_fields}
    settings = _defaults(_run({**fields, **options}), fields, architecture, assumed)
    _capable(settings)
    if given.run.get("engine", settings.engine) != settings.engine:
        assumed.append(f"{settings.engine} in the place of {given.run['engine']}, which {source} is for")
    if gpu or here:  # a configuration tells how many cards there are, not which
        nodes = given.nodes if nodes is None else nodes
        gpus_per_node = given.ranks // given.nodes if gpus_per_node is None and given.ranks and given.nodes else gpus_per_node
    if here or calibration:
        nodes = nodes or 1
    machine = _machine(gpu, nodes, gpus_per_node, network, here, calibration, assumed)
    assumed += machine.assumed if machine else ()
    if stage is None and partition is None:
        stage, partition = given.stage, _divided(given)
    counts, ranks_given = _counts(machine, nodes, ranks or (given.ranks and given.ranks // settings.tensor))
    fixed = ranks_given or machine is None  # else the smallest number of ranks is looked for
    if simulate:
        if machine is None and not ranks and not given.ranks or machine and not ranks_given:
            raise InputError("a simulation is of one number of ranks: give --ranks N, or --gpu and --nodes")
        counts = counts[-1:]
    _wanted(stage, partition, counts[-1], settings.engine)  # a mistake is told before anything is computed
    simulated = (model if model is not None else given.model,) if simulate else None
    candidates, asked = _candidates(architecture, settings, machine, counts, fixed, stage, partition, simulated)
    recommendation = recommend(architecture, settings, machine, candidates, ranks_given, tokens) if machine and candidates else None
    assumed += candidates[-1].duration.assumed if candidates and candidates[-1].duration else ()
    shown = asked or next((c for c in candidates if recommendation and c.row == recommendation.row), None)
    return Plan(
        model=_model(architecture, settings),
        machine={**machine.describe(), "nodes": nodes} if machine else {},
        run=settings.model_dump(),
        method="simulation" if simulate else "closed form" if architecture.modelled else "training state only",
        rows=[c.row for c in candidates],
        asked=asked.row if asked else None,
        recommendation=recommendation,
        timeline=shown.track.moments if shown and shown.track else [],
        spans=shown.duration.spans if shown and shown.duration else [],
        assumed=list(dict.fromkeys(assumed)),
        left_out=[*left_out, *_left_out(architecture, machine, settings, simulate)],
    )


def _candidates(
    architecture: Architecture, run: Run, machine: Machine | None, counts: list[int], fixed: bool, stage: int | None,
    partition: Partition | None, simulated: tuple[Any] | None,
) -> tuple[list[Candidate], Candidate | None]:  # fmt: skip
    """Every stage and hybrid on every number of ranks, and the one that was asked for.

    fixed: what is asked for is on the last of `counts`. Else on the first on which it fits; and two numbers beyond the first
    on which something fits are enough. simulated: the model to simulate, if one is, in a tuple.
    """
    candidates: list[Candidate] = []
    asked: Candidate | None = None
    further = 0
    stages = BUFFERS[run.engine].stages
    for n in counts:
        fleet = machine.with_ranks(n) if machine else None
        found = [p for p in partitions(n, machine.gpus_per_node if machine else n) if n == 1 or p.stage(n) in stages]
        wanted = None
        if (not fixed or n == counts[-1]) and (partition is None or n % partition.optimizer == 0):
            wanted = _wanted(stage, partition, n, run.engine)
        for candidate in [*found, *([wanted] if wanted and wanted not in found else [])]:
            known = _simulated(*simulated, run, candidate, n) if simulated and wanted in (None, candidate) else None
            candidates.append(Candidate(candidate, *row(architecture, run, candidate, n, fleet, simulated=known)))
            if candidate == wanted and (asked is None or not asked.row.fits):
                asked = candidates[-1]
        further += asked.row.fits if asked else any(c.row.fits for c in candidates)
        if not fixed and further > 2:
            break
    return candidates, asked


def _checked(ranks: Any, params: Any, tokens: Any, *counts: Any) -> tuple[Any, Any, Any]:
    """Numbers of ranks, parameters and tokens; the last two may be given as text, '7B' for example."""
    many = list(ranks) if isinstance(ranks, (list, tuple)) else [] if ranks is None else [ranks]
    for value in (*many, *(count for count in counts if count is not None)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{value!r} is no number of ranks, nodes or GPUs: give whole numbers of 1 or more")
    params, tokens = (number(name, x) if isinstance(x, str) else x for name, x in (("params", params), ("tokens", tokens)))
    if tokens is not None and not 0 < tokens < math.inf:
        raise InputError(f"tokens is {tokens!r}: give a positive number such as 1e9")
    return ranks, params, tokens


def _capable(run: Run) -> None:
    """Refuse what the engine itself would refuse."""
    if run.engine == "zerostage":
        for what, has in (("optimizer offload", run.offload != "none"), ("Adafactor", run.optimizer == "adafactor"),
                          ("tensor parallelism", run.tensor > 1)):  # fmt: skip
            if has:
                other = "megatron or fsdp2" if run.tensor > 1 else "deepspeed or fsdp2"
                raise InputError(f"zerostage has no {what}: leave it out, or plan for another engine (--engine {other})")


def _wanted(stage: int | None, partition: Partition | None, ranks: int, engine: str) -> Partition | None:
    """The partition that was asked for, on `ranks` ranks."""
    if stage is None and partition is None:
        return None
    try:
        found = partition.check(ranks) if partition else Partition.from_stage(stage, ranks)
    except ValueError as error:
        raise InputError(str(error)) from None
    stages = BUFFERS[engine].stages
    if found.stage(ranks) not in stages and ranks > 1:
        known = " or ".join(str(one) for one in stages if one is not None)
        raise InputError(f"{engine} has no {'hybrids' if partition else f'stage {stage}'}: it is stage {known}")
    return found


def _divided(given: Given) -> Partition | None:
    """The hybrid that a configuration states: copies of a state that is divided over fewer than all ranks."""
    if given.shard and (given.replicate or 1) > 1:
        optimizer, gradients, weights = (given.shard if (given.stage or 3) >= first else 1 for first in (1, 2, 3))
        return Partition(optimizer, gradients, weights)
    if given.weights_shard and given.ranks:
        return Partition(given.ranks, given.ranks, given.weights_shard)
    return None


def _named(fields: dict[str, Any]) -> dict[str, Any]:
    """The settings that were given, by the names of `Run`."""
    found = {ALSO.get(name, name): value for name, value in fields.items() if value is not None}
    for name in found:
        if name not in Run.model_fields:
            raise InputError(f"there is no setting '{name}'{closest(name, Run.model_fields)}")
    return found


def _run(fields: dict[str, Any]) -> Run:
    try:
        return Run(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise InputError(f"{name} is {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


def _defaults(run: Run, given: dict[str, Any], architecture: Architecture, assumed: list[str]) -> Run:
    """The run with sequences no longer than the model takes, and a note of what memory depends on and nobody has said."""
    positions = architecture.positions
    if architecture.blocks and "sequence" not in given and positions and positions < run.sequence:
        run = run.model_copy(update={"sequence": positions})
    elif positions and run.sequence > positions:
        assumed.append(f"sequences of {run.sequence} tokens, where the model was made for {positions}")
    unsaid = {"sequence": f"sequences of {run.sequence} tokens", "micro_batch": f"a micro-batch of {run.micro_batch}",
              "checkpointing": f"{'no' if run.checkpointing == 'none' else run.checkpointing} activation checkpointing", "optimizer": "AdamW"}  # fmt: skip
    assumed += [text for key, text in unsaid.items() if key not in given and architecture.blocks]
    return run


def _machine(
    gpu: str | None, nodes: int | None, gpus_per_node: int | None, network: str | None, here: bool, calibration: Any,
    assumed: list[str],
) -> Machine | None:  # fmt: skip
    if calibration:
        return Machine.from_calibration(calibration, nodes, network)
    if here:
        from zerostage.planning.inputs.here import here as cards

        found = cards()
        built = hardware.machine(found["name"], nodes or 1, gpus_per_node or found["gpus_per_node"], network)
        card = replace(built.card, usable_bytes=found["memory_bytes"])
        if found["link_bytes_per_s"]:
            card = replace(card, link_bytes_per_s=found["link_bytes_per_s"])
        return replace(built, card=card)
    if gpu is None:
        if network or gpus_per_node or nodes:
            raise InputError("nodes, gpus_per_node and network describe a machine: give its card as well, for example --gpu h100")
        return None
    if gpus_per_node is None:
        gpus_per_node = 8
        assumed.append("8 GPUs a node")
    return hardware.machine(gpu, nodes or 1, gpus_per_node, network)


def _counts(machine: Machine | None, nodes: int | None, ranks: int | list[int] | None) -> tuple[list[int], bool]:
    """The numbers of ranks to look at, and whether the largest is what there is."""
    if ranks:
        counts = sorted(set(ranks)) if isinstance(ranks, (list, tuple)) else [ranks]
        if machine and nodes and counts[-1] > nodes * machine.gpus_per_node:
            raise InputError(f"{nodes} node(s) of {machine.gpus_per_node} GPUs have no {counts[-1]} ranks: give more nodes, or fewer ranks")
        return counts, len(counts) == 1
    if machine is None:
        return list(DEFAULT_RANKS), False
    each = machine.gpus_per_node
    most = each * nodes if nodes else MOST_RANKS
    counts = [n for i in range(15) if (n := 2**i) < each] + [each * 2**i for i in range(15) if each * 2**i <= most]
    return sorted({*counts, *([most] if nodes else [])}), nodes is not None


def _simulated(model: Any, run: Run, partition: Partition, ranks: int) -> Any:
    if model is None:
        raise InputError("a simulation needs a model, not just a number of parameters")
    from zerostage.planning.simulation import simulate

    return simulate.of(model, run, partition, ranks)


def _model(a: Architecture, run: Run) -> dict[str, Any]:
    first = a.blocks[0] if a.blocks else None
    return {
        "name": a.name, "family": a.family, "parameters": a.parameters, "active_parameters": a.active_parameters,
        "trainable_parameters": a.trainable_parameters, "layers": len(a.blocks), "hidden": a.hidden, "vocab": a.vocab,
        "heads": first.heads if first else 0, "kv_heads": first.kv_heads if first else 0, "head_dim": first.head_dim if first else 0,
        "ffn": first.ffn if first else 0, "experts": first.experts if first else 0, "state_bytes": state_bytes(a, run),
        "checkpoint_bytes": checkpoint_bytes(a, run), "tied": a.tied, "modelled": a.modelled,
    }  # fmt: skip


def _left_out(architecture: Architecture, machine: Machine | None, run: Run, simulated: bool) -> list[str]:
    found = ["the data loader, evaluation, checkpoints being written, and whatever else shares the card"]
    if not architecture.modelled and not simulated:
        found.append(
            "activations, logits, gathered weights and gradients in flight, also where it says that something fits: only the "
            "training state is counted" + ("; --simulate has them" if architecture.family != "parameters" else "")
        )
    if run.offload != "none":
        found.append("the memory of the host, which holds what is offloaded for all GPUs of a node (12 bytes per trained parameter / ranks each)")
    if machine is None:
        found.append("CUDA context and NCCL buffers (0.5 to 2 GiB a card), and time: no machine was given (--gpu)")
    else:
        found.append(f"{1 - FILL:.0%} of the card, for what torch's allocator cannot use")
    return found


def fits(answer: Plan) -> bool | None:
    """Whether the asked setting fits, or, where none was asked for, the recommended one; None without a machine."""
    if not answer.machine:
        return None
    found: Row | None = answer.asked
    return found.fits if found else bool(answer.recommendation and answer.recommendation.fits)
