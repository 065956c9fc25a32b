"""Shows the progress of a run: a live view in a terminal, or one plain line per step elsewhere."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from roll.tracking.base import LOSSES, Tracker
from roll.tracking.life import ActivityDisplay
from roll.types import NO_VERDICT, Metrics, RolloutGroup

LOG = logging.getLogger(__name__)
BLOCKS = "▁▂▃▄▅▆▇█"
BAR = 20
"""Width of the progress bar and of the sparkline, in characters. All lines fit into 80 columns."""
STEPS_OF_ETA = 10
"""Number of recent steps from which the ETA is computed."""
FEWEST_OF_ETA = 2
"""Smallest number of timed steps for an ETA."""
SHORT = {"weight_sync": "sync", "evaluate": "eval", "checkpoint": "save"}
"""Short names of the parts of a step."""


@dataclass(frozen=True)
class ConsoleProgress:
    """The state of a run that the console shows."""

    max_steps: int
    step: int = 0
    metrics: Mapping[str, float] | None = None
    """Metrics of the last step."""
    headline: str = "reward"
    """Name of the main metric: `reward` or `loss`."""
    headlines: tuple[float, ...] = ()
    """Value of the main metric at every step."""
    validation: Mapping[str, str] | None = None
    """Latest validation result of each held-out set, as text."""
    measure: str = ""
    """Name of the validation result: `pass@1`, `avg@n` or `loss`."""
    validated_at: int = 0
    """Step of the latest validation."""
    step_seconds: tuple[float, ...] = ()
    """Durations of the last few steps. The first step is left out because it includes compilation."""
    timed: int = 0
    """Number of steps with a known duration."""

    def after(self, step: int, metrics: Metrics) -> ConsoleProgress:
        """Return the progress after `step`, which had these `metrics`."""
        losses = [metrics[name] for name in LOSSES if name in metrics]
        name, value = ("loss", losses[0]) if losses else ("reward", metrics.get("reward/mean"))
        measure, validation = _validation(metrics)
        # Step 0 is the state before the first step.
        seconds = [metrics["time/step"]] if step and "time/step" in metrics else []
        return replace(
            self,
            step=step,
            metrics=metrics,
            headline=self.headline if value is None else name,
            headlines=self.headlines if value is None else (*self.headlines, value),
            validation=validation or self.validation,
            measure=measure or self.measure,
            validated_at=step if validation else self.validated_at,
            timed=self.timed + len(seconds),
            step_seconds=(*self.step_seconds, *(seconds if self.timed else []))[-STEPS_OF_ETA:],
        )

    @property
    def eta_seconds(self) -> float | None:
        """Return the seconds until the end of the last step at the recent pace; None if too few steps are timed."""
        if len(self.step_seconds) < FEWEST_OF_ETA:
            return None
        return sum(self.step_seconds) / len(self.step_seconds) * (self.max_steps - self.step)


def console_tracker(title: str, max_steps: int, life: ActivityDisplay) -> Tracker:
    """Return a live view if stdout is a terminal, or else plain lines. `life` shows stages until the first step."""
    return LiveConsole(title, max_steps, life) if sys.stdout.isatty() else PlainConsole(max_steps, life)


class PlainConsole:
    """Prints one line per step to stdout."""

    name = "console"

    def __init__(self, max_steps: int, life: ActivityDisplay) -> None:
        self._progress, self._life = ConsoleProgress(max_steps), life

    def log(self, step: int, metrics: Metrics) -> None:
        self._progress = self._progress.after(step, metrics)
        if step:
            self._life.rest()
        print(plain_line(self._progress), flush=True)

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        pass

    def close(self) -> None:
        pass


class StepLog:
    """Writes one line per step to the driver's log."""

    name = "log"

    def __init__(self, max_steps: int) -> None:
        self._progress = ConsoleProgress(max_steps)

    def log(self, step: int, metrics: Metrics) -> None:
        self._progress = self._progress.after(step, metrics)
        LOG.info("%s", plain_line(self._progress))

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        pass

    def close(self) -> None:
        pass


