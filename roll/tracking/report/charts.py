"""The charts of the pages: a table of what they show, and the reduction of a long series to few points.

A figure sets no colours for text and grid, because these follow the light or dark theme of the page. A long series
becomes a smoothed curve in front of its faint range. Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import plotly.graph_objects as go

from roll.tracking.report.records import Row, constants, is_idle, names_like, number_text, series

# Mid-tones, legible on white and on near-black.
PALETTE = ("#4f83e0", "#e8833a", "#2fa37c", "#9467d6", "#d9534f", "#3aa9c4", "#b8901c", "#c2629b")
DASHES = ("solid", "dash", "dot", "dashdot")
"""Dash styles of lines. After all colours are used, they repeat with the next dash style."""
FAINT = 0.38
"""Opacity of the unsmoothed values behind a smoothed curve."""
EXACT = ("policy/lr", "critic/lr", "staleness/min", "staleness/max", "epoch")
"""Metrics without noise. They are not smoothed, because the mean would show values that they never had."""
SHORTEST_LINE = 3
"""Smallest number of points that is drawn as a line without markers."""
BUCKETS = 150
"""Number of buckets into which a long series is divided. Each is about two pixels of a chart wide."""
SMOOTHED_POINTS = 200
"""Largest number of points of a smoothed curve."""
SMOOTHED_FROM = 40
"""Smallest number of points for which a series is smoothed."""
SHARE = 25
"""The smoothing window extends 1/SHARE of the series to each side of a point."""
PARTS = (
    "rollout",
    "log_probs",
    "reference",
    "teacher",
    "self_teacher",
    "values",
    "train",
    "weight_sync",
    "evaluate",
    "keep_rollouts",
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
GIB = 2.0**30

Axis = Mapping[str, Any]
FROM_ZERO: Axis = {"rangemode": "tozero"}
COUNTS: Axis = {"rangemode": "tozero", "tickformat": ","}
SHARES: Axis = {"rangemode": "tozero", "tickformat": ".0%"}
LOGARITHMIC: Axis = {"type": "log", "dtick": 1}
VERTICAL: Axis = {"automargin": True, "zeroline": False, "nticks": 6, "exponentformat": "e"}
"""Settings of all vertical axes."""


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
    constants: Sequence[str] = ()
    """Metrics that never change, as `name = value`. They have no charts."""


@dataclass(frozen=True)
class Curves:
    """A chart of one or more metrics. It is drawn only if the run has one of them."""

    title: str
    note: str
    lines: str | Mapping[str, str]
    """Pattern of the metric; or the pattern of each label. A label or a title may refer to the pattern's group."""
    axis: Axis = field(default_factory=dict)
    markers: bool = False
    unit: float = 1.0
    """The values are divided by it."""
    is_optional: bool = False
    """Whether metrics that are always 0 are left out."""

    def charts(self, rows: Sequence[Row], names: Sequence[str]) -> Iterator[Chart]:
        """Yield the chart; one for each metric if the title refers to the pattern's group. `names` are all metrics.

        There is no chart of metrics that are all idle.
        """
        found = [(label, name) for name, label in self.labels(names).items()]
        drawn = [(label, name, *series(rows, name)) for label, name in found]
        drawn = [line for line in drawn if line[2] and not (self.is_optional and not any(line[3]))]
        for lines in [[line] for line in drawn] if r"\1" in self.title else [drawn] if drawn else []:
            if self._is_idle(rows, [line[1] for line in lines]):
                continue
            figure = blank()
            for number, (label, name, steps, values) in enumerate(lines):
                scaled = [value / self.unit for value in values]
                add_curve(figure, name, steps, scaled, label, number, self.markers)
            figure.update_layout(showlegend=len(lines) > 1)
            figure.update_yaxes(**self.axis)
            yield Chart(lines[0][0] if r"\1" in self.title else self.title, self.note, figure)

    def labels(self, names: Sequence[str]) -> dict[str, str]:
        """Return the label of each metric that the chart shows, in their order."""
        patterns = {self.title: self.lines} if isinstance(self.lines, str) else self.lines
        return {
            name: match.expand(label)
            for label, pattern in patterns.items()
            for name in names
            if (match := re.fullmatch(pattern, name))
        }

    def constants(self, rows: Sequence[Row], names: Sequence[str]) -> list[str]:
        """Return `name = value` of the metrics without a chart because none of them changes."""
        shown, is_alone = self.labels(names), r"\1" in self.title
        idle = [name for name in shown if self._is_idle(rows, [name] if is_alone else list(shown))]
        found = [(shown[name], value) for name, value in constants(rows, idle) if value or not self.is_optional]
        prefix = "" if is_alone or isinstance(self.lines, str) else f"{self.title}, "
        return [f"{prefix}{label} = {number_text(value)}" for label, value in found]

    def _is_idle(self, rows: Sequence[Row], names: Sequence[str]) -> bool:
        """Whether a chart of these metrics would show nothing. Memory is shown even if its peak stays the same."""
        return self.unit == 1 and all(is_idle(rows, name) for name in names)


