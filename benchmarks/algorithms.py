"""Runs every recipe in examples/algorithms on the tiny task with the same number of samples over several seeds, and
prints a table.

    python benchmarks/algorithms.py [--recipes grpo rloo ...] [--seeds 3] [--steps 30] [--seconds N] [--write
        docs/algorithms.md]

All runs start from the same warmed-up policy and train on 512 responses per step. Runs are kept in `--folder`, and
completed ones are not repeated. With `--seconds N`, no run starts after N seconds: repeat the command until the table
is complete. `--write` also writes the table into the page, between the page's two marks.

The gain of a recipe has Student's 95% interval, its difference to `grpo` Welch's. Both know only the variation between
seeds: all runs start from the same policy. Among many recipes, some differences exclude 0 by chance.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks.intervals import Sample, difference_with_interval, mean_with_interval
from benchmarks.page import Place

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
ACCURACY = "val/heldout/pass@1"
BASE = "grpo"
"""The recipe that the others are compared with."""
PLACE = Place("<!-- table: benchmarks/algorithms.py -->", "<!-- end of the table -->")
QUIET = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}


@dataclass(frozen=True)
class Run:
    """Result of a finished run."""

    recipe: str
    seed: int
    start: float
    """Accuracy on the held-out problems before the first step, 0 to 1."""
    end: float
    seconds: float
    """Seconds of all steps, without the start of the roles."""


@dataclass(frozen=True)
class Outcome:
    """The runs of a recipe with different seeds: accuracies in percent, and the mean seconds of a run."""

    starts: Sample
    ends: Sample
    gains: Sample
    seconds: float


def main() -> int:
    """Run the remaining recipes, and print the table. Return 0, or the exit status of the failed command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", nargs="+", choices=recipes(), default=recipes(), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--folder", type=Path, default=Path("output/benchmark-algorithms"))
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    latest = time.monotonic() + options.seconds
    for command in preparation(options.folder):
        if status := subprocess.run([sys.executable, *command], env=QUIET, check=False).returncode:
            return status
    found: list[Run] = []
    for seed in range(options.seeds):
        for recipe in options.recipes:
            folder = options.folder / f"{recipe}-{options.steps}-{seed}"
            if finished(folder, options.steps) is None and time.monotonic() < latest:
                print(f"== {recipe}, seed {seed}", flush=True)
                command = [sys.executable, *arguments(recipe, seed, options.steps, folder, options.folder)]
                done = subprocess.run(
                    command, env=QUIET, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
                if done.returncode:
                    print(done.stdout, file=sys.stderr)
                    return done.returncode
            ends = finished(folder, options.steps)
            found += [] if ends is None else [Run(recipe, seed, *ends)]
    table = table_of(found, options.steps)
    print(table)
    if options.write:
        PLACE.write(options.write, table)
    return 0


def recipes() -> list[str]:
    """Return the names of the recipes with rewards. Recipes without rewards, such as those with a teacher, have no
    accuracy.
    """
    files = (EXAMPLES / "algorithms").glob("*.yaml")
    return sorted(
        file.stem
        for file in files
        if OmegaConf.select(OmegaConf.load(file), "rewards.arithmetic.reward") != "no_reward"
    )


def preparation(folder: Path) -> list[list[str]]:
    """Return the missing commands, as arguments of the interpreter, that create model, problems and warmed-up
    policy.
    """
    commands = []
    for script, name in (("make_model.py", "model"), ("make_problems.py", "problems")):
        if not (folder / name).exists():
            commands.append([str(EXAMPLES / "tiny" / script), str(folder / name)])
    if not (folder / "warm-up" / "export").exists():
        overrides = {
            "output_dir": folder / "warm-up",
            "pretrain": folder / "model",
            "sft_train.data_args.file_name": folder / "problems" / "train.jsonl",
            "track_with": "none",
        }
        commands.append(pipeline("tiny/tiny_warm_up", overrides))
    return commands


def arguments(recipe: str, seed: int, steps: int, folder: Path, world: Path) -> list[str]:
    """Return the arguments of the interpreter that run a recipe with a seed."""
    return pipeline(f"algorithms/{recipe}", tiny_keys(seed, steps, steps, folder, world))


def tiny_keys(seed: int, steps: int, eval_steps: int, folder: Path, world: Path) -> dict[str, object]:
    """Return the keys of a run on the tiny task, from the warmed-up policy in `world`."""
    return {
        "output_dir": folder,
        "pretrain": world / "warm-up" / "export",
        "seed": seed,
        "max_steps": steps,
        "eval_steps": eval_steps,
        "save_steps": 0,
        "track_with": "none",
        "weight_sync.lora": "merged",
        "actor_train.data_args.file_name": world / "problems" / "train.jsonl",
        "validation.data_args.file_name": world / "problems" / "heldout.jsonl",
    }


def pipeline(name: str, overrides: dict[str, object]) -> list[str]:
    """Return the arguments of the interpreter that run an experiment."""
    return ["-m", "roll.pipeline", "--config-name", name, *(f"{key}={value}" for key, value in overrides.items())]


def finished(folder: Path, steps: int) -> tuple[float, float, float] | None:
    """Return the accuracy before and after a run and its seconds, or None if the run is incomplete."""
    lines = whole_run(folder, steps)
    return (
        None
        if lines is None
        else (lines[0][ACCURACY], lines[-1][ACCURACY], sum(line["time/step"] for line in lines[1:]))
    )


def whole_run(folder: Path, steps: int) -> list[dict[str, Any]] | None:
    """Return the metrics of a run by step, or None if the run is incomplete."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return None
    lines = [
        json.loads(line) for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]
    return lines if lines and lines[-1]["step"] >= steps else None


def table_of(runs: Sequence[Run], steps: int) -> str:
    """Return a Markdown table with a row for each recipe, the highest mean first. ± is the sample standard deviation
    over the seeds.
    """
    by_recipe = {
        name: outcome([run for run in runs if run.recipe == name]) for name in sorted({run.recipe for run in runs})
    }
    head = (
        f"| recipe | before, ± sd | after {steps} steps, ± sd | gain [95% interval] | after, minus `{BASE}` [95% "
        f"interval] | seeds |"
    )
    lines = [f"{head} seconds per run |", "|---|---|---|---|---|---|---|"]
    base = by_recipe.get(BASE)
    for name, found in sorted(by_recipe.items(), key=lambda item: -item[1].ends.mean):
        against = "" if base is None or name == BASE else difference_with_interval(found.ends, base.ends)
        cells = [
            f"`{name}`",
            found.starts,
            found.ends,
            mean_with_interval(found.gains),
            against,
            found.ends.count,
            f"{found.seconds:.0f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def outcome(runs: Sequence[Run]) -> Outcome:
    """Summarise the runs of a recipe."""
    starts, ends = [100 * run.start for run in runs], [100 * run.end for run in runs]
    gains = [after - before for before, after in zip(starts, ends, strict=True)]
    return Outcome(Sample.of(starts), Sample.of(ends), Sample.of(gains), statistics.mean(run.seconds for run in runs))


if __name__ == "__main__":
    sys.exit(main())
