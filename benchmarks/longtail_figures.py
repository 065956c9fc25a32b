"""Derives figures, ratios and tables from the metrics of runs with long-tailed lengths."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.work import LongTailWork

WARM_UP = 3
"""Number of initial steps that are not counted: kernels compile, memory settles, and groups in flight reach their usual
ages.
"""
ENGINE = ("running", "idle_fraction", "prefilled_tokens", "preemptions")
"""Engine metrics of a run, if it reports them: running sequences, idle share, prefilled tokens and preemptions."""
SATURATED = "saturated"
TARGETS = {("step", "partial"): 0.85, ("rollout", "partial"): 1.2, ("slower_side", "asynchronous"): 1.1}
"""Targets: the largest value of a ratio that is good enough, by (name in RATIOS, variant). They are shown, not
enforced.
"""
RATIOS = {
    "step": "step to the synchronous step",
    "token": "the same per sampled token",
    "rollout": "wait for the rollout to the engines alone",
    "slower_side": "step to the slower of trainer alone and engines alone",
}


@dataclass(frozen=True)
class Saturated:
    """Figures of one saturated engine, by measured interval."""

    seconds: list[float]
    tokens: list[float]
    ended: list[float]
    """Number of responses that ended."""

    @property
    def tokens_per_second(self) -> float:
        """Return the median tokens/s of the intervals."""
        return statistics.median(self._speeds)

    @property
    def spread(self) -> float:
        """Return the largest minus the smallest tokens/s of the intervals, relative to the median."""
        return (max(self._speeds) - min(self._speeds)) / self.tokens_per_second

    @property
    def length(self) -> float | None:
        """Return the tokens per ended response, which is the mean length in a steady state. None if no response
        ended.
        """
        return sum(self.tokens) / sum(self.ended) if sum(self.ended) else None

    @property
    def _speeds(self) -> list[float]:
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]


@dataclass(frozen=True)
class Run:
    """Figures of a run, without its warm-up steps."""

    sequences: int
    """Number of responses per step."""
    engines: int
    in_flight: int
    """Largest number of unfinished responses at a weight sync."""
    lines: list[dict[str, Any]]
    """The metrics of every step."""

    def values(self, name: str) -> list[float]:
        """Return a metric of each counted step. Empty if the run does not report it."""
        return [line[name] for line in self.lines[WARM_UP:] if line.get(name) is not None]

    def median(self, name: str) -> float | None:
        """Return the median of a metric. None if the run does not report it."""
        return statistics.median(values) if (values := self.values(name)) else None

    def most(self, name: str) -> float | None:
        """Return the largest value of a metric. None if the run does not report it."""
        return max(self.values(name), default=None)

    @property
    def step(self) -> float:
        """Return the median duration of a step, in seconds."""
        return statistics.median(self.values("time/step"))

    @property
    def rollout(self) -> float:
        """Return the median time that a step waits for its groups, in seconds."""
        return statistics.median(self.values("time/rollout"))

    @property
    def spread(self) -> float:
        """Return the longest minus the shortest step, relative to the median."""
        steps = self.values("time/step")
        return (max(steps) - min(steps)) / self.step

    @property
    def trainer(self) -> float:
        """Return the median duration of a step without its rollout, in seconds."""
        steps = zip(self.values("time/step"), self.values("time/rollout"), strict=True)
        return statistics.median(step - rollout for step, rollout in steps)

    @property
    def length(self) -> float:
        """Return the mean number of tokens per response."""
        return statistics.mean(self.values("response/length_mean"))

    @property
    def tokens(self) -> float:
        """Return the mean number of sampled tokens of a step."""
        return self.sequences * self.length

    @property
    def tokens_per_second(self) -> float:
        """Return the sampled tokens of all counted steps divided by their seconds."""
        steps = self.values("time/step")
        return self.tokens * len(steps) / sum(steps)

    def figures(self) -> dict[str, float | None]:
        """Return all figures by name."""
        parts = ("reference", "log_probs", "train", "onload", "weight_sync")
        return {
            "steps": float(len(self.values("time/step"))),
            "step": self.step,
            "spread": self.spread,
            "rollout": self.rollout,
            **{part: self.median(f"time/{part}") for part in parts},
            "weight_sync_most": self.most("time/weight_sync"),
            "in_flight_at_sync": float(self.in_flight),
            "trainer": self.trainer,
            "tokens_per_second": self.tokens_per_second,
            "length": self.length,
            "truncated_fraction": statistics.mean(self.values("response/truncated_fraction")),
            "staleness_mean": self.median("staleness/mean"),
            "staleness_most": self.most("staleness/max"),
            **{name: self.median(f"engine/{name}") for name in ENGINE},
        }


@dataclass(frozen=True)
class Comparison:
    """The variants measured so far."""

    work: LongTailWork
    settings: dict[str, Any]
    """The ratio, the window, and the keys of the command line."""
    versions: dict[str, str]
    saturated: Saturated | None = None
    runs: Mapping[str, Run] = field(default_factory=dict)
    """Runs by variant."""

    def alone(self, run: Run) -> float | None:
        """Return the seconds that the run's engines would need for a step's tokens if they were saturated."""
        return run.tokens / (self.saturated.tokens_per_second * run.engines) if self.saturated else None

    def ratios(self, variant: str) -> dict[str, float]:
        """Return the value of each of the `RATIOS` whose measurements exist, by name."""
        run, synchronous, found = self.runs[variant], self.runs.get("synchronous"), {}
        alone = self.alone(run)
        if synchronous and run is not synchronous:
            found |= {
                "step": run.step / synchronous.step,
                "token": synchronous.tokens_per_second / run.tokens_per_second,
            }
        if alone:
            found["rollout"] = run.rollout / alone
        if alone and synchronous:
            found["slower_side"] = run.step / max(synchronous.trainer, alone)
        return found

    def summary(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        work, engine = self.work, self.saturated
        expected = {
            "mean": 1.0 / work.end_probability,
            "length": work.mean_length,
            "truncated_fraction": work.truncated_fraction,
        }
        bare = (
            {"tokens_per_second": engine.tokens_per_second, "spread": engine.spread, "length": engine.length}
            if engine
            else None
        )
        return {
            "work": asdict(work),
            "settings": self.settings,
            "versions": self.versions,
            "expected": expected | {"end_tokens": work.end_tokens},
            "saturated": bare and {**bare, "stretches": asdict(engine)},  # pyright: ignore[reportArgumentType]
            "variants": {
                name: {
                    "figures": run.figures(),
                    "alone": self.alone(run),
                    "ratios": self.ratios(name),
                    "lines": run.lines,
                }
                for name, run in self.runs.items()
            },
        }


ROWS: dict[str, tuple[str, Callable[[float], str]]] = {
    "steps": ("counted steps", "{:.0f}".format),
    "step": ("step, s", "{:.3f}".format),
    "spread": ("spread of the step", "{:.0%}".format),
    "rollout": ("wait for the rollout, s", "{:.3f}".format),
    "reference": ("reference, s", "{:.3f}".format),
    "log_probs": ("log-probs by the trainer, s", "{:.3f}".format),
    "train": ("train, s", "{:.3f}".format),
    "onload": ("moving roles, s", "{:.3f}".format),
    "weight_sync": ("weight sync, s", "{:.3f}".format),
    "weight_sync_most": ("longest weight sync, s", "{:.3f}".format),
    "in_flight_at_sync": ("responses in flight during it, at most", "{:.0f}".format),
    "trainer": ("step without its rollout, s", "{:.3f}".format),
    "alone": ("engines alone for its tokens, s", "{:.3f}".format),
    "tokens_per_second": ("sampled tokens/s", "{:,.0f}".format),
    "length": ("mean length, tokens", "{:,.0f}".format),
    "truncated_fraction": ("truncated", "{:.1%}".format),
    "staleness_mean": ("staleness, mean", "{:.2f}".format),
    "staleness_most": ("staleness, maximum", "{:.0f}".format),
    "running": ("running sequences, mean", "{:,.0f}".format),
    "idle_fraction": ("engines idle", "{:.0%}".format),
    "prefilled_tokens": ("prefilled tokens, with repetitions", "{:,.0f}".format),
    "preemptions": ("preemptions", "{:,.0f}".format),
}
"""Rows of the table, with label and format."""


def show(result: Comparison) -> None:
    """Print a table with a column for each variant."""
    work, settings = result.work, result.settings
    size = f"{work.prompts} prompts x {work.samples} samples of at most {work.response_tokens:,} tokens"
    expected = f"expected: {work.mean_length:,.0f} tokens, {work.truncated_fraction:.1%} truncated"
    ahead = f"ratio {settings['ratio']:g}, window {settings['window']}; medians of the steps after {WARM_UP}"
    columns: dict[str, dict[str, float | None]] = {}
    ratios: dict[str, dict[str, float]] = {}
    if engine := result.saturated:
        columns[SATURATED] = {
            "spread": engine.spread,
            "tokens_per_second": engine.tokens_per_second,
            "length": engine.length,
        }
        ratios[SATURATED] = {}
    for variant, run in result.runs.items():
        columns[variant], ratios[variant] = {**run.figures(), "alone": result.alone(run)}, result.ratios(variant)
    table = Table(title=f"{size}\n{expected}\n{ahead}")
    for name in ("", *columns):
        table.add_column(name, justify="right" if name else "left")
    for name, (label, written) in ROWS.items():
        cells = [figures.get(name) for figures in columns.values()]
        table.add_row(label, *("-" if value is None else written(value) for value in cells))
    table.add_section()
    for name, label in RATIOS.items():
        table.add_row(label, *(_ratio(ratios[variant].get(name), TARGETS.get((name, variant))) for variant in columns))
    Console(width=130).print(table)


def _ratio(value: float | None, target: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" + (f" (target: {target:g})" if target else "")
