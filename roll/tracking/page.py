"""The report's page: one HTML file that loads nothing. Jinja escapes whatever comes from the run."""

from __future__ import annotations

from jinja2 import Environment, StrictUndefined

STYLE = """
:root { color-scheme: light dark; --page:#f6f7f9; --card:#fff; --text:#1d2330; --soft:#667085; --line:#e4e7ec; --code:#f2f4f7; }
@media (prefers-color-scheme: dark) {
  :root { --page:#101319; --card:#181c24; --text:#e6e9ef; --soft:#98a2b3; --line:#2a303b; --code:#12161d; }
}
* { box-sizing: border-box; }
body { margin:0; background:var(--page); color:var(--text); font:15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width:1240px; margin:0 auto; padding:40px 28px 64px; }
h1 { font-size:28px; line-height:1.2; margin:0; letter-spacing:-.01em; overflow-wrap:anywhere; }
h2 { font-size:18px; margin:44px 0 14px; }
h3 { font-size:15px; margin:0; }
p { margin:0; }
.soft { color:var(--soft); }
.small { font-size:13px; }
.tiles { display:grid; grid-template-columns:repeat(auto-fit, minmax(165px, 1fr)); gap:14px; margin-top:26px; }
.card { background:var(--card); border:1px solid var(--line); border-radius:12px; padding:16px 18px; min-width:0; }
.tile .value { font-size:24px; font-weight:600; font-variant-numeric:tabular-nums; line-height:1.3; }
.charts { display:grid; grid-template-columns:repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap:14px; }
.charts:not(:has(> .tall)) > .card:last-child:nth-child(odd), .charts:has(> .tall) > .card:last-child:nth-child(even),
.charts > .tall { grid-column:1 / -1; }
.chart { height:240px; margin-top:8px; }
.tall .chart { height:360px; }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums; }
th { text-align:left; font-weight:500; color:var(--soft); font-size:13px; }
th, td { padding:7px 14px 7px 0; border-bottom:1px solid var(--line); }
tr:last-child td { border-bottom:0; }
td.number, th.number { text-align:right; }
pre { margin:0; font:12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; white-space:pre-wrap; overflow-wrap:anywhere; }
pre.box { margin-top:6px; background:var(--code); border-radius:8px; padding:10px 12px; max-height:15em; overflow:auto; }
.group { margin-bottom:14px; }
.response pre.box { margin-top:0; }
.response { display:grid; grid-template-columns:104px minmax(0, 1fr); gap:14px; padding-top:12px; }
.chip { display:inline-block; border-radius:999px; padding:1px 10px; font-weight:600; font-variant-numeric:tabular-nums; color:#fff; }
.flag { display:inline-block; border:1px solid #d08a1d; color:#d08a1d; border-radius:999px; padding:0 8px; font-size:12px; margin-top:4px; }
.ending { margin-top:26px; border-color:#c4372b; overflow-wrap:anywhere; white-space:pre-wrap; }
.ending p:first-child { font-weight:600; color:#c4372b; }
details { margin-top:14px; }
summary { cursor:pointer; font-weight:600; }
details[open] > summary { margin-bottom:12px; }
@media (max-width: 640px) { .response { grid-template-columns:1fr; gap:6px; } main { padding:24px 14px; } }
"""

