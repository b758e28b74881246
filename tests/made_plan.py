"""A made-up answer of the planner with realistic figures: a 70B on H100s."""

from __future__ import annotations

from zerostage.partition import STAGES
from zerostage.planning.schema import (
    Bytes,
    Choice,
    Moment,
    Plan,
    Recommendation,
    Row,
    Span,
)

NAME = "<script>alert(1)</script> & 'llama'"
PARAMETERS = 70_553_706_496
UNIT = 855_654_400  # parameters of one block; embedding and head take the rest
EDGE = (PARAMETERS - 80 * UNIT) // 2
USABLE = 84_300_000_000


def made_row(stage: int, ranks: int, timed: bool = True) -> Row:
    """Figures such as a 70B gives on H100s, by the textbook's arithmetic."""
    owned = [PARAMETERS // ranks if stage >= level else PARAMETERS for level in (1, 2, 3)]
    sizes = Bytes(
        weights=2 * owned[2],
        gradients=2 * owned[1],
        master=4 * owned[0],
        exp_avg=4 * owned[0],
        exp_avg_sq=4 * owned[0],
        gathered=4 * EDGE if stage == 3 else 0,
        reduce=2 * EDGE if stage else 0,
        activations=13_800_000_000,
        logits=4_300_000_000,
        context=1_400_000_000,
    )
    held = sum(getattr(sizes, term) for term in ("weights", "gradients", "master", "exp_avg", "exp_avg_sq", "gathered", "reduce"))
    peak = held + 13_100_000_000
    high = round(1.06 * peak)
    traffic = (3 if stage == 3 else 2) * 2 * PARAMETERS * (ranks - 1) // ranks
    seconds = dict(
        compute_s=8.64, communication_s=traffic / 45e9, exposed_s=0.31, step_s=8.95, tokens_per_s_per_gpu=457.6, mfu=0.4012
    )
    return Row(
        stage=stage,
        layout=f"stage {stage}",
        partition=tuple(ranks if stage >= level else 1 for level in (1, 2, 3)),
        ranks=ranks,
        engine="zerostage",
        bytes=sizes,
        phases={"forward": peak - 9 * 10**9, "loss": peak - 10**9, "backward": peak, "step": held},
        first_step=peak - 10**9,
        peak_allocated=peak,
        peak_phase="backward",
        reserved_low=round(1.01 * peak),
        reserved_high=high,
        device_used=high + sizes.context,
        fits=high + sizes.context <= USABLE,
        left=USABLE - peak - sizes.context,
        sent_bytes_per_step=traffic,
        **(seconds if timed else {}),
    )


def made_timeline(row: Row) -> list[Moment]:
    rest = {term: getattr(row.bytes, term) for term in ("weights", "gradients", "master", "exp_avg", "exp_avg_sq")}
    saved = 8192 * 8192 * 2
    moments = []
    for i in range(80):
        moments.append(
            Moment(
                at=f"forward model.layers.{i}",
                phase="forward",
                bytes=rest | {"gathered": 4 * UNIT, "activations": (i + 1) * saved + 900_000_000},
            )
        )
    moments.append(
        Moment(
            at="loss", phase="loss", bytes=rest | {"gathered": 4 * EDGE, "activations": 80 * saved, "logits": row.bytes.logits}
        )
    )
    for i in reversed(range(80)):
        moments.append(
            Moment(
                at=f"backward model.layers.{i}",
                phase="backward",
                bytes=rest | {"gathered": 4 * UNIT, "reduce": 2 * UNIT, "activations": (i + 1) * saved + 2_700_000_000},
            )
        )
    for i in range(4):
        moments.append(
            Moment(at=f"step {i}", phase="step", bytes=rest | {"optimizer_temporaries": 300_000_000, "gathered": 2 * UNIT})
        )
    return moments


def made_spans() -> list[Span]:
    """80 blocks forward and backward; what is sent is hidden but for the first gather and the last reduction."""
    spans, now = [Span(stream="communication", name="gather model.layers.0", start_s=0.0, end_s=0.04)], 0.04
    for i in range(80):
        spans.append(Span(stream="compute", name=f"forward model.layers.{i}", start_s=now, end_s=now + 0.027))
        if i < 79:
            spans.append(Span(stream="communication", name=f"gather model.layers.{i + 1}", start_s=now, end_s=now + 0.021))
        now += 0.027
    for i in reversed(range(80)):
        spans.append(Span(stream="compute", name=f"recompute model.layers.{i}", start_s=now, end_s=now + 0.027))
        spans.append(Span(stream="compute", name=f"backward model.layers.{i}", start_s=now + 0.027, end_s=now + 0.081))
        spans.append(Span(stream="communication", name=f"gather model.layers.{i}", start_s=now, end_s=now + 0.021))
        spans.append(Span(stream="communication", name=f"reduce model.layers.{i}", start_s=now + 0.03, end_s=now + 0.055))
        now += 0.081
    return spans + [Span(stream="communication", name="reduce model.embed_tokens", start_s=now, end_s=now + 0.22)]


def made_plan() -> Plan:
    rows = [made_row(stage, ranks) for ranks in (8, 16, 32, 64) for stage in STAGES]
    best = next(row for row in rows if row.stage == 3 and row.ranks == 32)
    asked = next(row for row in rows if row.stage == 2 and row.ranks == 64)
    return Plan(
        model=dict(
            name=NAME,
            family="llama",
            parameters=PARAMETERS,
            active_parameters=PARAMETERS,
            trainable_parameters=PARAMETERS,
            layers=80,
            hidden=8192,
            tied=False,
            path="/models/<b>llama</b>",
        ),
        machine=dict(
            gpu="h100", nodes=8, gpus_per_node=8, usable_bytes=USABLE, network_gb_s=400.0, link_gb_s=450.0, peak_tflops=989.0
        ),
        run=dict(
            micro_batch=1, accumulation=1, sequence=8192, checkpointing="full", attention="flash", gradients=None, compiled=False
        ),
        method="closed form",
        rows=rows,
        asked=asked,
        recommendation=Recommendation(
            stage=3,
            ranks=32,
            layout="stage 3",
            data=32,
            fits=True,
            row=best,
            activation_room=41_000_000_000,
            largest_micro_batch=3,
            longest_sequence=24_576,
            gpu_hours=17_422.0,
            reasons=[
                "stage 2 keeps 141 GB of weights on every rank and fits an 80 GB card at no number of ranks",
                "stage 3 first fits with room for activations at 32 ranks: 35.3 GB of state, 18.1 GB of activations and logits",
                "the network carries 3 model sizes (410 GB per rank and step) within the compute time: 0.31 s are exposed",
            ],
            choices=[
                Choice(change="chunked loss", peak_allocated=best.peak_allocated - 3_700_000_000, fits=True, step_s=8.99),
                Choice(
                    change="selective activation checkpointing",
                    peak_allocated=best.peak_allocated + 21_500_000_000,
                    fits=True,
                    step_s=7.4,
                ),
                Choice(change="16 ranks", peak_allocated=best.peak_allocated + 35_000_000_000, fits=False, step_s=8.8),
            ],
        ),
        timeline=made_timeline(asked),
        spans=made_spans(),
        assumed=["every rank has the same sequence length", "GPU memory not given: 84.3 GB of an H100 SXM are usable"],
        left_out=["evaluation and generation", "the data loader's pinned memory"],
    )