class LiveConsole:
    """Shows a few lines at the bottom of the terminal. Other output scrolls above them."""

    name = "console"

    def __init__(self, title: str, max_steps: int, life: ActivityDisplay, console: Console | None = None) -> None:
        """The view replaces the panel of `life` at the first metrics, and shows its rows below its own lines."""
        self._title, self._life = title, life
        self._progress = ConsoleProgress(max_steps)
        self._logged_at = time.monotonic()
        self._live = Live(get_renderable=self._view, console=console or Console(), refresh_per_second=2)

    def log(self, step: int, metrics: Metrics) -> None:
        self._progress = self._progress.after(step, metrics)
        self._logged_at = time.monotonic()
        if self._live.is_started:
            self._live.refresh()
        else:
            self._life.rest()
            self._live.start(refresh=True)

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        pass

    def close(self) -> None:
        """Leave the last state on the screen, without the roles' stages, and release cursor and streams."""
        self._life.show([])
        self._live.stop()

    def _view(self) -> RenderableType:
        return Group(live_view(self._title, self._progress, time.monotonic() - self._logged_at), self._life.rows())


def plain_line(progress: ConsoleProgress) -> str:
    """Return a line: `step 12/100  reward 0.61  val pass@1 0.55  2.3 s (rollout 1.2, train 0.8, sync 0.1)  1,234 tok/s
    eta 3m20s`.
    """
    metrics = progress.metrics or {}
    fields = [f"step {progress.step}/{progress.max_steps}"]
    if "epoch" in metrics:
        fields.append(f"epoch {metrics['epoch']:.2f}")
    if progress.headlines or _is_unscored(metrics):
        fields.append(_headline(progress))
    if progress.validation and progress.validated_at == progress.step:
        fields.append(" ".join(filter(None, ("val", progress.measure, _sets(progress.validation)))))
    if "time/step" in metrics:
        split = ", ".join(f"{part} {seconds:.1f}" for part, seconds in time_split(metrics).items())
        fields.append(f"{metrics['time/step']:.1f} s" + (f" ({split})" if split else ""))
    if (rate := metrics.get("throughput/tokens_per_second")) is not None:
        fields.append(f"{rate:,.0f} tok/s")
    if progress.eta_seconds is not None and progress.step < progress.max_steps:
        fields.append(f"eta {duration(progress.eta_seconds)}")
    return "  ".join(fields)


def live_view(title: str, progress: ConsoleProgress, seconds_since: float) -> RenderableType:
    """Return lines with the progress, the main metric and the speed, `seconds_since` the last metrics."""
    metrics = progress.metrics or {}
    first = Table.grid(padding=(0, 1))
    eta = "" if progress.eta_seconds is None else f"eta {duration(max(0.0, progress.eta_seconds - seconds_since))}"
    bar = ProgressBar(total=progress.max_steps, completed=progress.step, width=BAR)
    name = Text(title, style="bold", no_wrap=True, overflow="ellipsis")
    first.add_row(name, bar, f"step {progress.step}/{progress.max_steps}", Text(eta, style="dim"))
    name, _, value = _headline(progress).partition(" ")
    second = Text(f"{name} ", no_wrap=True, overflow="ellipsis")
    second.append(value, style="bold green")
    second.append(f"  {sparkline(progress.headlines, BAR)}", style="green")
    if progress.validation:
        second.append(f"   {' '.join(filter(None, ('val', progress.measure)))} ").append(
            _sets(progress.validation), style="bold cyan"
        )
        second.append(f" (step {progress.validated_at})", style="dim")
    third = Text(f"this step {duration(seconds_since)}", style="dim", no_wrap=True, overflow="ellipsis")
    if "time/step" in metrics:
        third.append(f"   last {metrics['time/step']:.1f} s")
    if (rate := metrics.get("throughput/tokens_per_second")) is not None:
        third.append(f"   {rate:,.0f} tok/s")
    split = " · ".join(f"{part} {seconds:.1f}" for part, seconds in time_split(metrics).items())
    fourth = [Text(f"last step: {split}", style="dim", no_wrap=True, overflow="ellipsis")] if split else []
    return Group(first, second, third, *fourth)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a sparkline of at most `width` characters. Each character shows the mean of some consecutive `values`."""
    finite = [value for value in values if math.isfinite(value)]
    size = math.ceil(len(finite) / width) or 1
    means = [sum(part) / len(part) for part in (finite[start : start + size] for start in range(0, len(finite), size))]
    if not means:
        return ""
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def time_split(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each part of the step, by the part's short name. Parts that round to 0.0 s are left out."""
    parts = {
        name.removeprefix("time/"): seconds
        for name, seconds in metrics.items()
        if name.startswith("time/") and name != "time/step"
    }
    return {SHORT.get(part, part): seconds for part, seconds in parts.items() if seconds >= 0.05}


