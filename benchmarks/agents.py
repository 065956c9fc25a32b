"""Measures how long engines wait for environments, renderer and driver: multi-turn rollouts compared with the engine
alone.

    python benchmarks/agents.py [--model tiny|0.5b|1.5b] [--devices 0] [--groups 4] [--samples 64] [--turns 8] [--mean
        128]
        [--seconds 0] [--steps 5] [--json FILE] [KEY=VALUE ...]

A run of `python -m roll.pipeline` plays `--groups` x `--samples` episodes per step in an environment that answers each
turn after `--seconds` with 32 random letters. A model with random weights assigns about the same probability to all
tokens, and some token ids end a turn, so that a turn has `--mean` tokens on average. Afterwards vLLM's own `LLM`
generates the same episodes alone: turns with the same numbers of tokens, each as soon as the previous one has ended.
The difference between the two is the time that the engines waited. The first step is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import launch, rlvr
from benchmarks.work import TEMPLATE_TOKENS, AgentWork

WARM_UP = 1
MOST_WAITING = 0.1
"""Target for the share of the rollout in which engines wait. It is shown, not enforced."""
RECORDED = 4
"""Maximum number of groups per step in `samples.jsonl`, from which the engine alone reads the episodes."""
LEARNING_RATE = 1e-7
"""Learning rate. It is so small that the probabilities of tokens and the lengths of turns hardly change."""


def main() -> int:
    """Measure, print a table, and write JSON on request."""
    launch.heed_sigterm()
    options = parse()
    with tempfile.TemporaryDirectory(prefix="roll-benchmark-", dir=options.scratch) as folder:
        work = work_of(options, Path(folder))
        rlvr.write_model(work, options, work.prompts * options.steps, work.end_tokens)
        lines = launch.pipeline(
            "step_agents", overrides(work, options), options.overrides, work, options.logs, "agents"
        )
        alone = launch.floor(work, "generate_turns", options.logs)["seconds"]
    figures = figures_of(lines, alone)
    show(work, figures)
    settings = {"seconds": options.seconds, "overrides": options.overrides, "versions": launch.versions()}
    launch.write({"work": vars(work), "settings": settings, "figures": figures, "lines": lines}, options.json)
    return 0


def figures_of(lines: list[dict[str, Any]], alone: list[float]) -> dict[str, float]:
    """Return means over the measured steps, the share of the rollout in which engines wait, and the number of steps.

    Args:
        lines: metrics of each step.
        alone: seconds of the engine alone with each step's episodes.
    """
    counted, floor = lines[WARM_UP:], sum(alone[WARM_UP:])
    rollout = sum(line["time/rollout"] for line in counted)
    return {
        "steps": float(len(counted)),
        "turns": statistics.fmean(line["episode/turns_mean"] for line in counted),
        "tokens": statistics.fmean(line["response/length_mean"] for line in counted),
        "rollout_seconds": rollout / len(counted),
        "alone_seconds": floor / len(counted),
        "waiting_fraction": 1.0 - floor / rollout,
        "environment_seconds": statistics.fmean(line["episode/environment_seconds"] for line in counted),
        "running": statistics.fmean(line["engine/running"] for line in counted),
    }


def show(work: AgentWork, figures: dict[str, float]) -> None:
    """Print the figures as a table."""
    table = Table(title=f"{work.sequences} episodes of {work.turns} turns, means of {figures['steps']:.0f} steps")
    table.add_column("")
    table.add_column("", justify="right")
    rows = {
        "turns per episode": f"{figures['turns']:.2f}",
        "sampled tokens per episode": f"{figures['tokens']:,.0f}",
        "rollout, s": f"{figures['rollout_seconds']:.2f}",
        "engine alone, s": f"{figures['alone_seconds']:.2f}",
        "share of the rollout in which engines wait": f"{figures['waiting_fraction']:.1%} (target: at most "
        f"{MOST_WAITING:.0%})",
        "environment per episode, s": f"{figures['environment_seconds']:.2f}",
        "running sequences, mean": f"{figures['running']:.0f}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


def overrides(work: AgentWork, options: argparse.Namespace) -> dict[str, Any]:
    """Return the experiment's keys from the options."""
    worlds = "environments.benchmark"
    keys = rlvr.overrides(work, options.steps)
    without_reference = {key: value for key, value in keys.items() if not key.startswith("reference.")}
    return without_reference | {
        "prompt_length": work.prompt_tokens + TEMPLATE_TOKENS,
        "sequence_length": work.length,
        "actor_train.training_args.learning_rate": LEARNING_RATE,
        f"{worlds}.max_turns": work.turns,
        f"{worlds}.environment_args": f"{{turns: {work.turns}, letters: {work.answer_tokens}, seconds: "
        f"{options.seconds}}}",
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line (`sys.argv` if None) and fill in defaults that depend on the model.

    Raises:
        SystemExit: an option is invalid or contradicts another one.
    """
    command = rlvr.parser(__doc__)
    command.add_argument("--groups", type=int, default=4, help="groups per step")
    command.add_argument("--samples", type=int, help="episodes per group (default: 64, for tiny 8)")
    command.add_argument("--turns", type=int, default=8, help="turns per episode")
    command.add_argument("--mean", type=int, help="mean number of sampled tokens per turn (default: 128, for tiny 8)")
    command.add_argument("--answer-tokens", type=int, default=32, help="letters in each answer of the environment")
    command.add_argument("--seconds", type=float, default=0.0, help="seconds that the environment needs for an answer")
    command.add_argument("--steps", type=int, default=5, help=f"steps of the run; the first {WARM_UP} are not counted")
    command.set_defaults(repetitions=1, max_num_seqs=rlvr.MAX_NUM_SEQS, lora_rank=0)
    options = command.parse_args(arguments)
    tiny = options.model == "tiny"
    rlvr.fill(options)
    launch.fill(options, {"samples": 8 if tiny else 64, "mean": 8 if tiny else 128})
    if not 1 <= options.groups <= RECORDED:
        command.error(f"--groups {options.groups}: give 1 to {RECORDED}; a run records the tokens of no more groups")
    if options.lora_rank:
        command.error(f"--lora-rank {options.lora_rank}: remove it; this benchmark trains all parameters")
    if options.steps <= WARM_UP:
        command.error(f"--steps {options.steps}: the first {WARM_UP} are not counted; give at least {WARM_UP + 1}")
    return options


def work_of(options: argparse.Namespace, scratch: Path) -> AgentWork:
    """Return the work that the options describe. A turn has at most eight times the mean length."""
    work = rlvr.work_of(
        options,
        scratch,
        prompts=options.groups,
        samples=options.samples,
        prompt_tokens=64,
        response_tokens=8 * options.mean,
        max_num_seqs=options.max_num_seqs,
    )
    return AgentWork(
        **vars(work), mean=options.mean, kv_cache_gib=None, turns=options.turns, answer_tokens=options.answer_tokens
    )


if __name__ == "__main__":
    sys.exit(main())
