"""Bytes and traffic per rank of each stage on each number of ranks, from `Partition`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from zerostage.partition import GRADIENTS, OPTIMIZER, STAGES, WEIGHTS, Partition


@dataclass(frozen=True)
class Estimate:
    """Training state and traffic of one rank, in bytes, without activations and padding."""

    ranks: int
    stage: int
    weights: int
    gradients: int
    optimizer: int
    total: int
    traffic_per_step: int


def estimate(parameters: float, stage: int, ranks: int) -> Estimate:
    """What one of `ranks` ranks holds and sends per step at `stage`, for mixed-precision Adam."""
    terms = Partition.from_stage(stage, ranks).bytes(parameters)
    return Estimate(
        ranks=ranks,
        stage=stage,
        **{name: round(value) for name, value in terms.items()},
        total=round(sum(terms.values())),
        traffic_per_step=round(traffic(parameters, stage, ranks)),
    )


def traffic(parameters: float, stage: int, ranks: int) -> float:
    """Bytes that a rank sends in a step: 2 model sizes, at stage 3 one more to gather the weights twice.

    A collective over n ranks sends (n - 1) / n of what it moves.
    """
    return (3 if stage == 3 else 2) * WEIGHTS * parameters * (ranks - 1) / ranks


def table(parameters: float, ranks: list[int]) -> dict:
    """The estimates for every stage and each of `ranks`, as plain values."""
    return {
        "parameters": round(parameters),
        "bytes_per_parameter": WEIGHTS + GRADIENTS + OPTIMIZER,
        "total_bytes": round((WEIGHTS + GRADIENTS + OPTIMIZER) * parameters),
        "rows": [asdict(estimate(parameters, stage, n)) for n in ranks for stage in STAGES],
    }
