"""What one training step of any engine sends, in model sizes, beside the textbook of the ZeRO stages.

The textbook (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020, section 7): an all-reduce of the gradients is 2 model sizes, so is a reduce-scatter
of them and an all-gather of the weights, and stage 3 gathers the weights twice, which makes 3.
`Partition.traffic` has the same for every partition, exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerostage.sends import Sends, Sent, counting
from zerostage.storages import Holdings, hold
from zerostage.textbook import GATHERS, compare, dtype_name, textbook

_COUNTS = (torch.int16, torch.int32, torch.int64, torch.bool, torch.float64)


@dataclass(frozen=True)
class Row:
    """What this rank sent in one collective, among groups of one size, in one dtype."""

    collective: str
    ranks: int
    dtype: str
    calls: int
    bytes: int
    model_sizes: float


@dataclass(frozen=True)
class TrafficAudit:
    """What `audit_traffic` found. Rows and bytes are those of this rank.

    A model size is what a rank sends where the whole weights, in `dtype`, pass one all-gather or
    reduce-scatter over all n ranks: (n-1)/n of their bytes.
    """

    ranks: int
    #: What the engine says that it is, as in `zerostage.audit`, and the stage that this stands for (None: none).
    configured: str
    configured_stage: int | None
    #: Elements of the whole model, shared parameters once.
    parameters: int
    #: dtype in which a model size counts, and why this one.
    dtype: str
    dtype_of: str
    #: Bytes of the whole weights in `dtype`.
    model_bytes: int
    rows: list[Row]
    #: Collective -> bytes, and -> model sizes.
    bytes: dict[str, int]
    model_sizes: dict[str, float]
    #: Bytes and calls that carry no weights or gradients: norms, flags, sizes, pickled objects.
    agreement_bytes: int
    agreement_calls: int
    #: Stage -> model sizes that a step of one micro-batch sends, in `dtype`; fewer where weights are frozen.
    textbook: dict[int, float]
    #: The stages whose traffic this is, apart from what `differs` names; several send alike. Empty: none's.
    stages: tuple[int, ...]
    #: In what it differs from those stages' textbook, in plain sentences.
    differs: list[str]
    #: What a reader should know besides: that ranks differ, or that something was not counted.
    notes: list[str]

    @property
    def total(self) -> float:
        """Model sizes in all."""
        return sum(self.model_sizes.values())

    def to_json(self) -> dict[str, Any]:
        """A dict that `json.dumps` takes. Bytes are integers."""
        return {**asdict(self), "total": self.total}

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank" + "s" * (self.ranks > 1)
        stages = ", ".join(map(str, self.stages))
        found = f"the pattern of stage{'s' * (len(self.stages) > 1)} {stages}" if self.stages else "no stage's pattern"
        book = ", ".join(f"stage {stage} {sizes:.2f}" for stage, sizes in self.textbook.items())
        lines = [
            f"a step sends {self.total:.2f} model sizes per rank on {ranks}, {found}; configured {self.configured}",
            f"textbook: {book}",
            f"a model size: {self.parameters:,} parameters in {self.dtype} ({self.dtype_of}), {self.model_bytes:,} bytes, "
            f"of which a rank sends {self.ranks - 1}/{self.ranks}",
            f"{'this rank':<16}{'group':>6}{'dtype':>16}{'calls':>8}{'bytes sent':>20}{'model sizes':>12}",
        ]
        for row in self.rows:
            sizes = f"{row.model_sizes:.3f}"
            lines.append(f"{row.collective:<16}{row.ranks:>6}{row.dtype:>16}{row.calls:>8,}{row.bytes:>20,}{sizes:>12}")
        calls, sent = sum(row.calls for row in self.rows), sum(self.bytes.values())
        lines.append(f"{'total':<38}{calls:>8,}{sent:>20,}{self.total:>12.3f}")
        lines.append(f"{'agreement':<38}{self.agreement_calls:>8,}{self.agreement_bytes:>20,}{'apart':>12}")
        return "\n".join(lines + [f"- {line}" for line in self.differs + self.notes])


def audit_traffic(model: nn.Module, step: Callable[[], Any], *, group: dist.ProcessGroup | None = None) -> TrafficAudit:
    """Run `step()`, one whole training step of `model`, and say what it sends beside what the ZeRO stages send.

    Understands what `zerostage.audit` does: give a DeepSpeed engine, or the DistributedDataParallel
    or FSDP module, as `model`. Every rank of `group` (default: all) must call it. Take a later step than
    the first, in which some engines set themselves up. All calls of torch.distributed on this rank count,
    also those that do not concern `model`. Bytes go by the usual formulas for n ranks: (n-1)/n S for
    all-gather and reduce-scatter of S bytes, twice that for all-reduce, (n-1)/n S for a broadcast too (the n-1
    copies, shared among the ranks), and what is really handed over for point-to-point and all-to-all.

    A model size is in the dtype of the step's matrix products, so that an fp32 engine under autocast to bf16 is
    measured against bf16; where none were seen (a compiled step), in that of the gathered weights or of the parameters.

    Raises ValueError where the model has no parameters, and whatever `step` raises.
    """
    with counting() as sends:
        step()
    held = hold(model)
    calls, small = _sort(sends.calls, model, held)
    mine = Counter()
    for call in calls:
        mine[call.collective] += call.bytes
    reports = _gather((dict(mine), held.parameters), group)
    n = len(reports)
    whole = {name: p for _, parameters in reports for name, p in parameters.items()}
    parameters = sum(p.numel for p in whole.values())
    if not parameters:
        raise ValueError("audit_traffic: the model has no parameters")
    dtype, dtype_of = _dtype(sends, calls, whole)
    size = parameters * dtype.itemsize * (n - 1) / n
    stages, differs = compare(calls, held, whole, n, dtype)
    if size and not calls:
        differs = ["Nothing was sent but agreement: is this a whole training step, and is the model wrapped by its engine?"]
    notes = _notes([sent for sent, _ in reports], sends)
    book = textbook(n, whole)
    if held.configured_stage and n > 1 and stages and held.configured_stage not in stages:
        notes.append(f"Configured is {held.configured}, of which the textbook sends {book[held.configured_stage]:.2f}.")
    return TrafficAudit(
        ranks=n,
        configured=held.configured,
        configured_stage=held.configured_stage,
        parameters=parameters,
        dtype=dtype_name(dtype),
        dtype_of=dtype_of,
        model_bytes=parameters * dtype.itemsize,
        rows=_rows(calls, size),
        bytes=dict(mine),
        model_sizes={kind: sent / size if size else 0.0 for kind, sent in mine.items()},
        agreement_bytes=sum(call.bytes for call in small),
        agreement_calls=len(small),
        textbook=book,
        stages=stages,
        differs=differs,
        notes=notes,
    )


def _gather(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    reports: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, mine, group=group)
    return reports


def _sort(calls: list[Sent], model: nn.Module, held: Holdings) -> tuple[list[Sent], list[Sent]]:
    """The calls that carry weights or gradients, under the names of what they do, and those that do not."""
    from zerostage.engine import engine_of

    few, tensors = sum(p.numel for p in held.parameters.values()) // 1000, len(held.parameters)
    engine = engine_of(model)
    own = _own(engine) if engine is not None and engine.ranks > 1 else {}
    large, small = [], []
    for call in calls:
        if call.group in own:
            kind = own[call.group](call)
            if kind is not None:  # messages travel as bytes
                dtypes = Counter(flat.dtype if kind == "all-gather" else flat.grad_dtype for flat in engine.flats)
                call = replace(call, collective=kind, dtype=dtypes.most_common(1)[0][0])
            (small if kind is None else large).append(call)
        else:
            # Pickled objects are uint8, but so are weights that an engine sends as bytes, in larger calls.
            # FSDP2 sums a norm for each parameter.
            norms = tensors if call.collective == "all-reduce" else 0
            most = few if not call.dtype.is_floating_point else min(few, max(8, norms))
            (small if call.dtype in _COUNTS or call.elements <= max(1, most) else large).append(call)
    return large, small


def _own(engine: Any) -> dict[str, Callable[[Sent], str | None]]:
    """The engine's own process groups by name, and what a call in them does: None is agreement."""
    world = engine.world
    kinds: dict[str, Callable[[Sent], str | None]] = dict.fromkeys(
        [made.group_name for made in (world._votes, world._norms, world._objects)], lambda call: None
    )
    # See `Team.gather` and `Team.exchange`: even tags gather.
    kinds[world._data.group_name] = lambda call: (
        call.collective if call.tag is None else "reduce-scatter" if call.tag % 2 else "all-gather"
    )
    for team in world.teams:
        if team.group is not None:
            kinds[team.group.group_name] = lambda call: "reduce-scatter" if call.collective == "all-to-all" else call.collective
    return kinds


