"""Which ZeRO stage a model and its optimizer are really in, from the bytes that the ranks hold.

A term that n ranks hold R whole copies of together is divided by n / R. So the audit
needs no engine's word for what it divides: it adds up, over all ranks, the elements
of each parameter that live storages hold, and compares them with the parameter's size.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import nn

from zerostage import precision_audit
from zerostage.mistakes import some
from zerostage.partition import STAGES, Partition
from zerostage.precision_audit import PrecisionFindings
from zerostage.storages import POOLED, TERMS, Holdings, hold

#: Share of a term's elements that must be divided alike for the term to have one degree. The
#: rest, say a few norms that a wrap policy missed, is named in a note.
_ALIKE = 0.99
#: A rank that holds this much more than the mean of the ranks is named.
_UNEVEN = 1.05
_OPTIMIZER = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Audit:
    """What `audit` found. Bytes are those of this rank; everything else is the same on all ranks."""

    #: 0 to 3, or None where the measured degrees are no stage: a hybrid (see `degrees`) or a mixture (see `notes`).
    stage: int | None
    #: Over how many ranks each term is divided while a step runs, or None where a term has no single degree.
    degrees: Partition | None
    #: What the engine says that it is, such as "FSDP FULL_SHARD", "zerostage stage 3" or "plain torch".
    configured: str
    #: The stage that this setting stands for, or None where it stands for none.
    configured_stage: int | None
    ranks: int
    #: Elements of the whole model, shared parameters once; `trainable` and `frozen` add up to it.
    parameters: int
    trainable: int
    frozen: int
    #: Whether first or second moments exist on any rank.
    has_moments: bool
    #: Term -> bytes of live storages on this rank, each once, padding included. The terms are weights,
    #: gradients, master, exp_avg (or SGD's momentum), exp_avg_sq, and other (buffers, step counters,
    #: weights gathered for the moment).
    bytes: dict[str, int]
    #: The same, divided by `parameters`.
    bytes_per_parameter: dict[str, float]
    #: Term -> bytes per parameter and rank that `degrees` gives, for the terms that exist.
    formula: dict[str, float] = field(default_factory=dict)
    #: The largest group of parameters that is gathered as one, and its share of the model; None where nothing is gathered.
    largest_unit: tuple[str, float] | None = None
    #: Trainable parameters that have no gradient from any rank's backward. None where no gradients are held at
    #: this moment, and for other engines than zerostage's.
    without_gradient: list[str] | None = None
    #: Trainable parameters of which no update so far has changed a bit, on any rank, among up to a million elements
    #: of each part (zerostage's engine only).
    unmoved: list[str] = field(default_factory=list)
    #: What is kept in 16 bits or fewer, and how many updates rounding loses or would lose.
    precision: PrecisionFindings = field(default_factory=PrecisionFindings)
    #: What a reader should know besides, in plain sentences.
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """A dict that `json.dumps` takes. Bytes are integers."""
        return asdict(self)

    def __str__(self) -> str:
        stage = "no single stage" if self.stage is None else f"stage {self.stage}"
        ranks = f"{self.ranks} rank" + "s" * (self.ranks > 1)
        lines = [f"measured {stage} on {ranks}; configured {self.configured}"]
        if self.degrees is not None:
            d = self.degrees
            lines.append(f"divided by: optimizer {d.optimizer}, gradients {d.gradients}, weights {d.weights}")
        lines.append(f"parameters {self.parameters:,}: {self.trainable:,} trainable, {self.frozen:,} frozen")
        lines.append(f"{'this rank':<12}{'bytes/parameter':>16}{'formula':>10}{'bytes':>20}{'GB (1e9)':>10}")
        for term in TERMS:
            formula = f"{self.formula[term]:.3f}" if term in self.formula else "-"
            size = self.bytes[term]
            lines.append(f"{term:<12}{self.bytes_per_parameter[term]:>16.3f}{formula:>10}{size:>20,}{size / 1e9:>10.3f}")
        total = sum(self.bytes.values())
        formula = f"{sum(self.formula.values()):.3f}" if self.formula else "-"
        lines.append(f"{'total':<12}{sum(self.bytes_per_parameter.values()):>16.3f}{formula:>10}{total:>20,}{total / 1e9:>10.3f}")
        return "\n".join(lines + [f"- {note}" for note in self.notes])


def audit(model: nn.Module, optimizer: Any = None, *, group: dist.ProcessGroup | None = None) -> Audit:
    """Measure which stage `model` and `optimizer` are in, whatever engine made them.

    Understands zerostage, plain torch, DistributedDataParallel, ZeroRedundancyOptimizer,
    FSDP, FSDP2 (`fully_shard`) and DeepSpeed engines (give the engine as `model`). Where a
    process group is initialised this is a collective call: every rank of `group` (default:
    all) must make it, at the same point of its step. It changes nothing.

    Of zerostage's engine it also tells which trainable parameters have no gradient, and which
    have the same bits as before the first step: unused ones, and those whose updates are
    smaller than their dtype can hold.

    The best moment is between backward and `optimizer.step()`, from the second step on,
    when all terms exist. At other moments some things cannot be measured, and are handled so:

    - One rank: nothing can be divided, so it is stage 0, whatever is configured.
    - A term that no rank holds (gradients after `zero_grad`, moments before the first step,
      any optimizer state under plain SGD) says nothing. The stage is the one that fits the
      terms that exist; where several fit, the configured one if it is among them, else
      the lowest, and a note says that this was not measured.
    - Weights that are divided at rest but stay whole from forward until the end of backward
      (FSDP's SHARD_GRAD_OP, FSDP2's `reshard_after_forward=False`, a root unit) leave no
      trace at rest. Here the setting that the engine's objects carry counts: where most
      elements stay whole in this way, the weights' degree is 1, which makes it stage 2.
      `bytes` still shows what is held at this moment. Likewise DeepSpeed's stage 1, which
      divides only what is left of the gradients after backward.
    - Flat buffers that do not say whose values they hold (zerostage, DeepSpeed) are judged as
      a whole, with the alignment padding that the engine's layout has.

    Raises ValueError where the model has no parameters.
    """
    held = hold(model, optimizer)
    held.precision = precision_audit.look(model, optimizer)
    reports = _gather(held, group)
    n = len(reports)
    whole = {name: p for report in reports for name, p in report.parameters.items()}
    parameters = sum(p.numel for p in whole.values())
    if not parameters:
        raise ValueError("audit: the model has no parameters")
    trainable = sum(p.numel for p in whole.values() if p.trainable)
    first = reports[0]
    notes = list(held.notes)

    possible: dict[str, set[int]] = {}
    for term in TERMS[:-1]:
        possible[term], told = _possible(term, reports, whole, n)
        notes += told
    at_rest = {term: set(degrees) for term, degrees in possible.items()}
    notes += _within_step(possible, first, n, parameters)
    optimizer_degrees = set.intersection(*(possible[term] for term in _OPTIMIZER))
    sets = {"optimizer": optimizer_degrees, "gradients": possible["gradients"], "weights": possible["weights"]}
    stage, degrees, told = _stage(sets, first.configured_stage, n)
    notes += told

    has_moments = any(report.elements[term] for report in reports for term in ("exp_avg", "exp_avg_sq"))
    if optimizer is not None and not has_moments:
        notes.append("No moments exist yet (before the first step, or an optimizer without any), so their degree is not measured.")
    if trainable and not any(report.bytes["gradients"] for report in reports):
        notes.append("No gradients are held at this moment, so their degree is not measured.")
    share = max(((name, size / parameters) for name, (size, _) in held.units.items()), key=lambda unit: unit[1], default=None)
    if share is not None and n > 1:
        notes.append(_unit_note(*share))
    without_gradient, unmoved, told = _training(reports, [name for name, p in whole.items() if p.trainable and p.numel])
    notes += told
    precision = precision_audit.findings([report.precision for report in reports])
    notes += precision.notes()
    formula = _formula(held, whole, degrees, parameters)
    notes += _replicated(at_rest, first, n) + _disagreements(reports)
    if first.configured_stage is not None and stage != first.configured_stage:
        found = "no single stage" if stage is None else f"stage {stage}"
        why = ": there is one rank, so nothing is divided" if n == 1 else ""
        notes.insert(0, f"Configured is {first.configured} (stage {first.configured_stage}), measured is {found}{why}.")
    return Audit(
        stage=stage,
        degrees=degrees,
        configured=first.configured,
        configured_stage=first.configured_stage,
        ranks=n,
        parameters=parameters,
        trainable=trainable,
        frozen=parameters - trainable,
        has_moments=has_moments,
        bytes={term: held.bytes[term] for term in TERMS},
        bytes_per_parameter={term: held.bytes[term] / parameters for term in TERMS},
        formula=formula,
        largest_unit=share,
        without_gradient=without_gradient,
        unmoved=unmoved,
        precision=precision,
        notes=notes,
    )


def _gather(held: Holdings, group: dist.ProcessGroup | None) -> list[Holdings]:
    if not (dist.is_available() and dist.is_initialized()):
        return [held]
    reports: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, replace(held, _storages={}, _views=set()), group=group)
    return reports


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _possible(term: str, reports: list[Holdings], whole: dict, n: int) -> tuple[set[int], list[str]]:
    """The degrees that a term's elements on all ranks allow: all where there are none, none where it is a mixture."""
    totals: Counter[str] = sum((report.elements[term] for report in reports), Counter())
    pooled = totals.pop(POOLED, 0)
    possible, notes = set(_divisors(n)), []
    if pooled:
        # Named parameters beside a pool (weights that an engine left alone) are not in it.
        sizes = [p.whole for name, p in whole.items() if name not in totals and (p.trainable or term == "weights")]
        slack = reports[0].slack * len(sizes) * n
        possible = {d for d in possible if sum(sizes) * n // d <= pooled <= (sum(sizes) + slack) * n // d}
        if not possible:
            notes.append(f"{term}: {pooled:,} elements on {n} ranks together are no whole number of copies of {sum(sizes):,}.")
    by_degree: dict[int, list[str]] = {}
    for name, total in totals.items():
        if total:
            degree = n * whole[name].whole / total
            by_degree.setdefault(round(degree) if abs(degree - round(degree)) < 0.01 else 0, []).append(name)
    sizes = {degree: sum(whole[name].numel for name in names) for degree, names in by_degree.items()}
    if sizes:
        main = max(sizes, key=sizes.get)
        possible &= {main} if sizes[main] >= _ALIKE * sum(sizes.values()) else set()
        for degree, names in sorted(by_degree.items()):
            if len(by_degree) > 1 and (degree != main or not possible):
                share = sizes[degree] / sum(sizes.values())
                notes.append(f"{share:.1%} of the {_noun(term)} {_divided(degree, n)}: {some(names)}.")
    return possible, notes


def _noun(term: str) -> str:
    return {"master": "master weights"}.get(term, term)


def _divided(degree: int, n: int) -> str:
    if degree == 0:
        return "are divided unevenly"
    return f"are held whole by each of {n} ranks" if degree == 1 else f"are divided by {degree}"


def _within_step(possible: dict[str, set[int]], held: Holdings, n: int, parameters: int) -> list[str]:
    """Replace the degrees at rest by those within a step, where the engine's settings say that they differ."""
    notes = []
    kept: Counter[int] = Counter()
    for size, degree in held.units.values():
        if degree is not None:
            kept[degree] += size
    at_rest = max(possible["weights"], default=1)
    for degree, size in kept.items():
        if not degree < at_rest <= n:
            continue
        how = "whole" if degree == 1 else f"divided by only {degree}"
        notes.append(f"{size / parameters:.1%} of the weights are divided by {at_rest} at rest but {how} from forward until backward.")
        if size > parameters / 2:
            possible["weights"] = {degree}
    if held.gradients_whole_in_backward and n > 1:
        possible["gradients"] = {1}
        notes.append("The gradients are whole while backward runs; only what is left of them after it is divided.")
    return notes


def _stage(sets: dict[str, set[int]], configured: int | None, n: int) -> tuple[int | None, Partition | None, list[str]]:
    """The stage and partition that the possible degrees allow."""
    fits = [s for s in STAGES if all(getattr(Partition.from_stage(s, n), term) in degrees for term, degrees in sets.items())]
    if n == 1:
        fits = fits[:1]
    if fits:
        stage = configured if configured in fits else fits[0]
        told = []
        if len(fits) > 1:
            choice = "the configured one" if stage == configured else "the lowest"
            told = [f"The bytes at this moment fit the stages {', '.join(map(str, fits))}; {stage} is {choice} of them."]
        return stage, Partition.from_stage(stage, n), told
    triples = [(o, g, w) for o in sets["optimizer"] for g in sets["gradients"] for w in sets["weights"] if o % g == g % w == 0]
    if triples:
        # The least division that explains the bytes, as with the stages.
        return None, Partition(*min(triples)), []
    measured = ", ".join(f"{term} by {' or '.join(map(str, sorted(d))) or 'no single number'}" for term, d in sets.items())
    return None, None, [f"No partition explains the bytes: divided are {measured} of {n} ranks."]


def _formula(held: Holdings, whole: dict, degrees: Partition | None, parameters: int) -> dict[str, float]:
    if degrees is None:
        return {}
    divided = {"weights": degrees.weights, "gradients": degrees.gradients}
    result = {}
    for term in TERMS[:-1]:
        if held.bytes[term]:
            counted = [p for p in whole.values() if p.trainable or term == "weights"]
            size = sum(p.numel * (p.itemsize if term == "weights" else held.itemsize[term]) for p in counted)
            result[term] = size / divided.get(term, degrees.optimizer) / parameters
    return result


def _training(reports: list[Holdings], trainable: list[str]) -> tuple[list[str] | None, list[str], list[str]]:
    """The trainable parameters without a gradient, those that no update has changed, and notes on both."""
    notes: list[str] = []
    given = [report.with_gradient for report in reports if report.with_gradient is not None]
    without = [name for name in trainable if not any(name in names for names in given)] if given else None
    if without is not None:
        rest = f"; without one on any rank: {some(without)}." if without else "."
        notes.append(f"{len(trainable) - len(without)} of {len(trainable)} trainable parameters have a gradient{rest}")
    still = [name for name in trainable if {r.unmoved[name] for r in reports if name in r.unmoved} == {True}]
    if still:
        steps = f"{reports[0].updates} step" + "s" * (reports[0].updates > 1)
        notes.append(
            f"{len(still)} of {len(trainable)} trainable parameters have the same bits as before the first step, "
            f"after {steps}: {some(still)}. They have no gradient, a learning rate of 0, or updates too small for their dtype."
        )
    return without, still, notes


def _unit_note(name: str, share: float) -> str:
    note = f"The largest unit, {name}, is {share:.1%} of the model"
    return note + (": gathering it gathers (nearly) everything, so the peak is that of whole weights." if share > 0.9 else ".")


def _replicated(at_rest: dict[str, set[int]], held: Holdings, n: int) -> list[str]:
    """What every rank holds whole at this moment, and the stage that would divide it."""
    notes = []
    for stage, terms in enumerate((_OPTIMIZER, ("gradients",), ("weights",)), 1):
        whole = [term for term in terms if held.bytes[term] and at_rest[term] == {1}]
        if whole and n > 1:
            size = sum(held.bytes[term] for term in whole)
            notes.append(
                f"Each of {n} ranks holds all {' and '.join(map(_noun, whole))}, {size:,} bytes; stage {stage} would divide them."
            )
    return notes


def _disagreements(reports: list[Holdings]) -> list[str]:
    """What differs between ranks that should be alike: settings, parameters, and who holds more."""
    notes = []
    first = reports[0]
    for rank, report in enumerate(reports):
        if report.configured != first.configured:
            notes.append(f"Rank {rank} is {report.configured}, rank 0 is {first.configured}.")
        if report.parameters != first.parameters:
            notes.append(f"Rank {rank} has other parameters than rank 0.")
    totals = [sum(report.bytes.values()) for report in reports]
    mean = sum(totals) / len(totals)
    for rank, total in enumerate(totals):
        if total > _UNEVEN * mean:
            term = max(TERMS, key=lambda t: reports[rank].bytes[t] - sum(r.bytes[t] for r in reports) / len(reports))
            notes.append(f"Rank {rank} holds {total:,} bytes, {total / mean:.2f} times the mean of the ranks, mostly more {_noun(term)}.")
    return notes
