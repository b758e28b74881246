"""The parts of the plan's page that are not charts: tables, facts, and what all parts share. All text is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from zerostage.planning.page.palette import GB, gb, term_name, terms_of
from zerostage.planning.schema import Choice, Plan, Row

GIB = 2**30
#: Units of facts, by the end of their key.
UNITS = {"_gb_s": " GB/s", "_s": " s", "_tflops": " TFLOP/s"}


def usable(plan: Plan) -> int | None:
    """Bytes that the card has for a run, where a card was given."""
    return plan.machine.get("usable_bytes") or None


def chosen(plan: Plan) -> Row | None:
    """The row that the figures of the decision are about: the recommended one, where there is one."""
    return plan.recommendation.row if plan.recommendation and plan.recommendation.row else plan.asked


def shown(plan: Plan) -> Row | None:
    """The row that `timeline` and `spans` are about: the asked one, where one was asked for."""
    return plan.asked or chosen(plan)


def all_rows(plan: Plan) -> tuple[list[Row], dict[int, str]]:
    """The rows with the recommended and the asked one among them, and by index what marks these."""
    rows = list(plan.rows)
    marks: dict[int, str] = {}
    for row, mark in ((plan.recommendation and plan.recommendation.row, "recommended"), (plan.asked, "asked")):
        if row is None:
            continue
        if row not in rows:
            rows.append(row)
        index = rows.index(row)
        marks[index] = f"{marks[index]}, {mark}" if index in marks else mark
    return rows, marks


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, thousands apart; whole numbers as they are."""
    if value is None:
        return "–"
    if abs(value) < 1e-9:
        return "0"
    if isinstance(value, int) or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def section(name: str, heading: str, *parts: str) -> str:
    return f'<section id="{name}"><h2>{escape(heading)}</h2>\n' + "\n".join(parts) + "\n</section>"


