"""The page of a plan, in a real browser: what it draws, that it loads nothing, that nothing from a user becomes markup."""

from __future__ import annotations

import importlib
import re
import sys

import pytest
from browser import Dom, opened
from made_plan import NAME, PARAMETERS, USABLE, made_plan, made_row

from zerostage.mistakes import InputError
from zerostage.partition import STAGES
from zerostage.planning.page import charts, page, palette, step_charts
from zerostage.planning.schema import Bytes, Plan, Recommendation, Span


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def rendered(folder):
    plan = made_plan()
    page.write(folder / "plan.html", plan)
    dom, console = opened(folder / "plan.html")
    return plan, Dom(dom), console


def test_nothing_is_loaded_and_nothing_goes_wrong(rendered):
    _, dom, console = rendered
    assert console == ""
    assert [each for each in dom.loads if not each.startswith("#") and each.strip("\"'")[:1] != "#"] == []
    assert dom.tags["link"] == dom.tags["img"] == dom.tags["iframe"] == 0


def test_bars_are_drawn_to_scale(rendered):
    plan, dom, _ = rendered
    sizes = [[size for size in row.bytes.model_dump().values() if size] for row in plan.rows]
    bars = dom.bars("memory-chart")
    assert len(bars) == sum(map(len, sizes))
    left, width = dom.scale("memory-chart")
    near, far = charts.ends(plan.rows, USABLE)
    assert near == pytest.approx(2 * USABLE / 1e9) and far > 1143  # the axis ends near the card, the largest bar far beyond it
    ends = [end / width * near for _, end in bars]
    assert all(any(abs(end - sum(own) / 1e9) < 0.01 * near for end in ends) for own in sizes)
    (line,) = [mark for mark in dom.marks["memory-chart", "shapelayer"] if mark["d"].startswith("M")]
    assert (float(re.match(r"M([\d.]+),", line["d"])[1]) - left) / width * near == pytest.approx(USABLE / 1e9, rel=0.003)
    assert "card: 84.3 GB usable" in dom.text["memory-chart"]
    # Pale are the bars of rows that do not fit, and only these.
    pale = [mark for mark in dom.marks["memory-chart", "barlayer"] if "opacity: 0.5" in mark["style"]]
    assert len(pale) == sum(len(own) for own, row in zip(sizes, plan.rows) if not row.fits)
    assert dom.text["memory-chart"].count("over") == sum(not row.fits for row in plan.rows) == 14


def test_step_is_drawn(rendered):
    plan, dom, _ = rendered
    terms = {term for moment in plan.timeline for term, size in moment.bytes.items() if size}
    assert len(dom.marks["timeline-chart", "js-fill"]) == len(terms) == 10
    peak = max(sum(moment.bytes.values()) for moment in plan.timeline)
    assert f"peak {peak / 1e9:.0f} GB" in dom.text["timeline-chart"]
    assert "stage 2, 64 ranks" in dom.text["timeline"] and "card less context: 82.9 GB" in dom.text["timeline-chart"]
    assert all(phase in dom.text["timeline-chart"] for phase in ("forward", "loss", "backward", "step"))
    assert len(dom.bars("spans-chart")) == len(plan.spans) + 2  # and the two gaps: the first gather, the last reduction
    assert all(word in dom.text["spans"] for word in ("recompute", "gather", "exposed", "0.26 s of it"))


def test_decision_and_figures_are_there(rendered):
    plan, dom, _ = rendered
    words = dom.text["decision"]
    assert (
        "Stage 3 on 32 ranks" in words and "Asked for: stage 2, 64 ranks, with zerostage: does not fit, 88.8 GB missing" in words
    )
    assert all(reason in words for reason in plan.recommendation.reasons)
    assert all(figure in words for figure in ("28.2 GB", "24,576", "17,422", "8.95 s", "MFU 40%"))
    best = plan.recommendation.row
    assert all(
        figure in dom.text["rows"]
        for figure in (
            f"{best.peak_allocated / 2**30:.1f}",
            f"{best.device_used / 2**20:,.0f}",
            f"{best.sent_bytes_per_step / 1e9:.1f}",
        )
    )
    assert all(choice.change in dom.text["choices"] for choice in plan.recommendation.choices)
    assert all(
        text in dom.text["facts"]
        for text in [*plan.assumed, *plan.left_out, "70,553,706,496", "400 GB/s", "989 TFLOP/s", "/models/<b>llama</b>"]
    )


def test_text_of_the_user_stays_text(rendered):
    plan, dom, _ = rendered
    assert NAME in dom.text["decision"] and NAME in dom.text["facts"]
    assert dom.tags["script"] == 6  # plotly.js, three charts, the JSON, the page's own: none came from the name
    assert Plan.model_validate_json(dom.text["plan"]) == plan


