"""The frame of the plan's page: style, the places of its parts, and the few scripts beside plotly.js."""

from __future__ import annotations

from string import Template

PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<title>$title</title>
<style>
:root { --ink: #1f2933; --muted: #5c6675; --line: #e0e4e9; --soft: #f6f7f9; --alarm: #b3261e; --good: #00664f;
 color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink);
 font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 48px; }
h1 { font-size: 15px; font-weight: 600; color: var(--muted); margin: 0 0 6px; }
h2 { font-size: 19px; line-height: 1.3; margin: 0 0 4px; }
h3 { font-size: 14px; margin: 18px 0 6px; }
section { margin-top: 44px; }
figure { margin: 0; }
.verdict { font-size: 30px; line-height: 1.2; font-weight: 650; margin: 0 0 10px; overflow-wrap: anywhere; }
.verdict.small { font-size: 16px; }
.badge { font-size: 13px; font-weight: 600; padding: 3px 10px; border-radius: 12px; vertical-align: 5px; white-space: nowrap; }
.badge.yes { background: #dff3ec; color: var(--good); } .badge.no { background: #fbe4e2; color: var(--alarm); }
.reasons { margin: 0 0 16px; padding-left: 20px; max-width: 110ch; }
.tiles { display: flex; flex-wrap: wrap; gap: 8px; margin: 0; }
.tiles > div { flex: 1 1 132px; max-width: 230px; background: var(--soft); border-left: 3px solid #9cc7ec; padding: 8px 12px; }
.tiles dt { color: var(--muted); font-size: 13px; } .tiles dd { margin: 0; font-size: 20px; font-weight: 600; }
.tiles small { display: block; font-size: 12px; font-weight: 400; color: var(--muted); }
.note { color: var(--muted); font-size: 13px; margin: 0 0 10px; max-width: 110ch; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; font-size: 13px; margin-bottom: 8px; }
.legend div { display: flex; flex-wrap: wrap; gap: 2px 10px; } .legend b { font-weight: 600; }
.legend span { white-space: nowrap; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 5px; vertical-align: -1px;
 print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.switch { margin: 0 0 2px; }
.switch button { font: inherit; font-size: 13px; padding: 3px 12px; border: 1px solid #9aa3af; background: #fff;
 color: var(--ink); cursor: pointer; }
.switch button:first-child { border-radius: 5px 0 0 5px; }
.switch button:last-child { border-radius: 0 5px 5px 0; border-left: 0; }
.switch button[aria-pressed=true] { background: var(--ink); color: #fff; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 12.5px; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 6px; white-space: nowrap; } th.left, td.left { text-align: left; }
th { vertical-align: bottom; border-bottom: 1.5px solid var(--ink); font-weight: 600; white-space: normal; }
th small { display: block; font-weight: 400; color: var(--muted); }
tr.first td { border-top: 1px solid var(--line); } tr.over td { color: #7a828e; } td.no { color: var(--alarm) !important; }
tr.marked td { background: #eef4fa; font-weight: 600; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 0 40px; }
.facts dl { display: grid; grid-template-columns: auto 1fr; gap: 2px 14px; margin: 0; font-size: 13px; }
.facts dt { color: var(--muted); } .facts dd { margin: 0; overflow-wrap: anywhere; }
.facts ul { margin: 0; padding-left: 18px; font-size: 13px; }
footer { margin-top: 40px; font-size: 12px; color: var(--muted); }
@media (max-width: 640px) { main { padding: 16px 12px; } .verdict { font-size: 24px; } }
@media print { @page { size: A4 landscape; margin: 12mm; } main { max-width: none; padding: 0; zoom: .84; }
.switch, .screen { display: none; }
 section { margin-top: 24px; } h3 { break-after: avoid; } section:not(#rows), tr, .tiles { break-inside: avoid; }
 table { font-size: 9.5px; } th, td { padding: 2px 4px; }
.badge, .tiles > div, tr.marked td { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
</style>
<script>$plotly</script>
</head>
<body>
<main>
<header id="decision">
<h1>$subject</h1>
$decision
</header>
$body
<footer>Made by zerostage plan. The figures are in this file as JSON, too: the element with the id plan.</footer>
</main>
<script type="application/json" id="plan">$plan</script>
<script>
for (const button of document.querySelectorAll(".switch button"))
  button.addEventListener("click", () => {
    const chart = document.getElementById("memory-chart");
    Plotly.update(chart, {visible: button.dataset.cut === "true"}, {"xaxis.range[1]": +button.dataset.end},
                  [chart.data.findIndex(trace => trace.name === "cut")]);
    for (const other of button.parentElement.children) other.setAttribute("aria-pressed", other === button);
  });
// Charts do not follow the width of paper by themselves. 1190 px at the zoom of print: A4 landscape within its margins.
const charts = () => document.querySelectorAll(".js-plotly-plot");
addEventListener("beforeprint", () => charts().forEach(chart => Plotly.relayout(chart, {width: 1190})));
addEventListener("afterprint", () => charts().forEach(chart => Plotly.relayout(chart, {width: null, autosize: true})));
</script>
</body>
</html>
""")
