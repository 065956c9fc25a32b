"""Trains the same six runs with two checkouts. All metrics, except times, memory and those of the engines, must agree
to 1e-6; so must the rewards of every step, and its token ids must be equal.

    python benchmarks/same_numbers.py BEFORE [AFTER] [--steps 10] [--only rlvr,dpo] [--json FILE]

BEFORE and AFTER are folders of checkouts (default of AFTER: this checkout). Both run in this interpreter's environment,
on the CPU, in fp32 with seeded sampling: RLVR with LoRA under ZeRO-3, RLVR with a critic, SFT, DPO, a reward model,
distillation. BEFORE creates the model, the problems and the warmed-up policy from which all runs except SFT start. The
status is 1 if a metric differs or exists in only one checkout.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ("time/", "throughput/", "memory/", "engine/")
TOLERANCE = 1e-6
"""Largest allowed difference, relative for values above 1."""
LIMIT = 3600.0
"""Deadline of one run in seconds, in case it hangs."""
WARM = "pretrain=warm/export"
SEEDED = (
    WARM,
    "actor_infer.generating_args.seeded=true",
    "rollout_batch_size=16",
    "rewards.arithmetic.world_size=1",
    "eval_steps=5",
)
NEW_KEY = "updates_per_step=1"
"""A word that is left out for a checkout without its key, where `per_device_train_batch_size` gives the same update."""
RECORDER = ROOT / "benchmarks" / "record_rollouts.py"
ROLLOUTS = "rollouts.jsonl"
"""File of a run's token ids and rewards. Runs that train on given texts have none."""
OFFLINE = ("data_split=[9,1,0]", "eval_steps=5")
RUNS: Mapping[str, tuple[str, ...]] = {
    "rlvr": ("tiny/tiny_rlvr_lora_zero3", *SEEDED, "actor_train.training_args.per_device_train_batch_size=32"),
    "critic": (
        "algorithms/ppo_critic",
        *SEEDED,
        "rollout_batch_size=64",
        "critic_warmup=2",
        NEW_KEY,
        "actor_train.training_args.per_device_train_batch_size=32",
        "critic.training_args.per_device_train_batch_size=16",
        "critic.training_args.gradient_accumulation_steps=1",
    ),
    "sft": ("tiny/tiny_warm_up", "pretrain=output/tiny/model", *OFFLINE),
    "dpo": ("tiny/tiny_dpo", WARM, *OFFLINE),
    "reward_model": ("tiny/tiny_reward_model", WARM, *OFFLINE),
    "distill": ("tiny/tiny_distill", "teacher.model_args.model_name_or_path=warm/export", *OFFLINE),
}


