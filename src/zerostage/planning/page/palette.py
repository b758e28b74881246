"""Colours and words of the plan's page: how a term is drawn and called, and how a size is written."""

from __future__ import annotations

from collections.abc import Sequence

from zerostage.planning.schema import Bytes, Row, Span

GB = 1e9

#: Terms by family: one hue each, told apart without colour by lightness. The order in a stack is that of `Bytes`.
FAMILIES = {
    "training state": {
        "weights": "#0b3c6f",
        "gradients": "#2166ac",
        "master": "#5b9bd5",
        "exp_avg": "#9cc7ec",
        "exp_avg_sq": "#cfe4f7",
    },
    "gathering and reducing": {"gathered": "#00664f", "reduce": "#45b394", "buffers": "#a9dccb"},
    "activations": {"activations": "#d1571a", "logits": "#f5b168"},
    "other": {"optimizer_temporaries": "#cc79a7", "context": "#4b5563"},
}
COLOURS = {term: colour for family in FAMILIES.values() for term, colour in family.items()}
TERMS = tuple(Bytes.model_fields)
UNKNOWN = "#b8bcc4"

INK, MUTED, GRID, ALARM = "#1f2933", "#667080", "#e4e7eb", "#b3261e"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
#: Colours of the kinds of spans, by stream.
LANES = {
    "compute": ("#2166ac", "#7fb2e0", "#0b3c6f", "#b9d6f0", "#4f86bd", "#dbe9f6"),
    "communication": ("#00664f", "#5cc0a4", "#a9dccb", "#2b8f74", "#d3eee6", "#07402f"),
}


def gb(size: float) -> str:
    """Bytes as a number of GB with about three digits."""
    value = size / GB
    magnitude = abs(value)
    return f"{value:,.{0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3 if value else 0}f}"


def term_name(term: str) -> str:
    return "optimizer temporaries" if term == "optimizer_temporaries" else term


def terms_of(sizes: Sequence[dict[str, int]]) -> list[str]:
    """Terms that are not zero everywhere, in the order of the stack; ones that `Bytes` does not have come last."""
    seen = {term for row in sizes for term, size in row.items() if size}
    return [term for term in TERMS if term in seen] + sorted(seen - set(TERMS))


def title(row: Row, engines: bool = False) -> str:
    """'stage 3, 64 ranks', with the engine where there are several. Not escaped."""
    return f"{row.layout}, {row.ranks} rank{'s' * (row.ranks != 1)}" + (f", {row.engine}" if engines else "")


def streams_of(spans: Sequence[Span]) -> list[str]:
    """The streams, compute first."""
    return sorted({span.stream for span in spans}, key=lambda stream: (stream != "compute", stream))


def kinds(spans: Sequence[Span]) -> dict[tuple[str, str], str]:
    """Colours by (stream, first word of the name); one per stream where there are too many words."""
    found: dict[tuple[str, str], str] = {}
    for stream in streams_of(spans):
        words = list(dict.fromkeys(span.name.partition(" ")[0] for span in spans if span.stream == stream))
        palette = LANES.get(stream, ("#8a93a0", "#b8bcc4", "#5c6470", "#d5d8dd", "#434a54", "#e6e8eb"))
        for i, word in enumerate(words):
            found[stream, word] = palette[i] if len(words) <= len(palette) else palette[0]
    return found