def chart_sections(rows: Sequence[Row]) -> list[Section]:
    """Return all charts for the rows of `metrics.jsonl`, without empty sections."""
    names = names_like(rows, "", "")
    found: list[Section] = []
    for title, makers in SECTIONS.items():
        charts = [one.charts if isinstance(one, Curves) else one for one in makers]
        constant = [text for one in makers if isinstance(one, Curves) for text in one.constants(rows, names)]
        found.append(Section(title, [chart for make in charts for chart in make(rows, names)], constant))
    if max((row["step"] for row in rows), default=0) <= STEPS_TICKED_EACH:
        for chart in (chart for section in found for chart in section.charts):
            chart.figure.update_xaxes(dtick=1)
    return [section for section in found if section.charts or section.constants]


def _reward(rows: Sequence[Row], names: Sequence[str]) -> Iterator[Chart]:
    """Yield the chart of the mean reward, with a band of one standard deviation."""
    note = "mean over the step's responses; the band is one standard deviation"
    for chart in Curves("Reward", note, "reward/mean").charts(rows, names):
        band = [row for row in rows if row.get("reward/std") is not None and row.get("reward/mean") is not None]
        at, half = spread_indices(len(band), BARS), half_width(len(band))
        means = smoothed([row["reward/mean"] for row in band], at, half)
        widths = smoothed([row["reward/std"] for row in band], at, half)
        steps = [band[index]["step"] for index in at]
        # The lower bound forwards, then the upper bound backwards: one closed, filled outline.
        low = [short(mean - width) for mean, width in zip(means, widths, strict=True)]
        high = [short(mean + width) for mean, width in zip(means, widths, strict=True)]
        style = {"fill": "toself", "fillcolor": "rgba(79,131,224,0.16)", "line": {"width": 0}, "mode": "lines"}
        if band:
            outline = {"x": steps + steps[::-1], "y": low + high[::-1]}
            chart.figure.add_scatter(**outline, hoverinfo="skip", showlegend=False, **style)
        yield chart


def _who_worked(rows: Sequence[Row], names: Sequence[str]) -> Iterator[Chart]:
    """Yield a chart of the seconds of each step: the upper lane shows the parts of the loop, the lower lane what the
    engines did.

    Only sums are measured. The parts of a step are therefore stacked in the order of the loop, not by the time at which
    they began.
    """
    known = [f"time/{part}" for part in PARTS]
    further = [name for name in names if name.startswith("time/") and name not in (*known, "time/step")]
    parts = [part for part in [*known, *further] if any(row.get(part) for row in rows)]
    timed = [row for row in rows if any(row.get(part) for part in parts)]
    if not timed:
        return
    figure, colours = blank(), iter(PALETTE[1:] * len(parts))  # the first colour is that of the engines
    for part in parts:
        waits = part == "time/rollout"
        label = WAITING if waits else part.removeprefix("time/").replace("_", " ")
        _add_bars(figure, timed, label, [row.get(part) or 0.0 for row in timed], IDLE if waits else next(colours))
    total = [row.get("time/step") or 0.0 for row in timed]
    sums = [sum(row.get(part) or 0.0 for part in parts) for row in timed]
    other = [max(0.0, seconds - known) for seconds, known in zip(total, sums, strict=True)]
    if any(seconds > 0.01 for seconds in other):
        _add_bars(figure, timed, "other", other, OTHER)
    figure.update_layout(barmode="stack", bargap=0, showlegend=True, legend_traceorder="normal")
    measured = any(row.get("engine/idle_fraction") is not None for row in timed)
    if measured:
        shares = [1.0 if row.get("engine/idle_fraction") is None else row["engine/idle_fraction"] for row in timed]
        idle = [share * seconds for share, seconds in zip(shares, total, strict=True)]
        working = [seconds - rest for seconds, rest in zip(total, idle, strict=True)]
        _add_bars(figure, timed, "engines generate", working, PALETTE[0], "y2")
        _add_bars(figure, timed, "engines are idle", idle, IDLE, "y2")
        lane = {**VERTICAL, "domain": [0, 0.48], "matches": "y", "title": {"text": "engines, s"}}
        upper = {"domain": [0.52, 1], "title": {"text": "loop, s"}}
        figure.update_layout(height=TALL, xaxis={"anchor": "y2"}, yaxis=upper, yaxis2=lane)
    note = "seconds of a step: the loop by part, and the engines" if measured else "seconds of a step by part"
    if len(timed) > BARS:
        note += f"; means of {round(len(timed) / BARS)} steps"
    yield Chart("Who worked when", note, figure, tall=measured)


