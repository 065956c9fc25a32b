"""Measures the driver's work between a rollout and a train step, in CPU microseconds per sample, for several step
sizes.

    python benchmarks/driver.py [--samples 4096,32768] [--mean-length 256] [--json FILE]

The groups of 8 responses with geometrically distributed lengths are generated here, without an engine, a trainer or
Ray. Times are the CPU time of the process, the minimum of three rounds. To compare with another checkout, repeat the
command with PYTHONPATH=CHECKOUT.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from roll.algorithms.advantages import Normalisation
from roll.data import packing
from roll.rollout.batch import Credit, CreditAssignment, Shaping, experience, rollout_metrics
from roll.rollout.record import single_turn
from roll.types import Completion, FinishReason, Prompt, RewardResult, RolloutGroup

GROUP = 8
PROMPT_TOKENS = 40
ROUNDS = 3
RANKS, TOKEN_BUDGET = 8, 32768
CREDITS: Mapping[str, Credit] = {
    "grpo": Credit("grpo", Normalisation()),
    "reinforce, gamma 0.99": Credit("reinforce", Normalisation(mean="group", std="group", gamma=0.99)),
}


def main() -> int:
    """Measure each size and print a line for each part."""
    options = parse()
    sizes = [int(size) for size in options.samples.split(",")]
    found = {size: measure(size, options.mean_length) for size in sizes}
    table = Table(
        "part", *(f"{size:,} samples" for size in sizes), title="CPU time of the driver, microseconds per sample"
    )
    for part in found[sizes[0]]:
        table.add_row(part, *(f"{found[size][part]:.1f}" for size in sizes))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", default="4096,32768", help="step sizes in samples, separated by commas")
    parser.add_argument(
        "--mean-length", type=int, default=256, help="mean tokens per response; the maximum is four times as long"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure(samples: int, mean_length: int) -> dict[str, float]:
    """Return the microseconds per sample of each part."""
    groups = make_groups(samples // GROUP, mean_length)
    step = experience(groups, Shaping())
    parts: dict[str, Callable[[], Any]] = {
        "rollout metrics": lambda: rollout_metrics(groups, 0),
        "experience": lambda: experience(groups, Shaping()),
        **{
            f"credit: {name}": lambda credit=credit: CreditAssignment(credit)(step, None)
            for name, credit in CREDITS.items()
        },
        "packing": lambda: packing.split_to_budget(step.sequences.lengths, RANKS, TOKEN_BUDGET),
    }
    return {name: 1e6 * min(seconds(part) for _ in range(ROUNDS)) / samples for name, part in parts.items()}


def seconds(part: Callable[[], Any]) -> float:
    """Return the CPU seconds of the process for one call of a part."""
    begin = time.process_time()
    part()
    return time.process_time() - begin


def make_groups(count: int, mean_length: int) -> list[RolloutGroup]:
    """Return complete, scored groups, all sampled by one policy version."""
    numbers = np.random.default_rng(0)

    def completion() -> Completion:
        length = min(int(numbers.geometric(1 / mean_length)), 4 * mean_length)
        ids, log_probs = numbers.integers(0, 1000, length).astype(np.int32), -numbers.random(length).astype(np.float32)
        return Completion(ids, log_probs, np.zeros(length, np.int32), FinishReason.STOP, "")

    groups = []
    for number in range(count):
        prompt = Prompt(number, np.arange(PROMPT_TOKENS, dtype=np.int32), "", "made", {})
        episodes = [
            single_turn(prompt, completion(), RewardResult(float(numbers.integers(0, 2)))) for _ in range(GROUP)
        ]
        groups.append(RolloutGroup(prompt, episodes))
    return groups


if __name__ == "__main__":
    raise SystemExit(main())
