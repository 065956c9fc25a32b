"""Runs a recipe with roll and with TRL's GRPOTrainer, one GPU each, and compares the time to reach an accuracy.

    python benchmarks/beside_trl.py [--recipe recipes/smollm2_sums_grpo] [--seed 42] [--devices 0,1] [--threshold 0.4]
        [--until-reached] [--folder FOLDER] [--json FILE] [KEY=VALUE ...]
    python benchmarks/beside_trl.py --table FILE ...

Both have the recipe's model, rows, reward, batch, learning rate and number of steps, and measure the greedy accuracy on
the held-out rows at the same steps. An accuracy counts as reached at the last of three validations in a row whose mean
is at least THRESHOLD. Seconds of training leave out the start and validations; seconds of the command are those since
its start. The second form prints a table of several such runs, with the intervals of the ratios.

It runs in the folder with the recipe's model and rows, and needs TRL in the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

from benchmarks.intervals import Sample, quantile
from benchmarks.launch import end, environment, heed_sigterm, versions
from benchmarks.trl_grpo import Work
from roll.api import load_config

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SIDES = ("roll", "TRL")
CONSECUTIVE = 3
"""Number of validations whose mean is compared with the threshold."""
POLL_SECONDS = 0.2
DEADLINE_SECONDS = 3600.0
ACCURACY = "accuracy"


@dataclass(frozen=True)
class Validation:
    """A point of a learning curve."""

    step: int
    accuracy: float
    training_seconds: float
    """Seconds of training, without the start and validations."""
    seconds: float
    """Seconds since the command was started."""


class Side:
    """A running program, and what it has said of its validations."""

    def __init__(
        self, name: str, command: Sequence[str], device: str, scratch: Path, said: Path, until: float | None = None
    ) -> None:
        """Start `command` on a device. It writes a JSON object per line into the file `said`, and is ended when it has
        reached the accuracy `until`, if given.
        """
        self.name, self.said, self.curve, self.ended = name, said, list[Validation](), False
        self._until = until
        self._lines, self._training = 0, 0.0
        variables = environment(str(scratch)) | {"CUDA_VISIBLE_DEVICES": device}
        output = said if name == "TRL" else scratch / f"{name}.out"
        with output.open("w") as out, (scratch / f"{name}.err").open("w") as errors:
            self.begin = time.perf_counter()
            self.process = subprocess.Popen(list(command), env=variables, stdout=out, stderr=errors, text=True)

    def read(self) -> None:
        """Read the lines that were written since the last call."""
        now = time.perf_counter() - self.begin
        lines = (self.said.read_text() if self.said.exists() else "").split("\n")[:-1]
        for line in lines[self._lines :]:
            point = self._point(json.loads(line), now) if line.startswith('{"') else None
            if point:
                self.curve.append(point)
                print(
                    f"{self.name}: step {point.step}, {point.accuracy:.3f}, {point.training_seconds:.1f} s", flush=True
                )
        self._lines = len(lines)
        if self._until is not None and not self.ended and reached(self.curve, self._until):
            self.ended = True
            self.process.terminate()

    @property
    def failed(self) -> bool:
        """Whether it ended by itself, with a status other than 0."""
        return not self.ended and self.process.poll() not in (None, 0)

    def _point(self, line: dict[str, Any], now: float) -> Validation | None:
        if ACCURACY in line:
            return Validation(line["step"], line[ACCURACY], line["training_seconds"], now)
        if line["step"]:
            self._training += line["time/step"] - line.get("time/evaluate", 0.0)
        scores = [value for name, value in line.items() if name.startswith("val/") and name.endswith("/pass@1")]
        return Validation(line["step"], scores[0], self._training, now) if scores else None


def reached(curve: Sequence[Validation], threshold: float) -> Validation | None:
    """Return the last of the first `CONSECUTIVE` validations in a row whose mean accuracy is at least the threshold."""
    for last in range(CONSECUTIVE - 1, len(curve)):
        if statistics.fmean(one.accuracy for one in curve[last + 1 - CONSECUTIVE : last + 1]) >= threshold:
            return curve[last]
    return None


def work_of(recipe: str, keys: Sequence[str], seed: int, scratch: Path) -> Work:
    """Return what TRL trains, from the recipe of roll."""
    config: Any = load_config(recipe, [*keys, f"seed={seed}"], EXAMPLES)
    train, infer, held_out = config.actor_train, config.actor_infer, config.validation.data_args
    return Work(
        model=os.path.abspath(config.pretrain),
        train=os.path.abspath(train.data_args.file_name),
        validation=os.path.abspath(held_out.file_name),
        seed=seed,
        steps=config.max_steps,
        eval_steps=config.eval_steps,
        prompts=config.rollout_batch_size,
        samples=config.num_return_sequences_in_group,
        micro_batch=64,
        prompt_length=config.prompt_length,
        response_length=config.response_length,
        learning_rate=train.training_args.learning_rate,
        gpu_memory_utilization=infer.strategy_args.strategy_config.gpu_memory_utilization,
        scratch=str(scratch),
    )


def run(options: argparse.Namespace, scratch: Path) -> dict[str, list[Validation]]:
    """Run both programs at the same time, and return their curves. Raises SystemExit if one fails."""
    keys, devices = options.overrides, options.devices.split(",")
    work = scratch / "work.json"
    work.write_text(json.dumps(asdict(work_of(options.recipe, keys, options.seed, scratch))))
    mine = ["--config-dir", str(EXAMPLES), "--config-name", options.recipe, f"output_dir={scratch}/run", *keys]
    commands = {
        "roll": [sys.executable, "-m", "roll.pipeline", *mine, f"seed={options.seed}"],
        "TRL": [sys.executable, "-m", "benchmarks.trl_grpo", str(work)],
    }
    said = {"roll": scratch / "run" / "metrics.jsonl", "TRL": scratch / "TRL.out"}
    until = options.threshold if options.until_reached else None
    sides = [Side(name, commands[name], devices[at], scratch, said[name], until) for at, name in enumerate(SIDES)]
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while any(side.process.poll() is None for side in sides):
            for side in sides:
                side.read()
                if side.failed or time.monotonic() > deadline:
                    errors = (scratch / f"{side.name}.err").read_text()[-4000:]
                    raise SystemExit(f"{side.name} ended with status {side.process.poll()}:\n{errors}")
            time.sleep(POLL_SECONDS)
        for side in sides:
            side.read()
    finally:
        for side in sides:
            if side.process.poll() is None:
                end(side.process)
    return {side.name: side.curve for side in sides}


COLUMNS = ("seconds of training", "seconds of the command", "seconds of all steps")
"""What is compared: seconds of training and of the command until the threshold is reached, and seconds of training of
all steps, if both made equally many."""


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return the table of several runs in Markdown, and the geometric means of the ratios with their intervals."""
    head = ["seed", *(f"{name}: {part}" for name in COLUMNS for part in (*SIDES, "ratio"))]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    ratios: dict[str, list[float]] = {name: [] for name in COLUMNS}
    for one in runs:
        cells = [str(one["seed"])]
        curves = [[Validation(**each) for each in one["curves"][side]] for side in SIDES]
        by_side = [compared(curve, one["threshold"]) for curve in curves]
        if len({curve[-1].step for curve in curves if curve}) != 1:
            by_side = [(*seconds[:2], None) for seconds in by_side]
        for name, mine, theirs in zip(COLUMNS, *by_side, strict=True):
            missing = "unequal steps" if name == COLUMNS[-1] else "not reached"
            cells += [f"{seconds:.0f}" if seconds else missing for seconds in (mine, theirs)]
            cells.append(f"{mine / theirs:.2f}" if mine and theirs else "")
            ratios[name] += [mine / theirs] if mine and theirs else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *(f"ratio of the {name}: {ratio_with_interval(ratios[name])}" for name in COLUMNS)])