def test_names_in_charts_stay_text_too(folder):
    bad = "<b>x</b><img src=http://x.org/a.png onerror=alert(1)></script>"
    plan = made_plan()
    for row in plan.rows:
        row.layout, row.peak_phase = f"{bad} {row.layout}", bad
    for moment in plan.timeline:
        moment.at, moment.phase = bad, f"{bad} {moment.phase}"
    for span in plan.spans:
        span.name = bad
    plan.machine["gpu"], plan.run[bad] = bad, {bad: [bad]}
    plan.recommendation.reasons, plan.recommendation.choices[0].change, plan.recommendation.layout = [bad], bad, bad
    page.write(folder / "bad.html", plan)
    text, console = opened(folder / "bad.html")
    dom = Dom(text)
    assert console == "" and dom.tags["img"] == 0
    assert dom.text["memory-chart"].count(f"{bad} stage 3") == 4 and f"GB {bad}" in dom.text["timeline-chart"]
    assert Plan.model_validate_json(dom.text["plan"]) == plan


def test_every_bar_whole(folder):
    """The button under the legend: the axis then reaches the end of the longest bar."""
    plan = made_plan()
    page.write(folder / "whole.html", plan)
    text = (folder / "whole.html").read_text(encoding="utf-8")
    click = "<script>document.querySelector('.switch button:last-child').click()</script>"
    (folder / "whole.html").write_text(text.replace("</html>", f"{click}</html>"), encoding="utf-8")
    shown, console = opened(folder / "whole.html")
    dom = Dom(shown)
    assert console == ""
    _, far = charts.ends(plan.rows, USABLE)
    longest = max(sum(row.bytes.model_dump().values()) for row in plan.rows) / 1e9
    assert max(end for _, end in dom.bars("memory-chart")) / dom.scale("memory-chart")[1] * far == pytest.approx(
        longest, rel=0.003
    )


def test_parts_that_are_not_known_are_left_out(folder):
    """Only a number of parameters and no machine: no times, no line, no empty charts."""
    rows = [made_row(stage, 8, timed=False) for stage in STAGES]
    plan = Plan(model=dict(name="70B", parameters=PARAMETERS), machine={}, run={}, method="closed form", rows=rows)
    page.write(folder / "bare.html", plan)
    text, console = opened(folder / "bare.html")
    dom = Dom(text)
    assert console == ""
    assert len(dom.bars("memory-chart")) == sum(bool(size) for row in rows for size in row.bytes.model_dump().values())
    assert not {"timeline", "timeline-chart", "spans", "spans-chart", "choices"} & set(dom.text)
    assert not dom.marks.get(("memory-chart", "shapelayer"))
    words = dom.text["memory"] + dom.text["rows"] + dom.text["decision"] + dom.text["facts"]
    assert not re.search(r"card|fit|over\b|exposed|MFU|None|nan", words) and "No machine was given" in words


def test_nothing_fits(folder):
    """A decision without a row, and a layout of three degrees."""
    plan = made_plan()
    plan.recommendation = Recommendation(stage=None, ranks=None, layout="none", fits=False, reasons=["no setting fits 24 GB"])
    plan.timeline, plan.spans = [], []
    page.write(folder / "none.html", plan)
    text = (folder / "none.html").read_text(encoding="utf-8")
    assert "Nothing that was tried fits" in text and "no setting fits 24 GB" in text and 'id="timeline"' not in text
    row = made_row(1, 64)
    row.stage, row.layout = None, "tensor 8 x pipeline 4 x data 2"
    plan.recommendation = Recommendation(
        stage=None, ranks=64, layout=row.layout, tensor=8, pipeline=4, data=2, fits=True, reasons=[], row=row
    )
    page.write(folder / "none.html", plan)
    text = (folder / "none.html").read_text(encoding="utf-8")
    assert "Tensor 8 x pipeline 4 x data 2 on 64 ranks" in text and "8 × 4 × 2" in text and f"{row.layout} (recommended)" in text


def test_exposed_is_what_nothing_hides():
    def spans(*each):
        return [Span(stream=stream, name="x", start_s=start, end_s=end) for stream, start, end in each]

    compute, sent = "compute", "communication"
    assert step_charts.exposed([]) == []
    assert step_charts.exposed(spans((compute, 0, 4), (sent, 1, 3))) == []
    assert step_charts.exposed(spans((compute, 1, 2), (compute, 3, 4), (sent, 0, 3.5), (sent, 3, 5))) == [(0, 1), (2, 3), (4, 5)]
    assert step_charts.exposed(spans((sent, 0, 1), (sent, 1, 2))) == [(0, 2)]
    assert step_charts.exposed(spans((compute, 0, 0.3), (compute, 0.1 + 0.2, 1), (sent, 0, 1))) == []  # rounding is no gap


def test_every_term_has_a_colour():
    assert set(palette.COLOURS) == set(Bytes.model_fields) and len(set(palette.COLOURS.values())) == len(palette.COLOURS)


def test_file_that_cannot_be_written(tmp_path):
    with pytest.raises(InputError, match=r"^cannot write the page to .*/no/plan.html: No such file or directory$"):
        page.write(tmp_path / "no" / "plan.html", made_plan())


def test_without_plotly(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    monkeypatch.delitem(sys.modules, "zerostage.planning.page.charts")
    with pytest.raises(InputError, match=r"^the page needs plotly, which is not installed: pip install 'zerostage\[plan\]'$"):
        importlib.import_module("zerostage.planning.page.charts")