def table(columns: Sequence[tuple[str, str]], lines: Iterable[tuple[str, Sequence[str]]]) -> str:
    """`columns`: name and unit. `lines`: class and cells. The first cell is text, a 'no' stands out; all are escaped here."""

    def cell(tag: str, index: int, text: str) -> str:
        kind = ' class="left"' if not index else ' class="no"' if text == "no" else ""
        return f"<{tag}{kind}>{text}</{tag}>"

    head = "".join(cell("th", i, f"{escape(name)}<small>{escape(unit)}</small>") for i, (name, unit) in enumerate(columns))
    body = "".join(
        f'<tr class="{kind}">' + "".join(cell("td", i, escape(text)) for i, text in enumerate(cells)) + "</tr>"
        for kind, cells in lines
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def tables(plan: Plan) -> str:
    """Every row twice: its terms, and its totals in the units of the tools that show them."""
    rows, marks = all_rows(plan)
    if not rows:
        return ""
    order = sorted(range(len(rows)), key=lambda i: rows[i].ranks)
    sizes = [row.bytes.model_dump() for row in rows]
    terms = terms_of(sizes)
    engines = len({row.engine for row in rows}) > 1
    card = usable(plan)
    timed = any(row.step_s is not None for row in rows)
    decimals = 1 if max(row.device_used for row in rows) >= 10 * GB else 3  # one for a column, so that points stand under points

    def exact(size: int) -> str:
        return f"{size / GB:,.{decimals}f}" if size else "0"

    def binary(size: int) -> str:
        return f"{size / GIB:,.{decimals}f}"

    def line(i: int, cells: list[str]) -> tuple[str, list[str]]:
        place = order.index(i)
        kinds = {
            "marked": i in marks,
            "over": card and not rows[i].fits,
            "first": place and rows[order[place - 1]].ranks != rows[i].ranks,
        }
        name = rows[i].layout + (f", {rows[i].engine}" if engines else "") + (f" ({marks[i]})" if i in marks else "")
        return " ".join(kind for kind, holds in kinds.items() if holds), [name, f"{rows[i].ranks:,}", *cells]

    def totals(row: Row) -> list[str]:
        cells = [exact(row.first_step), exact(row.peak_allocated), row.peak_phase, binary(row.peak_allocated)]
        cells += [
            f"{binary(row.reserved_low)} – {binary(row.reserved_high)}",
            binary(row.device_used),
            f"{row.device_used / 2**20:,.0f}",
        ]
        if card:
            cells += [exact(row.left), "yes" if row.fits else "no"]
        cells.append(exact(row.sent_bytes_per_step))
        if timed:
            share = "–" if row.mfu is None else f"{row.mfu:.0%}"
            cells += [number(row.step_s), number(row.exposed_s), number(row.tokens_per_s_per_gpu), share]
        return cells

    who = [("setting", ""), ("ranks", "")]
    columns = who + [("first step", "peak, GB"), ("later steps", "peak, GB"), ("peak in", "phase"), ("allocated", "GiB")]
    columns += [("reserved", "GiB"), ("device used", "GiB"), ("nvidia-smi", "MiB")]
    columns += [("left", "GB"), ("fits", "")] if card else []
    columns += [("sent", "GB/step")]
    columns += [("step", "s"), ("exposed", "s"), ("tokens/s", "per GPU"), ("MFU", "")] if timed else []
    by_term = who + [(term_name(term), "GB") for term in terms]
    return section(
        "rows",
        "All settings in figures, per rank",
        '<p class="note">1 GB = 1e9 bytes, 1 GiB = 2^30, 1 MiB = 2^20. Each term at its own most; the first five at rest. '
        "Allocated is what tensors take, reserved what torch's allocator holds for them, device used that and the context"
        + ("." if engines else f". Engine: {escape(rows[0].engine)}.")
        + "</p>",
        "<h3>Memory by term</h3>",
        table(by_term, (line(i, [exact(sizes[i][term]) for term in terms]) for i in order)),
        f"<h3>Peak, what tools will show{', traffic and time' if timed else ' and traffic'}</h3>",
        table(columns, (line(i, totals(rows[i])) for i in order)),
    )


def choices(plan: Plan) -> str:
    """Each knob that could be turned, against the recommended row."""
    advice = plan.recommendation
    if not advice or not advice.choices:
        return ""
    base, card = chosen(plan), usable(plan)
    timed = any(choice.step_s is not None for choice in advice.choices)
    columns = [("change", ""), ("peak allocated", "GB")]
    columns += [("difference", "GB")] if base else []
    columns += [("fits", "")] if card else []
    columns += [("step", "s")] if timed else []

    def cells(choice: Choice) -> list[str]:
        found = [choice.change, gb(choice.peak_allocated)]
        if base:
            change = choice.peak_allocated - base.peak_allocated
            change = change if abs(change) >= 5e5 else 0  # less than what the last digit shows
            found.append(("+" if change > 0 else "−" if change else "±") + gb(abs(change)))
        found += ["yes" if choice.fits else "no"] if card else []
        return found + ([number(choice.step_s)] if timed else [])

    lines = (("over" if card and not choice.fits else "", cells(choice)) for choice in advice.choices)
    note = '<p class="note">One change each to the setting above, best first.</p>'
    return section("choices", "What else could be turned", note, table(columns, lines))


def value(key: str, content: Any) -> str:
    """A fact in words, with its unit where the key tells it."""
    if content is None:
        return "–"
    if isinstance(content, bool):
        return "yes" if content else "no"
    if isinstance(content, (int, float)):
        if key.endswith("_bytes"):
            return f"{gb(content)} GB ({content / GIB:,.1f} GiB)"
        return number(content, 4) + next((unit for end, unit in UNITS.items() if key.endswith(end)), "")
    if isinstance(content, (list, tuple)):
        return ", ".join(value("", item) for item in content) or "none"
    if isinstance(content, dict):
        return ", ".join(f"{name}: {value(str(name), item)}" for name, item in content.items()) or "none"
    return str(content)


def facts(plan: Plan) -> str:
    def listed(name: str, items: dict[str, Any]) -> str:
        if not items:
            return ""
        label = {
            key: key.removesuffix("_bytes").removesuffix("_gb_s").replace("_tflops", " rate").replace("_", " ") for key in items
        }
        pairs = "".join(f"<dt>{escape(label[key])}</dt><dd>{escape(value(key, item))}</dd>" for key, item in items.items())
        return f"<div><h3>{name}</h3><dl>{pairs}</dl></div>"

    def points(name: str, items: Sequence[str]) -> str:
        return f"<div><h3>{name}</h3><ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul></div>" if items else ""

    return section(
        "facts",
        "What this rests on",
        f'<p class="note">Computed by: {escape(plan.method)}. Sizes and times are per rank.</p>',
        '<div class="facts">',
        listed("Model", plan.model),
        listed("Machine", plan.machine),
        listed("Run", plan.run),
        "</div>",
        '<div class="facts">',
        points("Assumed", plan.assumed),
        points("Left out of every figure", plan.left_out),
        "</div>",
    )
