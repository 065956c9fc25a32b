"""Runs recipes, their evaluations and the comparisons with TRL on the GPUs of one host, as many as GPUs are free.

    python benchmarks/recipe_pool.py OUT [--gpus 4] [--seconds 1500] [--only NAME ...] [--list]

It runs in the folder with the recipes' models and rows, which are those of docs/recipes.md. A job starts when its
GPUs are free and the jobs that it needs have ended with status 0; among several, the first of the list. While a job
for two GPUs waits for the second one, no later job takes a free one. After SECONDS the running jobs are interrupted:
a recipe then finishes its step and writes a checkpoint and an export. OUT/NAME.log has the output of each job, and
OUT/pool.log when each began and ended. The exit status is 1 if a job did not end with status 0.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launch import end, heed_sigterm

POLL_SECONDS = 0.5
DEVICES = "{devices}"
"""In a command: the numbers of the job's GPUs, such as 2,3."""


@dataclass(frozen=True)
class Job:
    """A command that needs GPUs."""

    name: str
    commands: tuple[str, ...]
    """Run one after the other, each only if the one before ended with status 0."""
    after: tuple[str, ...] = ()
    """Names of the jobs whose files it reads."""
    gpus: int = 1


def recipe(name: str, *after: str) -> Job:
    """Return the job of a recipe."""
    return Job(name, (f"python -m roll.pipeline --config-name {name}",), after)


def evaluation(name: str, model: str, file: str, *after: str, more: str = "") -> Job:
    """Return the job that evaluates a model on the rows of a file, with the results in `output/evaluations/NAME`."""
    what = f"--data {file} --reward last_number --max-new-tokens 256 --devices 0"
    return Job(
        name, (f"python -m roll.evaluate {model} {what} --output output/evaluations/{name} {more}".rstrip(),), after
    )


def scores(name: str, model: str, *after: str) -> Job:
    """Return the job that measures the strict score of a model on GSM8K, and the lenient one as a part of it."""
    mark = "'rewards.last_number.reward_args.mark=\"####\"'"
    return evaluation(name, model, "data/gsm8k_marked/test.jsonl", *after, more=mark)


def beside(seed: int, *after: str) -> Job:
    """Return the job that compares with TRL on sums as they are drawn."""
    rows = "actor_train.data_args.file_name=data/drawn_sums/train.jsonl"
    held_out = "validation.data_args.file_name=data/drawn_sums/validation.jsonl"
    what = f"--recipe recipes/smollm2_sums_async --seeds {seed} --devices {DEVICES} --until-reached"
    command = f"python -m benchmarks.beside_trl {what} --json output/beside_{seed}.json max_steps=150 {rows} {held_out}"
    return Job(f"beside_{seed}", (command,), after, 2)


ANSWERS = (
    "python -m roll.evaluate output/smollm2-sums-sft/export --data data/chain_sum/train.jsonl --reward last_number "
    "--samples 8 --temperature 1.0 --max-new-tokens 32 --output output/smollm2-answers --devices 0"
)
PAIRS = "python examples/recipes/make_pairs.py output/smollm2-answers/samples.jsonl output/smollm2-answers/pairs.jsonl"
SUMS = "data/chain_sum/validation.jsonl"
JOBS = (
    recipe("smollm2_gsm8k_sft"),
    beside(42),
    beside(43, "beside_42"),
    beside(44, "beside_43"),
    recipe("smollm2_gsm8k_grpo", "smollm2_gsm8k_sft"),
    recipe("smollm2_sums_sft"),
    Job("answers", (ANSWERS, PAIRS), ("smollm2_sums_sft",)),
    recipe("smollm2_dpo", "answers"),
    evaluation("sums_sft", "output/smollm2-sums-sft/export", SUMS, "smollm2_sums_sft"),
    evaluation("dpo", "output/smollm2-dpo/export", SUMS, "smollm2_dpo"),
    recipe("smollm2_humaneval_grpo"),
    scores("gsm8k_grpo", "output/smollm2-gsm8k-grpo/export", "smollm2_gsm8k_grpo"),
    scores("gsm8k_sft", "output/smollm2-gsm8k-sft/export", "smollm2_gsm8k_sft"),
    scores("gsm8k_base", "models/smollm2-135m"),
    recipe("smollm2_sums_reward_model", "answers"),
    recipe("smollm2_sums_ppo"),
    recipe("smollm2_sums_lora"),
)


