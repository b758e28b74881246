"""The charts of one step on the plan's page: its memory moment after moment, and its streams over the seconds.

Sizes are drawn in GB (1e9 bytes). Text that comes from a user is escaped, because plotly reads tags in labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from zerostage.planning.page.charts import empty, go
from zerostage.planning.page.palette import (
    ALARM,
    COLOURS,
    GB,
    INK,
    MUTED,
    UNKNOWN,
    gb,
    kinds,
    streams_of,
    term_name,
    terms_of,
)
from zerostage.planning.schema import Moment, Span


def step_memory(timeline: Sequence[Moment], room: int | None) -> go.Figure:
    """What is allocated in one step, stacked by term, moment after moment.

    `room`: bytes that the card has beside the context.
    """
    figure = empty(430, l=56, r=16, t=42, b=36)
    totals = [sum(moment.bytes.values()) for moment in timeline]
    # Moment i is drawn from i to i + 1 with its point in the middle, where the hover finds it; the ends are padded.
    indices = [0, *range(len(timeline)), len(timeline) - 1]
    steps = [0, *(i + 0.5 for i in range(len(timeline))), len(timeline)]
    for term in terms_of([moment.bytes for moment in timeline]):
        sizes = [timeline[i].bytes.get(term, 0) for i in indices]
        figure.add_scatter(
            name=term_name(term),
            x=steps,
            y=[size / GB for size in sizes],
            stackgroup="memory",
            line=dict(shape="hvh", width=0.5, color="#fff"),
            fillcolor=COLOURS.get(term, UNKNOWN),
            customdata=[f"{gb(size)} GB, {size / (totals[i] or 1):.1%} ({size:,} bytes)" for i, size in zip(indices, sizes)],
            hovertemplate="%{customdata}",
        )
    names = [f"<b>{escape(moment.at)}: {gb(total)} GB allocated</b>" for moment, total in zip(timeline, totals)]
    figure.add_scatter(
        name="",
        x=steps,
        y=[totals[i] / GB for i in indices],
        mode="lines",
        customdata=[names[i] for i in indices],
        line=dict(shape="hvh", width=1.2, color=INK),
        hovertemplate="%{customdata}<extra></extra>",
    )
    best = max(range(len(totals)), key=totals.__getitem__)
    top = 1.16 * totals[best] / GB or 1
    if room and room <= 3 * totals[best]:
        top = max(top, 1.08 * room / GB)
        figure.add_hline(
            y=room / GB,
            line=dict(color=INK, width=1.6),
            annotation=dict(
                text=f"card less context: {gb(room)} GB", x=0.004, xanchor="left", yanchor="bottom", font=dict(color=INK)
            ),
        )
    start = 0
    phases = [(phase, len(list(members))) for phase, members in groupby(timeline, key=lambda moment: moment.phase)]
    for number, (phase, count) in enumerate(phases):
        end = start + count
        figure.add_vrect(x0=start, x1=end, fillcolor="#f3f4f6" if number % 2 == 0 else "#fff", line_width=0, layer="below")
        narrow = end - start < 0.06 * len(timeline)  # its name stands above the others', so that they do not meet
        last = end > 0.97 * len(timeline)
        figure.add_annotation(
            # With many micro-batches the phases repeat, and only the first of each is named.
            text=escape(phase) if len(phases) <= 16 or phase not in [name for name, _ in phases[:number]] else "",
            x=end if narrow and last else (start + end) / 2,
            y=1,
            yref="paper",
            yanchor="bottom",
            xanchor="right" if narrow and last else "center",
            yshift=16 if narrow else 1,
            showarrow=False,
            font=dict(color=MUTED),
        )
        start = end
    right = best > len(timeline) / 2
    figure.add_scatter(
        x=[best + 0.5],
        y=[totals[best] / GB],
        mode="markers",
        hoverinfo="skip",
        marker=dict(symbol="diamond", size=9, color=INK, line=dict(color="#fff", width=1)),
    )
    figure.add_annotation(
        text=f"<b>peak {gb(totals[best])} GB</b> {escape(timeline[best].at)}",
        x=best + 0.5,
        y=totals[best] / GB,
        ax=0,
        ay=-22,
        xanchor="right" if right else "left",
        arrowwidth=1,
        arrowcolor=INK,
        arrowhead=0,
        bgcolor="rgba(255,255,255,.75)",
    )
    figure.update_layout(
        hovermode="x unified",
        xaxis=dict(
            title_text="moments of one step, in order",
            range=[0, len(timeline)],
            showticklabels=False,
            showgrid=False,
            ticks="",
            fixedrange=True,
            unifiedhovertitle=dict(text=f"moment %{{x:.0f}} of {len(timeline)}"),
        ),
        yaxis=dict(title_text="GB allocated (1 GB = 1e9 bytes)", range=[0, top], fixedrange=True),
    )
    return figure


def exposed(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """The intervals, in seconds, in which something is sent and nothing computed."""
    edges = sorted([(at, span.stream, sign) for span in spans for at, sign in ((span.start_s, 1), (span.end_s, -1))])
    shortest = 1e-6 * max((span.end_s for span in spans), default=0)  # below it, rounding and no gap
    busy = {"compute": 0, "communication": 0}
    gaps: list[tuple[float, float]] = []
    for (at, stream, sign), following in zip(edges, edges[1:]):
        busy[stream] = busy.get(stream, 0) + sign
        if busy["communication"] and not busy["compute"] and following[0] > at:
            if gaps and gaps[-1][1] == at:
                gaps[-1] = (gaps[-1][0], following[0])
            else:
                gaps.append((at, following[0]))
    return [(start, end) for start, end in gaps if end - start > shortest]


def step_time(spans: Sequence[Span]) -> go.Figure:
    """A lane for each stream over the seconds of one step, and what of the communication is not hidden."""
    streams = streams_of(spans)
    gaps = exposed(spans)
    figure = empty(90 + 62 * len(streams) + 34 * bool(gaps), l=116, r=16, t=10, b=46)
    colours = kinds(spans)
    for stream in streams:
        own = [span for span in spans if span.stream == stream]
        figure.add_bar(
            name=stream,
            orientation="h",
            base=[span.start_s for span in own],
            x=[span.end_s - span.start_s for span in own],
            y=[streams.index(stream)] * len(own),
            width=0.8,
            marker=dict(
                color=[colours[stream, span.name.partition(" ")[0]] for span in own], line=dict(color="#fff", width=0.25)
            ),
            hovertemplate=[
                f"<b>{escape(span.name)}</b><br>{span.end_s - span.start_s:.4g} s, "
                f"from {span.start_s:.4g} to {span.end_s:.4g} s<extra></extra>"
                for span in own
            ],
        )
    if gaps:
        figure.add_bar(
            name="exposed",
            orientation="h",
            base=[start for start, _ in gaps],
            x=[end - start for start, end in gaps],
            y=[len(streams) - 0.25] * len(gaps),
            width=0.34,
            marker=dict(color=ALARM, line=dict(color=ALARM, width=1)),  # the outline keeps the shortest ones visible
            hovertemplate=[
                f"nothing computed for {end - start:.4g} s, from {start:.4g} to {end:.4g} s<extra></extra>" for start, end in gaps
            ],
        )
    figure.update_layout(
        barmode="overlay",
        xaxis=dict(title_text="seconds", range=[0, max(span.end_s for span in spans)]),
        yaxis=dict(
            range=[len(streams) - 0.5 + 0.5 * bool(gaps), -0.5],
            showgrid=False,
            showline=False,
            fixedrange=True,
            tickfont=dict(color=INK),
            tickvals=[*range(len(streams)), *([len(streams) - 0.25] * bool(gaps))],
            ticktext=[*(escape(stream) for stream in streams), *(["exposed"] * bool(gaps))],
        ),
        dragmode="zoom",
    )
    return figure