def compared(curve: Sequence[Validation], threshold: float) -> tuple[float | None, float | None, float | None]:
    """Return the seconds of `COLUMNS` of one side; None where the threshold was not reached."""
    point, whole = reached(curve, threshold), curve[-1].training_seconds if curve else None
    return (point.training_seconds, point.seconds, whole) if point else (None, None, whole)


def ratio_with_interval(ratios: Sequence[float]) -> str:
    """Return the geometric mean with Student's 95% interval of the logarithm, if there are several."""
    if not ratios:
        return "none"
    sample = Sample.of([log(ratio) for ratio in ratios])
    if sample.sd is None:
        return f"{exp(sample.mean):.2f}, no interval"
    half = quantile(sample.count - 1) * sqrt(sample.variance_of_mean)
    return f"{exp(sample.mean):.2f} [{exp(sample.mean - half):.2f}, {exp(sample.mean + half):.2f}]"


def main() -> int:
    """Measure or tabulate."""
    options = parse()
    heed_sigterm()
    if options.table:
        print(table([json.loads(file.read_text()) for file in options.table]))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        curves = run(options, folder.resolve())
    found = {
        "recipe": options.recipe,
        "seed": options.seed,
        "threshold": options.threshold,
        "keys": options.overrides,
        "versions": versions(),
        "curves": {name: [asdict(point) for point in curve] for name, curve in curves.items()},
    }
    if options.json:
        options.json.write_text(json.dumps(found))
    print(table([found]))
    return 0


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/smollm2_sums_grpo")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--devices", default="0,1", help="the GPU of roll and the GPU of TRL")
    parser.add_argument("--threshold", type=float, default=0.4)
    parser.add_argument("--until-reached", action="store_true", help="end a program that has reached the threshold")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="only print the table of these results")
    parser.add_argument("--folder", type=Path, help="folder of the runs (default: a temporary one)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