def next_job(jobs: Sequence[Job], ended: Mapping[str, int], running: Collection[str], free: int) -> Job | None:
    """Return the job to start now, if any.

    Args:
        ended: statuses of the jobs that have ended.
        running: names of those that run.
        free: number of free GPUs.
    """
    names = {job.name for job in jobs}
    for job in jobs:
        needed = names.intersection(job.after)  # the files of others are there
        if job.name in ended or job.name in running or any(ended.get(name) != 0 for name in needed):
            continue
        return job if job.gpus <= free else None
    return None


@dataclass
class Running:
    """A job that runs."""

    process: subprocess.Popen[str]
    left: list[str]
    """Its commands after this one."""
    devices: set[int]


class Pool:
    """The running jobs, and the GPUs that are free."""

    def __init__(self, jobs: Sequence[Job], gpus: int, out: Path) -> None:
        self.ended: dict[str, int] = {}
        self._jobs, self._out, self._begin = jobs, out, time.monotonic()
        self._free, self._running = set(range(gpus)), dict[str, Running]()

    def run(self, seconds: float) -> None:
        """Run all jobs, at most for this time."""
        try:
            while time.monotonic() - self._begin < seconds:
                while job := next_job(self._jobs, self.ended, self._running, len(self._free)):
                    self._start(job)
                if not self._running:
                    return
                self._collect()
                time.sleep(POLL_SECONDS)
        finally:
            for one in self._running.values():
                one.left.clear()
                one.process.terminate()  # all at once, and then wait for each
            for one in self._running.values():
                end(one.process)
            self._collect()

    def _start(self, job: Job) -> None:
        devices = set(sorted(self._free)[: job.gpus])
        self._free -= devices
        first, *left = job.commands
        self._running[job.name] = Running(self._command(job.name, first, devices), left, devices)
        self._say(f"{job.name} on {_numbers(devices)}")

    def _command(self, name: str, command: str, devices: set[int]) -> subprocess.Popen[str]:
        words = shlex.split(command.replace(DEVICES, _numbers(devices)))
        own = os.environ | {"CUDA_VISIBLE_DEVICES": _numbers(devices)}
        with (self._out / f"{name}.log").open("a") as log:
            return subprocess.Popen(
                [sys.executable, *words[1:]], stdout=log, stderr=subprocess.STDOUT, text=True, env=own
            )

    def _collect(self) -> None:
        for name, one in list(self._running.items()):
            status = one.process.poll()
            if status == 0 and one.left:
                one.process = self._command(name, one.left.pop(0), one.devices)
            elif status is not None:
                del self._running[name]
                self._free |= one.devices
                self.ended[name] = status
                self._say(f"{name} ended with status {status}")

    def _say(self, text: str) -> None:
        line = f"{time.monotonic() - self._begin:6.0f} s  {text}"
        print(line, flush=True)
        with (self._out / "pool.log").open("a") as log:
            log.write(f"{line}\n")


def _numbers(devices: set[int]) -> str:
    return ",".join(map(str, sorted(devices)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs. Return 0 if all ended with status 0, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", nargs="?", default=Path("output/pool"))
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1500)
    parser.add_argument("--only", nargs="+", choices=[job.name for job in JOBS], metavar="NAME", help="only these jobs")
    parser.add_argument("--list", action="store_true", help="only print the names and commands of the jobs")
    given = parser.parse_args(argv)
    jobs = [job for job in JOBS if given.only is None or job.name in given.only]
    if given.list:
        print(*(f"{job.name} ({job.gpus}): {' && '.join(job.commands)}" for job in jobs), sep="\n")
        return 0
    heed_sigterm()
    given.out.mkdir(parents=True, exist_ok=True)
    pool = Pool(jobs, given.gpus, given.out)
    pool.run(given.seconds)
    return 0 if [pool.ended.get(job.name) for job in jobs] == [0] * len(jobs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
