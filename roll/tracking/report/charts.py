"""The charts of the report. Each chart is drawn only if the run has its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from roll.tracking.report.curves import bucket_means, half_width, short, smoothed, spread_indices
from roll.tracking.report.figures import PALETTE, VERTICAL, Style, add_curve, blank
from roll.tracking.report.records import Row, names_like, series

PARTS = (
    "rollout",
    "log_probs",
    "reference",
    "teacher",
    "values",
    "train",
    "weight_sync",
    "evaluate",
    "checkpoint",
    "onload",
    "pause",
)
WAITING, IDLE, OTHER = "waits for rollouts", "#b4bac4", "#77808e"
"""Label of `time/rollout`, the colour of idle time, and the colour of time that no part accounts for."""
TALL = 360
"""Height of a figure with two lanes, in pixels. The style sheet of the page has the same value."""
BARS = 120
"""Largest number of bars of a figure. In a longer run each bar is the mean of several steps."""
STEPS_TICKED_EACH = 12
"""Largest number of steps for which every step has a tick. Otherwise short runs would show ticks such as step 1.5."""


@dataclass(frozen=True)
class Chart:
    """One figure and its texts."""

    title: str
    note: str
    figure: go.Figure
    tall: bool = False
    """Whether the chart takes a whole row of the page."""


@dataclass(frozen=True)
class Section:
    """Charts under one heading."""

    title: str
    charts: Sequence[Chart]


def chart_sections(rows: Sequence[Row]) -> list[Section]:
    """Return all charts for the rows of `metrics.jsonl`, without empty sections."""
    named = [
        ("Learning", [_reward(rows), _by_domain(rows), *_validation(rows), *_given(rows)]),
        ("Responses", [_one(rows, "Response length", "mean, tokens", "response/length_mean"), _truncated(rows)]),
        ("Episodes", _episodes(rows)),
        ("Policy", _policy(rows)),
        ("Critic", _critic(rows)),
        ("Trainer against engine", _mismatch(rows)),
        ("Speed and memory", [_who_worked(rows), *_throughput(rows), _memory(rows)]),
        ("Engines", _engines(rows)),
    ]
    found = [Section(title, [chart for chart in charts if chart is not None]) for title, charts in named]
    if max((row["step"] for row in rows), default=0) <= STEPS_TICKED_EACH:
        for chart in (chart for section in found for chart in section.charts):
            chart.figure.update_xaxes(dtick=1)
    return [section for section in found if section.charts]


def _reward(rows: Sequence[Row]) -> Chart | None:
    chart = _one(rows, "Reward", "mean over the step's responses; the band is one standard deviation", "reward/mean")
    by_step = {row["step"]: row["reward/std"] for row in rows if row.get("reward/std") is not None}
    if chart is None or not by_step:
        return chart
    band = [row for row in rows if row["step"] in by_step and row.get("reward/mean") is not None]
    at, half = spread_indices(len(band), BARS), half_width(len(band))
    steps = [band[index]["step"] for index in at]
    means = smoothed([row["reward/mean"] for row in band], at, half)
    widths = smoothed([row["reward/std"] for row in band], at, half)
    # The lower bound forwards, then the upper bound backwards: one closed, filled outline.
    outline_x = steps + steps[::-1]
    low = [short(mean - width) for mean, width in zip(means, widths, strict=True)]
    high = [short(mean + width) for mean, width in zip(means, widths, strict=True)]
    outline_y = low + high[::-1]
    band_style = {"fill": "toself", "fillcolor": "rgba(79,131,224,0.16)", "line": {"width": 0}, "mode": "lines"}
    chart.figure.add_scatter(x=outline_x, y=outline_y, hoverinfo="skip", showlegend=False, **band_style)
    return chart


def _by_domain(rows: Sequence[Row]) -> Chart | None:
    lines = {
        name.split("/", 1)[1].removesuffix("/mean"): name
        for name in names_like(rows, "reward/", "/mean")
        if name != "reward/mean"
    }
    return _lines(rows, "Reward by domain", "mean", lines)


def _validation(rows: Sequence[Row]) -> list[Chart | None]:
    measured = [name for name in names_like(rows, "val/", "") if series(rows, name)[0]]
    shares = ("/pass@", "/maj@")
    passes = {name.removeprefix("val/"): name for name in measured if any(share in name for share in shares)}
    charts = [_lines(rows, "Validation", "share of held-out prompts solved", passes, markers=True)]
    rest = [name for name in measured if name.removeprefix("val/") not in passes]
    charts += [_one(rows, name.removeprefix("val/"), "validation", name, markers=True) for name in rest]
    return charts


def _given(rows: Sequence[Row]) -> list[Chart | None]:
    return [
        _one(rows, "Loss", "cross-entropy of the responses' tokens, nats", "sft/loss"),
        _one(rows, "Loss", "preference loss", "dpo/loss"),
        _one(rows, "Accuracy", "share of pairs whose chosen response has the higher implicit reward", "dpo/accuracy"),
        _one(rows, "Reward margin", "chosen minus rejected", "dpo/reward_margin"),
        _one(rows, "Loss", "loss of the scores", "reward_model/loss"),
        _one(rows, "Accuracy", "share of pairs whose chosen response scores higher", "reward_model/accuracy"),
        _one(rows, "Divergence", "of the student from the teacher, nats per token", "distill/divergence"),
    ]


def _truncated(rows: Sequence[Row]) -> Chart | None:
    chart = _one(rows, "Truncated responses", "share that reached the length limit", "response/truncated_fraction")
    if chart is not None:
        chart.figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return chart


def _episodes(rows: Sequence[Row]) -> list[Chart | None]:
    stops = {
        name.removeprefix("episode/").removesuffix("_fraction"): name
        for name in names_like(rows, "episode/", "_fraction")
    }
    seen = {stop: name for stop, name in stops.items() if any(series(rows, name)[1])}
    counted = {name.removeprefix("environment/"): name for name in names_like(rows, "environment/", "")}
    return [
        _one(rows, "Turns", "mean per episode", "episode/turns_mean"),
        _lines(rows, "Ends of episodes", "share of episodes by stop reason", seen),
        _lines(rows, "Tools", "mean per episode", {"calls": "episode/tool_calls", "errors": "episode/tool_errors"}),
        _one(rows, "Environment", "mean seconds per episode", "episode/environment_seconds"),
        _lines(rows, "Environment metrics", "mean over episodes", counted),
    ]


def _policy(rows: Sequence[Row]) -> list[Chart | None]:
    return [
        _one(rows, "Policy loss", "", "policy/loss"),
        _one(rows, "KL to the reference", "nats per token", "policy/kl_ref"),
        _one(rows, "Entropy", "nats per token", "policy/entropy"),
        _one(rows, "Clip fraction", "share of tokens whose ratio was clipped", "policy/clip_fraction"),
        _one(rows, "Gradient norm", "before clipping", "policy/grad_norm"),
        _one(rows, "Learning rate", "", "policy/lr"),
    ]


def _critic(rows: Sequence[Row]) -> list[Chart | None]:
    means = {"value": "critic/value_mean", "return": "critic/return_mean"}
    return [
        _one(rows, "Critic loss", "half the squared error", "critic/loss"),
        _one(
            rows,
            "Explained variance",
            "share of the returns' variance that the values explain",
            "critic/explained_variance",
        ),
        _lines(rows, "Values and returns", "means over the response tokens", means),
        _one(rows, "Critic's gradient norm", "before clipping", "critic/grad_norm"),
    ]


def _mismatch(rows: Sequence[Row]) -> list[Chart | None]:
    lines = {
        "|Δ log-prob|, mean": "mismatch/logprob_abs_diff_mean",
        "KL": "mismatch/kl",
        "KL, spanning updates": "mismatch/spanning/kl",
    }
    note = "nats, on the same tokens; the axis is logarithmic and shows values above 0"
    chart = _lines(rows, "Mismatch", note, lines)
    if chart is not None:
        chart.figure.update_yaxes(type="log", dtick=1)
    ages = {"mean": "staleness/mean", "min": "staleness/min", "max": "staleness/max"}
    staleness = _lines(rows, "Staleness", "policy versions between sampling and training", ages)
    if staleness is not None:
        staleness.figure.update_yaxes(rangemode="tozero")
    return [chart, staleness]


def _who_worked(rows: Sequence[Row]) -> Chart | None:
    """Return a chart of the seconds of each step: the upper lane shows the parts of the loop, the lower lane what the
    engines did.

    Only sums are measured. The parts of a step are therefore stacked in the order of the loop, not by the time at which
    they began.
    """
    known = [f"time/{part}" for part in PARTS]
    parts = known + [name for name in names_like(rows, "time/", "") if name not in known and name != "time/step"]
    parts = [part for part in parts if any(row.get(part) for row in rows)]
    timed = [row for row in rows if any(row.get(part) for part in parts)]
    if not timed:
        return None
    figure, colours = blank(), iter(PALETTE[1:] * len(parts))  # the first colour is that of the engines
    for part in parts:
        waits = part == "time/rollout"
        label = WAITING if waits else part.removeprefix("time/").replace("_", " ")
        _bars(figure, timed, label, [row.get(part) or 0.0 for row in timed], IDLE if waits else next(colours))
    other = [max(0.0, (row.get("time/step") or 0.0) - sum(row.get(part) or 0.0 for part in parts)) for row in timed]
    if any(seconds > 0.01 for seconds in other):
        _bars(figure, timed, "other", other, OTHER)
    figure.update_layout(barmode="stack", bargap=0, showlegend=True, legend_traceorder="normal")
    measured = any(row.get("engine/idle_fraction") is not None for row in timed)
    if measured:
        _add_engines(figure, timed)
    note = "seconds of a step: the loop by part, and the engines" if measured else "seconds of a step by part"
    if len(timed) > BARS:
        note += f"; means of {round(len(timed) / BARS)} steps"
    return Chart("Who worked when", note, figure, tall=measured)


def _add_engines(figure: go.Figure, timed: Sequence[Row]) -> None:
    """Add a second lane with the seconds in which the engines generated or were idle."""
    shares = [1.0 if row.get("engine/idle_fraction") is None else row["engine/idle_fraction"] for row in timed]
    idle = [share * (row.get("time/step") or 0.0) for share, row in zip(shares, timed, strict=True)]
    working = [(row.get("time/step") or 0.0) - seconds for seconds, row in zip(idle, timed, strict=True)]
    _bars(figure, timed, "engines generate", working, PALETTE[0], "y2")
    _bars(figure, timed, "engines are idle", idle, IDLE, "y2")
    lane = {**VERTICAL, "domain": [0, 0.48], "matches": "y", "title": {"text": "engines, s"}}
    figure.update_layout(
        height=TALL, xaxis={"anchor": "y2"}, yaxis={"domain": [0.52, 1], "title": {"text": "loop, s"}}, yaxis2=lane
    )


def _bars(
    figure: go.Figure, rows: Sequence[Row], name: str, seconds: list[float], colour: str, axis: str = "y"
) -> None:
    steps, widths, means = bucket_means([row["step"] for row in rows], seconds, BARS)
    style = {"name": name, "yaxis": axis, "marker": {"color": colour, "line": {"width": 0}}}
    figure.add_bar(x=steps, y=[short(mean) for mean in means], width=widths, **style)


def _engines(rows: Sequence[Row]) -> list[Chart | None]:
    tokens = {
        "sampled": "engine/generated_tokens",
        "prefilled": "engine/prefilled_tokens",
        "discarded": "sampling/dropped_tokens",
    }
    cache = _one(rows, "KV cache", "largest share in use, of any engine", "engine/kv_cache_use")
    if cache is not None:
        cache.figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    requests = {"running": "engine/running", "waiting for room": "engine/waiting"}
    charts = [
        _lines(rows, "Requests", "mean numbers of running and waiting requests of an engine", requests),
        _lines(rows, "Tokens of a step", "all engines", tokens),
        _one(
            _where_any(rows, "engine/preemptions"),
            "Preemptions",
            "requests that lost their KV cache",
            "engine/preemptions",
        ),
        _one(
            _where_any(rows, "engine/tokens_in_flight"),
            "Tokens in flight",
            "at the end of the step, all engines",
            "engine/tokens_in_flight",
        ),
    ]
    for chart in charts:
        if chart is not None:
            chart.figure.update_yaxes(rangemode="tozero", tickformat=",")
    return [cache, *charts]


def _where_any(rows: Sequence[Row], name: str) -> Sequence[Row]:
    """Return the rows if the metric is ever not 0, or else none.

    Synchronous training has no tokens in flight, and most runs have no preemptions.
    """
    return rows if any(row.get(name) for row in rows) else ()


def _throughput(rows: Sequence[Row]) -> list[Chart | None]:
    charts = [
        _one(rows, "Tokens per second", "prompts and responses, all devices", "throughput/tokens_per_second"),
        _one(rows, "Tokens per second and device", "", "throughput/tokens_per_second_per_device"),
    ]
    for chart in charts:
        if chart is not None:
            chart.figure.update_yaxes(rangemode="tozero", tickformat=",")
    mfu = _one(rows, "MFU", "share of the GPUs' dense bf16 peak that updates reach", "throughput/mfu")
    if mfu is not None:
        mfu.figure.update_yaxes(rangemode="tozero", tickformat=".0%")
    return [*charts, mfu]


def _memory(rows: Sequence[Row]) -> Chart | None:
    lines = {name.split("/")[1]: name for name in names_like(rows, "memory/", "/peak_bytes")}
    gib = [
        {"step": row["step"], **{name: row[name] / 2**30 for name in lines.values() if row.get(name) is not None}}
        for row in rows
    ]
    chart = _lines(gib, "Peak memory", "GiB by role", lines)
    if chart is not None:
        chart.figure.update_yaxes(rangemode="tozero")
    return chart


def _one(rows: Sequence[Row], title: str, note: str, name: str, markers: bool = False) -> Chart | None:
    return _lines(rows, title, note, {title: name}, markers)


def _lines(rows: Sequence[Row], title: str, note: str, lines: dict[str, str], markers: bool = False) -> Chart | None:
    """Return a chart with a line for each metric that the run has; None if it has none of them. `lines` maps labels to
    metrics.
    """
    drawn = [(label, *series(rows, name)) for label, name in lines.items()]
    drawn = [(label, steps, values) for label, steps, values in drawn if steps]
    if not drawn:
        return None
    figure = blank()
    for number, (label, steps, values) in enumerate(drawn):
        add_curve(figure, lines[label], steps, values, Style(label, number, markers))
    figure.update_layout(showlegend=len(drawn) > 1)
    return Chart(title, note, figure)