# The figures come without colours of their own for text and grid, and take them from the page.
SCRIPT = """
const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function themed(layout) {
  const style = getComputedStyle(document.documentElement), colour = name => style.getPropertyValue(name).trim();
  const axis = { gridcolor: colour("--line"), linecolor: colour("--line"), tickcolor: colour("--line") };
  return { ...layout, autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: colour("--soft") },
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--text") } },
    xaxis: { ...layout.xaxis, ...axis, showline: true }, yaxis: { ...layout.yaxis, ...axis },
    ...(layout.yaxis2 && { yaxis2: { ...layout.yaxis2, ...axis } }) };
}
function draw() {
  for (const [id, figure] of Object.entries(figures))
    Plotly.react(id, figure.data, themed(figure.layout), { responsive: true, displayModeBar: false });
}
draw();
dark.addEventListener("change", draw);
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>{{ style | safe }}</style>
</head>
<body>
<main>
<header>
  <h1>{{ title }}</h1>
  <p class="soft">{{ subtitle }}</p>
</header>
{% if ending %}<div class="card ending">{% for line in ending %}<p>{{ line }}</p>{% endfor %}</div>{% endif %}
<div class="tiles">
{% for tile in tiles %}<div class="card tile">
  <p class="soft small">{{ tile.label }}</p><p class="value">{{ tile.value }}</p><p class="soft small">{{ tile.note }}</p>
</div>
{% endfor %}</div>
{% if validation %}
<h2>Validation, before and after</h2>
<div class="card"><table>
<tr><th>Measure</th><th class="number">First</th><th class="number">Last</th>
<th class="number">Best</th><th class="number">Best at step</th></tr>
{% for row in validation %}<tr><td>{{ row.name }}</td><td class="number">{{ row.first }}</td><td class="number">{{ row.last }}</td>
<td class="number"><strong>{{ row.best }}</strong></td><td class="number">{{ row.best_step }}</td></tr>
{% endfor %}</table></div>
{% endif %}
{% for section in sections %}
<h2>{{ section.title }}</h2>
<div class="charts">
{% for chart in section.charts %}<div class="card{{ " tall" if chart.tall }}">
  <h3>{{ chart.title }}</h3><p class="soft small">{{ chart.note or "\u00a0" }}</p><div class="chart" id="{{ chart.id }}"></div>
</div>
{% endfor %}</div>
{% endfor %}
{% for part in samples %}
<h2>Samples of step {{ part.step }}</h2>
{% for group in part.groups %}
<div class="card group">
  <p class="soft small">{{ group.heading }}</p>
  <pre class="box">{{ group.prompt }}</pre>
  {% for response in group.responses %}
  <div class="response">
    <div><span class="chip" style="background:{{ response.colour }}">{{ response.reward }}</span>
      <p class="soft small">{{ response.length }} tokens</p>
      {% for flag in response.flags %}<span class="flag">{{ flag }}</span> {% endfor %}</div>
    <div>{% for segment in response.segments %}<p class="soft small">{{ segment.caption }}</p>
      <pre class="box">{{ segment.text }}</pre>{% else %}<pre class="box">{{ response.text }}</pre>{% endfor %}
      {% if response.parts %}<p class="soft small">{{ response.parts }}</p>{% endif %}</div>
  </div>
  {% endfor %}
</div>
{% endfor %}
{% endfor %}
<h2>In full</h2>
{% if config %}<details class="card"><summary>Configuration</summary><pre>{{ config }}</pre></details>{% endif %}
<details class="card"><summary>All metrics</summary><table>
<tr><th>Metric</th><th class="number">First</th><th class="number">Last</th><th class="number">Least</th><th class="number">Most</th></tr>
{% for row in metrics %}<tr><td>{{ row.name }}</td><td class="number">{{ row.first }}</td><td class="number">{{ row.last }}</td>
<td class="number">{{ row.least }}</td><td class="number">{{ row.most }}</td></tr>
{% endfor %}</table></details>
{% for remark in remarks %}<p class="soft small" style="margin-top:14px">{{ remark }}</p>{% endfor %}
</main>
<script type="application/json" id="figures">{{ figures | safe }}</script>
<script>{{ plotly | safe }}</script>
<script>{{ script | safe }}</script>
</body>
</html>
"""


def render(page: dict[str, object], figures: str, plotly: str) -> str:
    """Fill the page. `figures` is JSON without `<`, by the element's id; `plotly` is plotly.js itself."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(PAGE).render(**page, figures=figures, plotly=plotly, style=STYLE, script=SCRIPT)