def main() -> int:
    """Run both checkouts, compare them, and print a row for each run. Return 1 if they differ."""
    options = parse()
    names = options.only.split(",") if options.only else list(RUNS)
    found: dict[str, dict[str, Recorded]] = {}
    with tempfile.TemporaryDirectory(prefix="roll-same-numbers-") as folder:
        world = Path(folder)
        make_world(options.before.resolve(), world)
        for side in ("before", "after"):
            checkout = getattr(options, side).resolve()
            found[side] = {
                name: recorded(checkout, world, f"{side}-{name}", RUNS[name], options.steps) for name in names
            }
    table = Table("run", "steps", "metrics", "largest difference", "of", "episodes", "tokens", "different episodes")
    differs = False
    for name in names:
        before, after = found["before"][name], found["after"][name]
        worst, metric, count = largest(before.metrics, after.metrics)
        different = different_episodes(before.episodes, after.episodes)
        differs |= worst > TOLERANCE or different > 0
        tokens = sum(len(path) for _, paths, _ in before.episodes for path in paths)
        sizes = (len(before.episodes), tokens, different)
        table.add_row(name, str(len(before.metrics) - 1), str(count), f"{worst:.1e}", metric, *map(str, sizes))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(found, default=vars))
    return int(differs)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="folder of the checkout to compare with")
    parser.add_argument(
        "after", type=Path, nargs="?", default=ROOT, help="folder of the other checkout (default: this one)"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", help=f"runs to compare, out of {', '.join(RUNS)}, separated by commas")
    parser.add_argument("--json", type=Path, help="file for all metrics of all runs")
    return parser.parse_args()


def make_world(checkout: Path, world: Path) -> None:
    """Create model, problems and a warmed-up policy."""
    for script, name in (("make_model.py", "model"), ("make_problems.py", "problems")):
        run(checkout, world, str(checkout / "examples" / "tiny" / script), f"output/tiny/{name}")
    run(checkout, world, "-m", "roll.pipeline", "--config-name", "tiny/tiny_warm_up", "output_dir=warm", "max_steps=60")


Episode: TypeAlias = tuple[str, list[list[int]], float]
"""Prompt, token ids of each trajectory, reward."""


@dataclass(frozen=True)
class Recorded:
    """What a run computed."""

    metrics: list[dict[str, Any]]
    """The metrics of every step, including step 0, without times, memory and those of engines."""
    episodes: list[Episode]
    """The episodes of all steps, sorted: groups finish in another order in every run of the same checkout, and a
    reference that scores groups as they arrive records them once more. The metrics show which step had which.
    """


def recorded(checkout: Path, world: Path, folder: str, experiment: tuple[str, ...], steps: int) -> Recorded:
    """Run an experiment, and return what it computed."""
    name, *overrides = experiment
    if "updates_per_step" not in (checkout / "roll" / "config" / "schema" / "rlvr.py").read_text(encoding="utf-8"):
        overrides = [word for word in overrides if word != NEW_KEY]
    rollouts = world / f"{folder}-{ROLLOUTS}"
    run(
        checkout,
        world,
        "-P",
        str(RECORDER),
        str(rollouts),
        "--config-name",
        name,
        *overrides,
        f"max_steps={steps}",
        f"output_dir={folder}",
    )
    lines = read_lines(world / folder / "metrics.jsonl")
    assert lines, f"{folder} wrote no metrics"
    return Recorded(
        [{metric: value for metric, value in line.items() if not metric.startswith(MEASURED)} for line in lines],
        sorted(tuple(episode) for groups in read_lines(rollouts) for episode in groups),
    )


def read_lines(path: Path) -> list[Any]:
    """Return the JSON values of a file's lines; none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(checkout: Path, world: Path, *words: str) -> None:
    """Run a Python process of a checkout in the common folder. Exit with its output if it fails."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, *words], cwd=world, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)} of {checkout} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")


def largest(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> tuple[float, str, int]:
    """Return the largest difference with its metric and step, and the number of compared values."""
    worst, where, count = 0.0, "", 0
    for difference, name in differences(before, after):
        count += 1
        if difference > worst:
            worst, where = difference, name
    return worst, where, count


def differences(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Iterator[tuple[float, str]]:
    """Yield the difference of each metric of each step; infinite if one side lacks the metric."""
    if len(before) != len(after):
        yield math.inf, f"{len(before)} and {len(after)} lines"
    for one, other in zip(before, after, strict=False):
        for name in sorted(one.keys() | other.keys()):
            yield distance(one.get(name, math.inf), other.get(name, math.inf)), f"{name}, step {one['step']}"


def different_episodes(before: list[Episode], after: list[Episode]) -> int:
    """Return the number of sorted episodes that differ in prompt, token ids or reward, or that only one side has."""
    pairs = zip(before, after, strict=False)
    same = sum(one[:2] == other[:2] and distance(one[2], other[2]) <= TOLERANCE for one, other in pairs)
    return max(len(before), len(after)) - same


def distance(one: float | None, other: float | None) -> float:
    """Return the difference of two values of a metric, relative if the first is above 1. None is a non-finite value."""
    if one is None or other is None or math.inf in (one, other):
        return 0.0 if one is other else math.inf
    return abs(one - other) / max(1.0, abs(one))


if __name__ == "__main__":
    sys.exit(main())