def _add_bars(
    figure: go.Figure, rows: Sequence[Row], name: str, seconds: list[float], colour: str, axis: str = "y"
) -> None:
    steps, widths, means = bucket_means([row["step"] for row in rows], seconds, BARS)
    style = {"name": name, "yaxis": axis, "marker": {"color": colour, "line": {"width": 0}}}
    figure.add_bar(x=steps, y=[short(mean) for mean in means], width=widths, **style)


SHARE_OF_PROMPTS = "share of held-out prompts solved"
SECTIONS: Mapping[str, Sequence[Curves | Callable[[Sequence[Row], Sequence[str]], Iterator[Chart]]]] = {
    "Learning": [
        _reward,
        Curves("Reward by domain", "mean", {r"\1": "reward/(.+)/mean"}),
        Curves("Validation", SHARE_OF_PROMPTS, {r"\1": "val/(.+/(?:pass|maj)@.+)"}, markers=True),
        Curves(r"\1", "validation", "val/((?!.*/(?:pass|maj)@).+)", markers=True),
        Curves("Loss", "cross-entropy of the responses' tokens, nats", "sft/loss"),
        Curves("Loss", "preference loss", "dpo/loss"),
        Curves("Accuracy", "share of pairs whose chosen response has the higher implicit reward", "dpo/accuracy"),
        Curves("Reward margin", "chosen minus rejected", "dpo/reward_margin"),
        Curves("Loss", "loss of the scores", "reward_model/loss"),
        Curves("Accuracy", "share of pairs whose chosen response scores higher", "reward_model/accuracy"),
        Curves("Divergence", "of the student from the teacher, nats per token", "distill/divergence"),
    ],
    "Responses": [
        Curves("Response length", "mean, tokens", "response/length_mean"),
        Curves("Truncated responses", "share that reached the length limit", "response/truncated_fraction", SHARES),
    ],
    "Difficulty of prompts": [
        Curves(
            "Solve rate",
            "mean over the measured prompts of the share of responses that passed",
            "curriculum/solve_rate",
        ),
        Curves(
            "Pools",
            "share of all prompts",
            {
                "unseen": "curriculum/unseen_fraction",
                "hard": "curriculum/hard_fraction",
                "learnable": "curriculum/learnable_fraction",
                "solved": "curriculum/solved_fraction",
            },
            SHARES,
        ),
        Curves(
            "Draws",
            "share of the step's draws by pool",
            {
                "unseen": "curriculum/drawn_unseen",
                "hard": "curriculum/drawn_hard",
                "learnable": "curriculum/drawn_learnable",
                "solved": "curriculum/drawn_solved",
            },
            SHARES,
        ),
        Curves(
            "Changes of pool",
            "prompts that became easier or harder in the step",
            {"promoted": "curriculum/promoted", "demoted": "curriculum/demoted"},
            COUNTS,
        ),
        Curves(
            "Replay of rare successes",
            "groups that were replayed in the step, and groups in the buffer",
            {"replayed": "curriculum/replayed", "buffered": "curriculum/buffered"},
            COUNTS,
        ),
    ],
    "Episodes": [
        Curves("Turns", "mean per episode", "episode/turns_mean"),
        Curves(
            "Ends of episodes", "share of episodes by stop reason", {r"\1": "episode/(.+)_fraction"}, is_optional=True
        ),
        Curves("Tools", "mean per episode", {"calls": "episode/tool_calls", "errors": "episode/tool_errors"}),
        Curves("Environment", "mean seconds per episode", "episode/environment_seconds"),
        Curves("Environment metrics", "mean over episodes", {r"\1": "environment/(.+)"}),
    ],
    "Policy": [
        Curves("Policy loss", "", "policy/loss"),
        Curves("KL to the reference", "nats per token", "policy/kl_ref"),
        Curves("Entropy", "nats per token", "policy/entropy"),
        Curves("Clip fraction", "share of tokens whose ratio was clipped", "policy/clip_fraction"),
        Curves("Gradient norm", "before clipping", "policy/grad_norm"),
        Curves("Learning rate", "", "policy/lr"),
    ],
    "Critic": [
        Curves("Critic loss", "half the squared error", "critic/loss"),
        Curves(
            "Explained variance",
            "share of the returns' variance that the values explain",
            "critic/explained_variance",
        ),
        Curves(
            "Values and returns",
            "means over the response tokens",
            {"value": "critic/value_mean", "return": "critic/return_mean"},
        ),
        Curves("Critic's gradient norm", "before clipping", "critic/grad_norm"),
    ],
    "Trainer against engine": [
        Curves(
            "Mismatch",
            "nats, on the same tokens; the axis is logarithmic and shows values above 0",
            {
                "|Δ log-prob|, mean": "mismatch/logprob_abs_diff_mean",
                "KL": "mismatch/kl",
                "KL, spanning updates": "mismatch/spanning/kl",
            },
            LOGARITHMIC,
        ),
        Curves(
            "Staleness",
            "policy versions between sampling and training",
            {"mean": "staleness/mean", "min": "staleness/min", "max": "staleness/max"},
            FROM_ZERO,
        ),
    ],
    "Speed and memory": [
        _who_worked,
        Curves("Tokens per second", "prompts and responses, all devices", "throughput/tokens_per_second", COUNTS),
        Curves("Tokens per second and device", "", "throughput/tokens_per_second_per_device", COUNTS),
        Curves("MFU", "share of the GPUs' dense bf16 peak that updates reach", "throughput/mfu", SHARES),
        Curves("Peak memory", "GiB by role", {r"\1": "memory/(.+)/peak_bytes"}, FROM_ZERO, unit=GIB),
    ],
    "Engines": [
        Curves("KV cache", "largest share in use, of any engine", "engine/kv_cache_use", SHARES),
        Curves(
            "Requests",
            "mean numbers of running and waiting requests of an engine",
            {"running": "engine/running", "waiting for room": "engine/waiting"},
            COUNTS,
        ),
        Curves(
            "Tokens of a step",
            "all engines",
            {
                "sampled": "engine/generated_tokens",
                "prefilled": "engine/prefilled_tokens",
                "discarded": "sampling/dropped_tokens",
            },
            COUNTS,
        ),
        Curves(
            "Speculative decoding",
            "tokens of a step, all engines",
            {"proposed": "engine/proposed_tokens", "accepted": "engine/accepted_tokens"},
            COUNTS,
            is_optional=True,
        ),
        Curves("Preemptions", "requests that lost their KV cache", "engine/preemptions", COUNTS, is_optional=True),
        Curves(
            "Tokens in flight",
            "at the end of the step, all engines",
            "engine/tokens_in_flight",
            COUNTS,
            is_optional=True,
        ),
    ],
}
"""The charts of a report, by the title of their section."""


