"""The chart of memory by setting on the plan's page, and what its charts share.

Sizes are drawn in GB (1e9 bytes). Text that comes from a user is escaped, because plotly reads tags in labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from zerostage.mistakes import InputError
from zerostage.planning.page.palette import (
    ALARM,
    COLOURS,
    FONT,
    GB,
    GRID,
    INK,
    MUTED,
    gb,
    term_name,
    terms_of,
    title,
)
from zerostage.planning.schema import Row

try:
    import plotly.graph_objects as go
    from plotly.offline import get_plotlyjs  # noqa: F401 (the page embeds it)
except ImportError:
    raise InputError("the page needs plotly, which is not installed: pip install 'zerostage[plan]'") from None


def empty(height: int, **margin: int) -> go.Figure:
    """A figure in the style of the page, `height` pixels high, as wide as its place."""
    figure = go.Figure()
    axis = dict(
        gridcolor=GRID,
        zeroline=False,
        linecolor="#9aa3af",
        tickcolor="#9aa3af",
        tickfont=dict(color=MUTED),
        title=dict(standoff=10, font=dict(size=12, color=MUTED)),
        ticklabelstandoff=4,
    )
    figure.update_layout(
        template=go.layout.Template(layout=dict(xaxis=axis, yaxis=axis)),
        font=dict(family=FONT, size=12, color=INK),
        paper_bgcolor="#fff",
        plot_bgcolor="#fff",
        height=height,
        margin=dict(dict(l=60, r=20, t=30, b=45), **margin),
        showlegend=False,
        hoverlabel=dict(bgcolor="#fff", bordercolor="#9aa3af", font=dict(family=FONT, size=12, color=INK), align="left"),
        dragmode=False,
    )
    return figure


def ends(rows: Sequence[Row], usable: int | None) -> tuple[float, float]:
    """Where the bars' axis stops, in GB: close to the card, and with every bar whole."""
    largest = max(max(sum(row.bytes.model_dump().values()), row.device_used) for row in rows) / GB * 1.03
    near = min(largest, 2 * usable / GB) if usable else largest
    # A little more than the two cards is not worth a cut; and the card's line is always in the picture.
    near = largest if largest < 1.4 * near else near
    return max(near, 1.08 * (usable or 0) / GB), max(largest, 1.08 * (usable or 0) / GB)


