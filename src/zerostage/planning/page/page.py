"""The plan as one web page in one file: the decision in words, charts, tables, and the plan itself as JSON.

Nothing is loaded from a network: plotly.js is in the file, and the page's own content policy forbids requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from zerostage.mistakes import InputError
from zerostage.planning.page import charts, step_charts
from zerostage.planning.page.palette import (
    COLOURS,
    FAMILIES,
    UNKNOWN,
    gb,
    kinds,
    term_name,
    terms_of,
    title,
)
from zerostage.planning.page.tables import (
    all_rows,
    choices,
    chosen,
    facts,
    number,
    section,
    shown,
    tables,
    usable,
)
from zerostage.planning.page.template import PAGE
from zerostage.planning.schema import Plan


def write(path: str | PathLike[str], plan: Plan) -> None:
    """Write the page of `plan` to `path` (about 5 MB, nearly all of it plotly.js).

    `InputError` where the file cannot be written; where plotly is not installed, the import of this module raises it.
    """
    text = PAGE.substitute(
        title=escape(f"zerostage plan: {subject(plan)}"),
        subject=escape(subject(plan)),
        decision=decision(plan),
        body="\n".join(filter(None, (memory(plan), timeline(plan), spans(plan), tables(plan), choices(plan), facts(plan)))),
        # In JSON, '<' stands in strings only, where it may be escaped: so nothing in it can end the element.
        plan=plan.model_dump_json().replace("<", "\\u003c"),
        plotly=charts.get_plotlyjs(),
    )
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write the page to {path}: {error.strerror or error}") from None


def subject(plan: Plan) -> str:
    """'llama-3.1-70b on 8 x 8 h100': what the plan is about."""
    machine = plan.machine
    count = " x ".join(str(machine[key]) for key in ("nodes", "gpus_per_node") if machine.get("nodes"))
    where = " ".join(filter(None, (count, str(machine.get("gpu") or ""))))
    return f"{plan.model.get('name') or 'a model'}" + (f" on {where}" if where else "")


def decision(plan: Plan) -> str:
    """What to do, the reasons, and the figures that one asks for first."""
    advice, asked, row = plan.recommendation, plan.asked, chosen(plan)
    parts: list[str] = []
    tiles: list[tuple[str, str, str]] = []
    card = usable(plan)
    if advice:
        if advice.ranks is None or not advice.fits:
            verdict, state = "Nothing that was tried fits", "no"
        else:
            verdict, state = (
                advice.layout[:1].upper() + advice.layout[1:] + f" on {advice.ranks:,} rank{'s' * (advice.ranks != 1)}",
                "yes",
            )
        badge = f' <span class="badge {state}">{"fits" if state == "yes" else "does not fit"}</span>' if card else ""
        parts.append(f'<p class="verdict">{escape(verdict)}{badge}</p>')
        parts.append('<ul class="reasons">' + "".join(f"<li>{escape(reason)}</li>" for reason in advice.reasons) + "</ul>")
    if asked and (not advice or asked != advice.row):
        words = f"Asked for: {title(asked)}, with {asked.engine}"
        if card:
            words += f": {'fits' if asked.fits else 'does not fit'}, "
            words += f"{gb(asked.left)} GB left" if asked.left >= 0 else f"{gb(-asked.left)} GB missing"
        parts.append(f'<p class="{"verdict small" if advice else "verdict"}">{escape(words)}</p>')
    if not advice and not asked:
        parts.append('<p class="verdict">Memory by stage and number of ranks</p>')
        parts.append("" if card else '<p class="note">No machine was given: so no verdict and no times.</p>')
    if advice and not (advice.tensor == advice.pipeline == 1):
        tiles.append(("layout", f"{advice.tensor} × {advice.pipeline} × {number(advice.data)}", "tensor × pipeline × data"))
    if row:
        tiles.append(("peak allocated", f"{gb(row.peak_allocated)} GB", f"in phase {row.peak_phase}"))
        if card:
            tiles.append(("left on the card", f"{gb(row.left)} GB", f"of {gb(card)} GB usable"))
    if advice:
        tiles += [
            (name, text, note)
            for name, value, text, note in (
                (
                    "room for activations",
                    advice.activation_room,
                    f"{gb(advice.activation_room or 0)} GB",
                    "beside the state",
                ),
                (
                    "largest micro-batch",
                    advice.largest_micro_batch,
                    number(advice.largest_micro_batch),
                    f"at sequence {number(plan.run.get('sequence'))}",
                ),
                (
                    "longest sequence",
                    advice.longest_sequence,
                    number(advice.longest_sequence),
                    f"at micro-batch {number(plan.run.get('micro_batch'))}",
                ),
            )
            if value is not None
        ]
    if row and row.step_s is not None:
        tiles.append(("step", f"{number(row.step_s)} s", f"{number(row.exposed_s)} s exposed"))
    if row and row.tokens_per_s_per_gpu is not None:
        tiles.append(("tokens/s per GPU", number(row.tokens_per_s_per_gpu), f"MFU {row.mfu:.0%}" if row.mfu is not None else ""))
    if advice and advice.gpu_hours is not None:
        tiles.append(("GPU-hours", number(advice.gpu_hours), "for the tokens asked"))
    if tiles:
        parts.append(
            '<dl class="tiles">'
            + "".join(
                f"<div><dt>{escape(name)}</dt><dd>{escape(text)}<small>{escape(note)}</small></dd></div>"
                for name, text, note in tiles
            )
            + "</dl>"
        )
    return "\n".join(parts)


def legend(items: Iterable[tuple[str, Iterable[tuple[str, str]]]]) -> str:
    """Names with their colours, in groups. A part of the page, so that it never lies over the data."""
    groups = "".join(
        f"<div><b>{escape(group)}</b>"
        + "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in names)
        + "</div>"
        for group, names in items
    )
    return f'<div class="legend">{groups}</div>'


def term_legend(terms: Sequence[str]) -> str:
    groups = [(family, [term for term in names if term in terms]) for family, names in FAMILIES.items()]
    groups.append(("not named", [term for term in terms if term not in COLOURS]))
    return legend(
        (family, [(term_name(term), COLOURS.get(term, UNKNOWN)) for term in names]) for family, names in groups if names
    )


def drawn(figure: Any, name: str, label: str) -> str:
    html = figure.to_html(
        full_html=False, include_plotlyjs=False, div_id=name, config=dict(displayModeBar=False, responsive=True)
    )
    return f'<figure role="img" aria-label="{escape(label)}">{html}</figure>'


def memory(plan: Plan) -> str:
    rows, marks = all_rows(plan)
    if not rows:
        return ""
    near, far = charts.ends(rows, usable(plan))
    switch = ""
    if near < far:
        switch = (
            f'<p class="switch"><button type="button" data-end="{near}" data-cut="true" aria-pressed="true">'
            f'scale of the card</button><button type="button" data-end="{far}" data-cut="false" aria-pressed="false">'
            "every bar whole</button></p>"
        )
    note = (
        "Bars: the most that each term takes. ◆ the peak: allocated at the worst moment, and the context. "
        "├─┤ what nvidia-smi will show, from the least to the most that is reserved."
    )
    if usable(plan):
        note += " Pale bars do not fit the card."
    if near < far:
        note += " Bars that run out of the picture are longer; their peaks are at the right."
    return section(
        "memory",
        "Memory of one rank by setting, GB",
        f'<p class="note">{note}</p>',
        term_legend(terms_of([row.bytes.model_dump() for row in rows])),
        switch,
        drawn(charts.memory(rows, usable(plan), marks), "memory-chart", "stacked bars of memory by setting"),
    )


def timeline(plan: Plan) -> str:
    if not plan.timeline:
        return ""
    row, card = shown(plan), usable(plan)
    of = f" ({title(row)})" if row else ""
    room = card - (row.bytes.context if row else 0) if card else None
    return section(
        "timeline",
        f"Memory of one step over time, GB{of}",
        '<p class="note">What is allocated, moment after moment; each at its own highest point. Without the context.</p>',
        term_legend(terms_of([moment.bytes for moment in plan.timeline])),
        drawn(step_charts.step_memory(plan.timeline, room), "timeline-chart", "stacked areas of memory over one step"),
    )


def spans(plan: Plan) -> str:
    if not plan.spans:
        return ""
    row = shown(plan)
    of = f" ({title(row)})" if row else ""
    bare = sum(end - start for start, end in step_charts.exposed(plan.spans))
    end = max(span.end_s for span in plan.spans)
    groups: dict[str, list[tuple[str, str]]] = {}
    for (stream, word), colour in kinds(plan.spans).items():
        groups.setdefault(stream, []).append((word, colour))
    if max(map(len, groups.values())) > 6:  # names of units rather than kinds: the lanes say enough
        groups = {}
    share = bare / end if end else 0
    note = f"{number(end)} s in all; for {number(bare)} s of it ({share:.1%}) something is sent and nothing computed (exposed)."
    return section(
        "spans",
        f"Compute and communication of one step, seconds{of}",
        f'<p class="note">{note} <span class="screen">Drag to enlarge, double-click to go back.</span></p>',
        legend(groups.items()),
        drawn(step_charts.step_time(plan.spans), "spans-chart", "compute and communication over time"),
    )