def blank() -> go.Figure:
    """Return an empty figure whose horizontal axis is the step."""
    figure = go.Figure()
    figure.update_layout(
        template={},
        height=240,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        hovermode="x unified",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        xaxis={
            "automargin": True,
            "showgrid": False,
            "zeroline": False,
            "title": {"text": "step", "standoff": 6, "font": {"size": 12}},
        },
        yaxis=VERTICAL,
    )
    return figure


def add_curve(
    figure: go.Figure,
    name: str,
    steps: Sequence[int],
    values: Sequence[float],
    label: str,
    number: int,
    markers: bool = False,
    buckets: int = BUCKETS,
) -> None:
    """Add the curve of the metric `name` to a figure. A long series becomes a smoothed curve in front of its faint
    unsmoothed values.

    Args:
        number: index of the line in its figure, from 0; determines colour and dash style.
        markers: whether points are drawn with markers and are not smoothed, for sparse measurements.
        buckets: number of buckets of the unsmoothed values.
    """
    half = 0 if markers or name in EXACT or min(values) == max(values) else half_width(len(values))
    colour, dash = PALETTE[number % len(PALETTE)], DASHES[number // len(PALETTE) % len(DASHES)]
    raw = extremes(values, buckets)
    raw_x, raw_y = [steps[index] for index in raw], [short(values[index]) for index in raw]
    line = {"color": colour, "width": 2, "dash": dash}
    if not half:
        mode = "lines+markers" if markers or len(raw) < SHORTEST_LINE else "lines"
        figure.add_scatter(x=raw_x, y=raw_y, name=label, mode=mode, line=line, marker={"size": 6})
        return
    faint = {"opacity": FAINT, "line": {"color": colour, "width": 1}, "hoverinfo": "skip", "showlegend": False}
    figure.add_scatter(x=raw_x, y=raw_y, name=f"{label}, raw", mode="lines", legendgroup=label, **faint)
    at = spread_indices(len(values), min(SMOOTHED_POINTS, 2 * buckets))
    means = [short(value) for value in smoothed(values, at, half)]
    x = [steps[index] for index in at]
    figure.add_scatter(x=x, y=means, name=label, line=line, mode="lines", legendgroup=label)


def extremes(values: Sequence[float], buckets: int = BUCKETS) -> list[int]:
    """Return the indices of at most 2 * buckets + 2 points that show the range of a series, in order.

    They are the first and the last point, and the minimum and the maximum of each bucket of consecutive points. A
    series of at most that many points is not reduced.
    """
    if len(values) <= 2 * buckets + 2:
        return list(range(len(values)))
    edges = np.linspace(0, len(values), buckets + 1).astype(int)
    series = np.asarray(values, dtype=float)
    found = {0, len(values) - 1}
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        bucket = series[start:end]
        found |= {int(start + bucket.argmin()), int(start + bucket.argmax())}
    return sorted(found)


def spread_indices(count: int, most: int) -> list[int]:
    """Return the indices of at most `most` of `count` points, evenly spread, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({int(index) for index in np.linspace(0, count - 1, most).round()})


def smoothed(values: Sequence[float], at: Sequence[int], half: int) -> list[float]:
    """Return, for each index in `at`, the mean of the values at most `half` places away, fewer at the ends."""
    series = np.asarray(values, dtype=float)
    return [float(series[max(0, index - half) : index + half + 1].mean()) for index in at]


def half_width(count: int) -> int:
    """Return the half width of the smoothing window for `count` points; 0 for too few to smooth."""
    return count // SHARE if count >= SMOOTHED_FROM else 0


def short(value: float) -> float:
    """Round to six significant digits, more than a screen shows."""
    return float(f"{value:.6g}")


def bucket_means(
    steps: Sequence[int], values: Sequence[float], most: int
) -> tuple[list[float], list[int], list[float]]:
    """Return at most `most` bars for a series: their centres and widths in steps, and the mean value of each."""
    if len(values) <= most:
        return [float(step) for step in steps], [1] * len(steps), list(values)
    edges = np.linspace(0, len(values), most + 1).astype(int).tolist()
    pairs = list(zip(edges[:-1], edges[1:], strict=True))
    series = np.asarray(values, dtype=float)
    centres = [(steps[start] + steps[end - 1]) / 2 for start, end in pairs]
    widths = [steps[end - 1] - steps[start] + 1 for start, end in pairs]
    return centres, widths, [float(series[start:end].mean()) for start, end in pairs]
