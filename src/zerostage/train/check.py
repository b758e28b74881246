"""The check of a run's first steps: what the audit measured, beside what was configured and what was planned."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from zerostage.auditing import Audit
from zerostage.ledger import TERMS, Ledger
from zerostage.mistakes import StrictError

#: Measured bytes may exceed the plan by this share and this many bytes (1 MB = 1e6): step counts, and tables
#: that a model makes on the way.
MARGIN_SHARE, MARGIN_BYTES = 0.01, 1_000_000


def buffers_of(model: nn.Module) -> int:
    """Bytes of the module buffers. The plan has those that are there before the first step, not what is added later."""
    return sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())


def record(step: int, audit: Audit, stage: int) -> dict[str, Any]:
    """What the metrics file has of the audit after optimizer step `step`; bytes per parameter are this rank's."""
    return {
        "event": "audit",
        "step": step,
        "stage": audit.stage,
        "configured_stage": stage,
        "bytes_per_parameter": dict(audit.bytes_per_parameter),
        "notes": list(audit.notes),
    }


def line(record: dict[str, Any], ranks: int) -> str:
    """`record` in one line for the log."""
    stage, configured = record["stage"], record["configured_stage"]
    if ranks == 1:
        found = "one rank, on which all stages are the same"
    elif stage == configured:
        found = f"stage {stage}, as configured"
    else:
        found = f"{'no stage' if stage is None else f'stage {stage}'}, but stage {configured} is configured"
    terms = record["bytes_per_parameter"]
    parts = ", ".join(f"{term} {size:.2f}" for term, size in terms.items())
    return f"audit after step {record['step']}: {found}; {sum(terms.values()):.2f} bytes per parameter and rank: {parts}"


def insist(step: int, audit: Audit, ledger: Ledger, buffers: int, stage: int, ranks: int) -> None:
    """Raise StrictError, with the same words on all ranks, where what runs after `step` is not what was configured.

    That is: the measured stage is not `stage` (on one rank all are the same), or any rank
    holds more bytes at rest than the plan, by more than 1% and 1 MB together. The plan is
    `ledger.expected` of weights, gradients, masters and moments, and the `buffers` of before
    training; measured is whatever the audit found with the model and its optimizer, gathered
    weights and communication buffers apart. Collective: every rank calls it.
    """
    if ranks > 1 and audit.stage != stage:
        measured = "no single stage" if audit.stage is None else f"stage {audit.stage}"
        why = f" ({reasons[0].rstrip('.')})" if (reasons := [note for note in audit.notes if "explains" in note]) else ""
        raise StrictError(f"--strict: after step {step} the bytes are those of {measured}{why}, but stage {stage} was configured")
    planned = {term: ledger.expected.get(term, 0) for term in TERMS} | {"other": buffers}
    measured = dict(audit.bytes)
    measured["other"] -= ledger.measured.get("gathered", 0) + ledger.measured.get("in_flight", 0)
    mine = sum(measured.values()), sum(planned.values()), max(measured, key=lambda term: measured[term] - planned[term])
    everyone: list[Any] = [mine]
    if ranks > 1:
        everyone = [None] * ranks
        dist.all_gather_object(everyone, mine)
    rank, (held, plan, term) = max(enumerate(everyone), key=lambda item: item[1][0] - item[1][1] * (1 + MARGIN_SHARE))
    if held > plan * (1 + MARGIN_SHARE) + MARGIN_BYTES:
        raise StrictError(
            f"--strict: after step {step} rank {rank} holds {held:,} bytes at rest where the plan is {plan:,} bytes, "
            f"more than 1% and 1 MB over it; most of the difference is in '{term}'"
        )