def _dtype(sends: Sends, calls: list[Sent], whole: dict) -> tuple[torch.dtype, str]:
    if sends.products:
        return sends.products.most_common(1)[0][0], "that of the step's matrix products"
    gathered: Counter[torch.dtype] = Counter()
    for call in calls:
        gathered[call.dtype] += call.bytes * (call.collective in GATHERS)
    if any(gathered.values()):
        return gathered.most_common(1)[0][0], "that of the gathered weights"
    widths = Counter({itemsize: 0 for itemsize in (1, 2, 4, 8)})
    for p in whole.values():
        widths[p.itemsize] += p.numel
    width = widths.most_common(1)[0][0]
    return {1: torch.uint8, 2: torch.bfloat16, 8: torch.float64}.get(width, torch.float32), "that of the parameters"


def _rows(calls: list[Sent], size: float) -> list[Row]:
    count, sent = Counter(), Counter()
    for call in calls:
        key = call.collective, call.ranks, dtype_name(call.dtype)
        count[key] += 1
        sent[key] += call.bytes
    most_first = sorted(sent, key=sent.get, reverse=True)
    return [Row(*key, count[key], sent[key], sent[key] / size if size else 0.0) for key in most_first]


def _notes(sent: list[dict[str, int]], sends: Sends) -> list[str]:
    notes = []
    for kind in dict.fromkeys(kind for report in sent for kind in report):
        found = [report.get(kind, 0) for report in sent]
        low, high = min(found), max(found)
        if high > 1.01 * low:
            most, least = found.index(high), found.index(low)
            notes.append(f"The ranks differ: {kind} sends {high:,} bytes on rank {most} and {low:,} on rank {least}.")
    if sends.unknown:
        notes.append(f"Not counted, because what they send is not known: {', '.join(sorted(sends.unknown))}.")
    return notes