def duration(seconds: float) -> str:
    """Return a duration as `42s`, `3m20s` or `5h07m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _is_unscored(metrics: Mapping[str, float]) -> bool:
    """Whether no response of the step has a reward."""
    return "reward/scored_fraction" in metrics and "reward/mean" not in metrics


def _headline(progress: ConsoleProgress) -> str:
    """Return the last step's main metric and the shares of responses without verdict: `reward 0.61 (4% crashed)`."""
    metrics = progress.metrics or {}
    shares = {
        one.value.replace("_", " "): metrics.get(f"reward/{one.value}_fraction", 0.0) for one in sorted(NO_VERDICT)
    }
    without = ", ".join(f"{_percent(share)} {outcome}" for outcome, share in shares.items() if share)
    value = "none" if _is_unscored(metrics) else _number(progress.headlines[-1]) if progress.headlines else "…"
    return f"{progress.headline} {value}" + (f" ({without})" if without else "")


def _percent(share: float) -> str:
    return "<1%" if share < 0.01 else f"{share:.0%}"


def _validation(metrics: Metrics) -> tuple[str, dict[str, str]]:
    """Return `pass@1`, `avg@n` or `loss`, with its value for each held-out set. Return "" and no values if `metrics`
    has none of them.

    A set without an accuracy shows its `avg@n`, and says so if other sets have an accuracy. A value says which share of
    the responses got no verdict, and is `none` if that is all of them.
    """
    sets = headline_metrics(metrics)
    measure = (
        "pass@1"
        if any(name.endswith("/pass@1") for name in sets)
        else next((name.rpartition("/")[2] for name in sets), "")
    )
    said = {}
    for name in sets:
        held_out, _, own = name.removeprefix("val/").rpartition("/")
        failed = metrics.get(f"val/{held_out}/no_verdict_fraction", 0.0)
        said[held_out if own == measure else f"{held_out} {own}"] = _number(metrics[name]) + _not_scored(failed)
    for name, failed in metrics.items():
        if name.startswith("val/") and name.endswith("/no_verdict_fraction") and failed == 1:
            said[name.removeprefix("val/").rpartition("/")[0]] = f"none{_not_scored(failed)}"
    return measure, said


def _not_scored(share: float) -> str:
    return f" ({_percent(share)} not scored)" if share else ""


def headline_metrics(names: Iterable[str]) -> list[str]:
    """Return the names that state the result of each held-out set: `val/<set>/pass@1` or `loss`, or else `avg@n`."""
    named = [name for name in names if name.startswith("val/")]
    first = [name for name in named if name.endswith(("/pass@1", "/loss"))]
    stated = {name.rpartition("/")[0] for name in first}
    means = [
        name for name in named if name.rpartition("/")[2].startswith("avg@") and name.rpartition("/")[0] not in stated
    ]
    return [name for name in named if name in {*first, *means}]


def _sets(validation: Mapping[str, str]) -> str:
    if len(validation) == 1:
        return next(iter(validation.values()))
    return ", ".join(f"{name} {value}" for name, value in validation.items())


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"
