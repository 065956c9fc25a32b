"""Derives figures from measurements: ratios, MFU, throughput, and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.work import parameters
from roll.models.flops import TrainingFlops

PEAK = 790e12
"""Measured FLOP/s of an H200 for a bf16 product of two 8192 x 8192 matrices. MFU is relative to this value."""
PARTS = {"rollout": "generate", "log_probs": "forward", "reference": "forward", "train": "train", "weight_sync": "copy"}
"""Name of the floor with which each part of a step is compared."""
SUMMED = ("rollout", "log_probs", "reference", "train")
"""Parts whose floors add up to the floor of a step."""


def medians(figures: dict[str, list[float]]) -> dict[str, float]:
    """Return the median of each figure's repetitions."""
    return {name: statistics.median(seconds) for name, seconds in figures.items()}


def mfu(shape: Mapping[str, Any], adapter: bool, tokens: int, seconds: float, devices: int) -> float:
    """Return the model FLOPs utilisation of training on `tokens` tokens in `seconds` seconds.

    FLOPs are those of `TrainingFlops` without attention. With an adapter, only the frozen weights beneath it are
    counted.
    """
    count = parameters(dict(shape))
    return TrainingFlops(count, trained=0 if adapter else count).of([tokens]) / (seconds * PEAK * devices)


@dataclass(frozen=True)
class Result:
    """The measurements of a step and its floors: the times of the same parts without roll (see floors.py)."""

    work: dict[str, Any]
    """The fields of a `Work`."""
    versions: dict[str, str]
    lines: list[dict[str, Any]]
    """The metrics of every step."""
    floors: dict[str, float]
    """Seconds of each floor."""
    warm_up: int
    """Number of initial steps that are not counted."""

    @property
    def metrics(self) -> dict[str, float]:
        """Return the median of each metric over the counted steps."""
        counted = self.lines[self.warm_up :]
        names = {name for line in counted for name in line}
        return {
            name: statistics.median(line[name] for line in counted if line.get(name) is not None)
            for name in sorted(names)
        }

    @property
    def step(self) -> dict[str, float]:
        """Return the seconds of the step and of its parts."""
        return {name.removeprefix("time/"): value for name, value in self.metrics.items() if name.startswith("time/")}

    def floor(self, part: str) -> float | None:
        """Return the seconds of a part's floor. None if it was not measured."""
        name = PARTS[part]
        if part == "log_probs" and self.work["lora_rank"]:
            name = "forward_adapter"
        disjoint = not set(self.work["devices"]) & set(self.work["infer_devices"])
        if part == "weight_sync" and self.work["devices"] and disjoint:
            name = "copy_peer"
        return self.floors.get(name)

    @property
    def floor_of_step(self) -> float | None:
        """Return the sum of the floors of the step's parts. None if one was not measured."""
        needed = [self.floor(part) for part in SUMMED if part in self.step]
        return None if None in needed else sum(floor for floor in needed if floor is not None)

    @property
    def ratio(self) -> float | None:
        """Return the ratio of the step to the sum of its floors. None if a floor was not measured."""
        return self.step["step"] / self.floor_of_step if self.floor_of_step else None

    @property
    def tokens(self) -> int:
        """Return the number of prompt and response tokens of a step."""
        return self.work["prompts"] * self.work["samples"] * (self.work["prompt_tokens"] + self.work["response_tokens"])

    def mfu(self, seconds: float) -> float:
        """Return the model FLOPs utilisation of training in `seconds` seconds."""
        return mfu(
            self.work["shape"], self.work["lora_rank"] > 0, self.tokens, seconds, max(1, len(self.work["devices"]))
        )

    @property
    def figures(self) -> dict[str, float]:
        """Return further figures by name."""
        metrics = self.metrics
        said = {
            name: value
            for name, value in metrics.items()
            if name.startswith(("throughput/", "engine/", "mismatch/", "memory/"))
        }
        said["mismatch/logprob_abs_diff_mean/worst"] = max(
            line.get("mismatch/logprob_abs_diff_mean", 0.0) for line in self.lines
        )
        if self.work["devices"]:
            said["train/mfu"] = self.mfu(self.step["train"])
            if "train" in self.floors:
                said["train/mfu_of_the_floor"] = self.mfu(self.floors["train"])
        return said

    def summary(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        measured = {"step": self.step, "floors": self.floors, "ratio": self.ratio, "figures": self.figures}
        return {"work": self.work, "versions": self.versions, **measured, "lines": self.lines}


def show(result: Result) -> None:
    """Print one table of the parts and their floors, and one of the other figures."""
    work, console = result.work, Console(width=90)
    size = f"{work['prompts']} prompts x {work['samples']} samples x {work['response_tokens']} tokens"
    table = Table(title=f"{size}, seconds")
    for column in ("part", "in the step", "floor", "ratio"):
        table.add_column(column, justify="left" if column == "part" else "right")
    others = [part for part in result.step if part not in (*PARTS, "step") and result.step[part] > 0.0005]
    for part in [part for part in PARTS if part in result.step] + others:
        table.add_row(*_row(part, result.step[part], result.floor(part) if part in PARTS else None))
    rest = result.step["step"] - sum(seconds for part, seconds in result.step.items() if part != "step")
    table.add_row(*_row("between the parts", rest, None))
    table.add_section()
    table.add_row(*_row("step", result.step["step"], result.floor_of_step))
    console.print(table)
    beside = Table(show_header=False)
    unused = {f"floor {name}": f"{seconds:.3f} s" for name, seconds in result.floors.items()}
    for name, value in (unused | {name: _readable(name, value) for name, value in result.figures.items()}).items():
        beside.add_row(name, value)
    console.print(beside)


def _row(part: str, seconds: float, floor: float | None) -> tuple[str, str, str, str]:
    return part, f"{seconds:.3f}", f"{floor:.3f}" if floor else "-", f"{seconds / floor:.2f}" if floor else "-"


def _readable(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return f"{value / (1 << 30):.2f} GiB"
    if name.startswith(("train/mfu", "throughput/mfu")):
        return f"{100 * value:.1f}%"
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"