def memory(rows: Sequence[Row], usable: int | None, marks: dict[int, str]) -> go.Figure:
    """Stacked bars of the bytes of one rank, a group for each number of ranks.

    `usable`: bytes of the card, for the line and the verdicts. `marks`: by index of a row, why it stands out ('recommended').
    """
    order = sorted(range(len(rows)), key=lambda i: rows[i].ranks)
    engines = len({row.engine for row in rows}) > 1
    places: dict[int, float] = {}
    groups: list[tuple[float, int]] = []
    y = 0.0
    for ranks, members in groupby(order, key=lambda i: rows[i].ranks):
        groups.append((y, ranks))
        for i in members:
            y += 1
            places[i] = y
        y += 1.35
    near, _ = ends(rows, usable)
    names = {i: escape(rows[i].layout + (f", {rows[i].engine}" if engines else "")) for i in order}
    letters = {i: len(rows[i].layout) + engines * (2 + len(rows[i].engine)) for i in order}
    longest = max(7.8 * letters[i] + 6.8 * len(marks[i]) + 16 if i in marks else 6.8 * letters[i] for i in order)  # in pixels
    figure = empty(round(24 * y) + 96, l=min(480, 24 + round(longest)), r=156 if usable else 80, t=34, b=56)
    sizes = [row.bytes.model_dump() for row in rows]
    whole = [sum(own.values()) for own in sizes]
    for term in terms_of(sizes):
        shown = [i for i in order if sizes[i][term]]
        figure.add_bar(
            name=term_name(term),
            orientation="h",
            width=0.78,
            x=[sizes[i][term] / GB for i in shown],
            y=[places[i] for i in shown],
            marker=dict(
                color=COLOURS[term],
                opacity=[1 if rows[i].fits or not usable else 0.5 for i in shown],
                line=dict(color="#fff", width=0.6),
            ),
            hovertemplate=[
                f"<b>{escape(title(rows[i], engines))}</b><br>{term_name(term)}: {gb(sizes[i][term])} GB"
                f"<br>{sizes[i][term]:,} bytes, {sizes[i][term] / whole[i]:.1%} of {gb(whole[i])} GB<extra></extra>"
                for i in shown
            ],
        )
    # What is reserved beyond what is allocated, and the peak itself: the terms' maxima need not fall on one moment.
    high = [rows[i].device_used for i in order]
    low = [min(rows[i].reserved_low + rows[i].bytes.context, rows[i].device_used) for i in order]
    peak = [rows[i].peak_allocated + rows[i].bytes.context for i in order]
    at = [places[i] for i in order]
    hover = [
        f"<b>{escape(title(rows[i], engines))}</b><br>peak, with context: {gb(top)} GB in phase {escape(rows[i].peak_phase)}<br>"
        f"nvidia-smi will show {gb(least)} to {gb(most)} GB<extra></extra>"
        for i, top, least, most in zip(order, peak, low, high)
    ]
    figure.add_scatter(
        name="device used",
        mode="markers",
        x=[size / GB for size in high],
        y=at,
        marker=dict(size=1, color=INK),
        error_x=dict(
            type="data",
            symmetric=False,
            array=[0] * len(at),
            arrayminus=[(most - least) / GB for most, least in zip(high, low)],
            color=INK,
            thickness=1.2,
            width=3,
        ),
        hovertemplate=hover,
    )
    figure.add_scatter(
        name="peak",
        mode="markers",
        x=[size / GB for size in peak],
        y=at,
        marker=dict(symbol="diamond", size=7, color=INK, line=dict(color="#fff", width=1)),
        hovertemplate=hover,
    )
    for place, ranks in groups:
        figure.add_annotation(
            text=f"<b>{ranks:,} rank{'s' * (ranks != 1)}</b>",
            x=0,
            xref="paper",
            xanchor="right",
            xshift=-8,
            y=place + 0.1,
            showarrow=False,
        )
    for i in order:
        row = rows[i]
        text = f"<b>{gb(row.peak_allocated + row.bytes.context)}</b>"
        if usable:
            verdict = f"{gb(row.left)} left" if row.fits else f"✕ {gb(-row.left)} over"
            text += f"  <span style='color:{INK if row.fits else ALARM}'>{verdict}</span>"
        figure.add_annotation(
            text=text, x=1, xref="paper", xanchor="left", xshift=8, y=places[i], showarrow=False, font=dict(size=11.5)
        )
    figure.add_annotation(
        text=f"<b>peak</b>{', left' if usable else ''} (GB)",
        x=1,
        xref="paper",
        xanchor="left",
        xshift=8,
        y=1,
        yref="paper",
        yanchor="bottom",
        yshift=2,
        showarrow=False,
        font=dict(size=11.5, color=MUTED),
    )
    cut = [i for i in order if whole[i] / GB > near]
    figure.add_scatter(
        name="cut",
        mode="text",
        x=[near] * len(cut),
        y=[places[i] for i in cut],
        text="<b>»</b> ",
        textposition="middle left",
        textfont=dict(color=INK, size=15),
        hoverinfo="skip",
    )
    if usable:
        figure.add_vline(
            x=usable / GB,
            line=dict(color=INK, width=1.6),
            name="card",
            annotation=dict(
                text=f"card: {gb(usable)} GB usable", y=1, yref="paper", yanchor="bottom", xanchor="center", font=dict(color=INK)
            ),
        )
    labels = [f"<b>{names[i]}</b> ({marks[i]})" if i in marks else names[i] for i in order]
    figure.update_layout(
        barmode="stack",
        xaxis=dict(
            title_text="GB per rank (1 GB = 1e9 bytes)", tickformat=",~f", range=[0, near], side="bottom", fixedrange=True
        ),
        yaxis=dict(
            range=[y - 0.6, -0.6],
            tickvals=at,
            ticktext=labels,
            showgrid=False,
            tickfont=dict(color=INK),
            fixedrange=True,
            showline=False,
        ),
    )
    return figure
