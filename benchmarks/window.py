"""Simulates how long a trainer waits for groups, with the scheduler's own window and a virtual clock.

    python benchmarks/window.py [--batch 64] [--samples 8] [--train-seconds 10] [--tokens 400] [--deviation 1.0]
        [--most 8192] [--seconds-per-token 0.01] [--steps 200] [--seeds 3]

A group ends with the longest of its SAMPLES responses. Their lengths are lognormal, with a median of TOKENS, the
standard DEVIATION of the logarithm and a limit of MOST tokens. The engines have room for every response, so a token
takes the same time whatever else is generated. Each step takes TRAIN-SECONDS after its groups are there.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from math import log
from statistics import fmean

from roll.rollout.scheduler import Window

SETTINGS = ((0.0, 1), (1.0, 1), (1.0, 2), (2.0, 1), (2.0, 3), (3.0, 4))
"""Pairs of `async_generation_ratio` and the window in batches."""


@dataclass(frozen=True)
class Found:
    """The means of a simulated run."""

    step: float
    """Seconds of a step."""
    wait: float
    """Seconds of it in which the trainer waits for groups."""
    age: float
    """Steps between drawing a group and training on it."""
    oldest: int


def group_seconds(options: argparse.Namespace, numbers: random.Random) -> float:
    """Return how long a group takes."""
    lengths = (numbers.lognormvariate(log(options.tokens), options.deviation) for _ in range(options.samples))
    return min(options.most, max(lengths)) * options.seconds_per_token


def simulated(options: argparse.Namespace, ratio: float, batches: int, seed: int) -> Found:
    """Return the figures of a run with a seed."""
    numbers, window = random.Random(seed), Window(options.batch, ratio, batches * options.batch)
    ends, ages, now, waited = dict[int, float](), list[int](), 0.0, 0.0
    for _ in range(options.steps):
        there, taken = now, 0
        while window.has_room(options.batch):
            ordinal = window.draw()
            assert ordinal is not None
            ends[ordinal] = now + group_seconds(options, numbers)
        while taken < options.batch:
            choice = window.choice(options.batch - taken)
            first = sorted(choice.pool, key=lambda ordinal: (ordinal not in choice.due, ends[ordinal]))[: choice.count]
            there, taken = max(there, *(ends[ordinal] for ordinal in first)), taken + len(first)
            ages += map(window.age, first)
            window.remove(first)
        window.next_step()
        waited, now = waited + there - now, there + options.train_seconds
    return Found(now / options.steps, waited / options.steps, fmean(ages), max(ages))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, count in (("batch", 64), ("samples", 8), ("most", 8192), ("steps", 200), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=int, default=count)
    for name, usual in (("train-seconds", 10.0), ("tokens", 400.0), ("deviation", 1.0), ("seconds-per-token", 0.01)):
        parser.add_argument(f"--{name}", type=float, default=usual)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Simulate and print."""
    options = parse(words)
    print("| ratio | window, batches | step, s | wait, s | age, mean | oldest |\n|---|---|---|---|---|---|")
    for ratio, batches in SETTINGS:
        runs = [simulated(options, ratio, batches, seed) for seed in range(options.seeds)]
        step, wait, age = (fmean(getattr(run, name) for run in runs) for name in ("step", "wait", "age"))
        print(f"| {ratio:g} | {batches} | {step:.1f} | {wait:.1f} | {age:.2f} | {max(run.oldest for run in runs)} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
