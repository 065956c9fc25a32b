"""Runs a recipe with roll and with TRL's GRPOTrainer, one GPU each, and compares the time to reach an accuracy.

    python benchmarks/beside_trl.py [--recipe recipes/smollm2_sums_grpo] [--seeds 42,43] [--devices 0,1]
        [--threshold 0.4] [--until-reached] [--folder FOLDER] [--json FILE] [KEY=VALUE ...]
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


@dataclass(frozen=True)
class Place:
    """Where a program runs."""

    device: str
    """The number of its GPU."""
    cores: frozenset[int]


class Side:
    """A running program, and what it has said of its validations."""

    def __init__(
        self, name: str, command: Sequence[str], place: Place, scratch: Path, said: Path, until: float | None = None
    ) -> None:
        """Start `command` at a place. It writes a JSON object per line into the file `said`, and is ended when it has
        reached the accuracy `until`, if given.
        """
        self.name, self.said, self.curve, self.ended = name, said, list[Validation](), False
        self.errors = scratch / f"{name}.err"
        self._until = until
        self._lines, self._training = 0, 0.0
        variables = environment(str(scratch)) | {"CUDA_VISIBLE_DEVICES": place.device}
        output = said if name == "TRL" else scratch / f"{name}.out"
        with output.open("w") as out, self.errors.open("w") as errors:
            self.begin = time.perf_counter()
            self.process = subprocess.Popen(list(command), env=variables, stdout=out, stderr=errors, text=True)
        os.sched_setaffinity(self.process.pid, place.cores)  # Its children inherit it.

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
    responses = config.rollout_batch_size * config.num_return_sequences_in_group
    longest = config.prompt_length + config.response_length
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
        micro_batch=micro_batch_of(responses, longest, train.max_tokens_per_microbatch),
        prompt_length=config.prompt_length,
        response_length=config.response_length,
        learning_rate=train.training_args.learning_rate,
        gpu_memory_utilization=infer.strategy_args.strategy_config.gpu_memory_utilization,
        scratch=str(scratch),
    )


def micro_batch_of(responses: int, longest: int, tokens: int) -> int:
    """Return how many responses TRL trains at a time: as many as divide a step's `responses` evenly, and whose tokens,
    if all have the greatest length, are at most the `tokens` of a micro-batch of roll's.
    """
    return max(size for size in range(1, responses + 1) if responses % size == 0 and size * longest <= tokens)


class Lane:
    """The runs of one program: one seed after the other, at one place."""

    def __init__(self, name: str, place: Place, options: argparse.Namespace, folder: Path) -> None:
        self.name, self.curves = name, dict[int, list[Validation]]()
        self.place, self._options, self.folder = place, options, folder
        self._left, self._deadline = list(options.seeds), 0.0
        self._side: Side | None = None

    def advance(self) -> bool:
        """Read what the running program has said, and start the next one if it has ended. Return whether one runs.

        Raises:
            SystemExit: the program failed or is late
        """
        if self._side is not None:
            ended = self._side.process.poll() is not None
            self._side.read()
            if self._side.failed or time.monotonic() > self._deadline:
                status, errors = self._side.process.poll(), self._side.errors.read_text()[-4000:]
                raise SystemExit(f"{self.name} ended with status {status}:\n{errors}")
            if not ended:
                return True
            self._side = None
            print(f"{self.name}: ended, {len(self._left)} seeds are left", flush=True)
        if not self._left:
            return False
        seed = self._left.pop(0)
        self._side, self._deadline = self.start(seed), time.monotonic() + DEADLINE_SECONDS
        self.curves[seed] = self._side.curve
        return True

    def start(self, seed: int) -> Side:
        """Start the program with a seed."""
        options, scratch = self._options, self.folder / f"{self.name}-{seed}"
        scratch.mkdir(parents=True)
        if self.name == "TRL":
            said, work = scratch / "TRL.out", scratch / "work.json"
            work.write_text(json.dumps(asdict(work_of(options.recipe, options.overrides, seed, scratch))))
            words = ["-m", "benchmarks.trl_grpo", str(work)]
        else:
            said = scratch / "run" / "metrics.jsonl"
            words = ["-m", "roll.pipeline", "--config-dir", str(EXAMPLES), "--config-name", options.recipe]
            words += [f"output_dir={scratch}/run", *options.overrides, f"seed={seed}"]
        until = options.threshold if options.until_reached else None
        return Side(self.name, [sys.executable, *words], self.place, scratch, said, until)

    def end(self) -> None:
        """End the running program, if any."""
        if self._side is not None and self._side.process.poll() is None:
            end(self._side.process)


def halves() -> tuple[frozenset[int], frozenset[int]]:
    """Return the cores of roll and those of TRL: a half each, or the only one."""
    cores = sorted(os.sched_getaffinity(0))
    middle = len(cores) // 2
    return frozenset(cores[:middle] or cores), frozenset(cores[middle:])


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
        print(table([run for file in options.table for run in json.loads(file.read_text())]))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        devices = options.devices.split(",")
        lanes = [
            Lane(name, Place(device, cores), options, folder)
            for name, device, cores in zip(SIDES, devices, halves(), strict=True)
        ]
        try:
            while [lane for lane in lanes if lane.advance()]:
                time.sleep(POLL_SECONDS)
        finally:
            found = [found_of(options, seed, lanes) for seed in options.seeds]
            if options.json:
                options.json.write_text(json.dumps(found))
            for lane in lanes:
                lane.end()
    print(table(found))
    return 0


def found_of(options: argparse.Namespace, seed: int, lanes: Sequence[Lane]) -> dict[str, Any]:
    """Return what was measured with a seed, also if a side did not get as far."""
    return {
        "recipe": options.recipe,
        "seed": seed,
        "threshold": options.threshold,
        "keys": options.overrides,
        "versions": versions(),
        "curves": {lane.name: [asdict(point) for point in lane.curves.get(seed, [])] for lane in lanes},
    }


def seeds_of(text: str) -> list[int]:
    """Read `42,43`."""
    return [int(seed) for seed in text.split(",")]


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/smollm2_sums_grpo")
    parser.add_argument("--seeds", type=seeds_of, default=[42], metavar="SEED[,SEED...]")
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
