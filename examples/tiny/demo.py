"""The demo: makes a tiny model and its data, then trains it with a supervised warm-up and RLVR. Run it in the root of
the checkout.

    python examples/tiny/demo.py [--agent | --pictures]

With --agent it trains an agent instead, on conversations and on episodes of several turns with a tool; with --pictures
a model that sees, which learns to name the shape in a picture. Finished steps are skipped, and an interrupted run
resumes from its last checkpoint. Remove `output/` to start from scratch.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
MODEL, PROBLEMS = Path("output/tiny/model"), Path("output/tiny/problems")
WARM_UP, RLVR = HERE / "tiny_warm_up.yaml", HERE / "tiny_rlvr_lora_zero3.yaml"
AGENT_MODEL, CONVERSATIONS = Path("output/tiny/agent-model"), Path("output/tiny/conversations")
AGENT_WARM_UP, AGENT = HERE / "tiny_agent_warm_up.yaml", HERE / "tiny_agent.yaml"
SEEING_MODEL, SHAPES = Path("output/tiny/seeing"), Path("output/tiny/shapes")
SEEING_WARM_UP, SEEING = HERE / "tiny_pictures.yaml", HERE / "tiny_rlvr_pictures.yaml"
ACCURACY = "val/heldout/pass@1"


@dataclass(frozen=True)
class Step:
    """One command of the demo."""

    title: str
    arguments: Sequence[str]
    """Arguments of the Python interpreter."""
    done: bool
    """Whether the result of the command already exists."""


def main(made: Callable[[], list[Step]] | None = None, trained: Path = RLVR) -> int:
    """Run the steps that are not done yet, and print the results. Return 0, or the exit status of the step that
    failed.

    Args:
        made: returns the steps, by default those of `steps`.
        trained: the experiment whose results are printed.
    """
    for step in (made or steps)():
        if step.done:
            print(f"== {step.title}: already done", flush=True)
            continue
        print(f"== {step.title}", flush=True)
        started = time.monotonic()
        if status := run(step.arguments):
            return status
        print(f"== {step.title}: {time.monotonic() - started:.0f} s", flush=True)
    print(summary(run_folder(trained)))
    return 0


def steps() -> list[Step]:
    """Return the steps of the demo in which the policy answers directly."""
    return [
        Step("a model of random weights", (str(HERE / "make_model.py"), str(MODEL)), MODEL.exists()),
        Step("arithmetic problems", (str(HERE / "make_problems.py"), str(PROBLEMS)), PROBLEMS.exists()),
        Step("warm-up: supervised fine-tuning", pipeline(WARM_UP), finished(WARM_UP)),
        Step("RLVR: GRPO with LoRA, ZeRO-3 and vLLM", pipeline(RLVR), finished(RLVR)),
    ]


def agent_steps() -> list[Step]:
    """Return the steps of the demo in which the policy calls a tool before it answers."""
    make_model, make_conversations = str(HERE / "make_model.py"), str(HERE / "make_conversations.py")
    return [
        Step("a model of random weights", (make_model, str(AGENT_MODEL), "--agent"), AGENT_MODEL.exists()),
        Step("conversations with a calculator", (make_conversations, str(CONVERSATIONS)), CONVERSATIONS.exists()),
        Step("warm-up: supervised fine-tuning", pipeline(AGENT_WARM_UP), finished(AGENT_WARM_UP)),
        Step("RLVR: episodes with a tool, GRPO with ZeRO-2 and vLLM", pipeline(AGENT), finished(AGENT)),
    ]


def seeing_steps() -> list[Step]:
    """Return the steps of the demo in which the policy sees pictures."""
    make_model, make_shapes = str(HERE / "make_seeing_model.py"), str(HERE / "make_shapes.py")
    return [
        Step("a model of random weights that sees", (make_model, str(SEEING_MODEL)), SEEING_MODEL.exists()),
        Step("pictures of shapes", (make_shapes, str(SHAPES)), SHAPES.exists()),
        Step("warm-up: supervised fine-tuning", pipeline(SEEING_WARM_UP), finished(SEEING_WARM_UP)),
        Step("RLVR: GRPO with pictures, ZeRO-2 and transformers", pipeline(SEEING), finished(SEEING)),
    ]


def pipeline(experiment: Path) -> tuple[str, ...]:
    """Return the arguments of the interpreter that run an experiment of this folder."""
    return "-m", "roll.pipeline", "--config-name", f"{HERE.name}/{experiment.stem}"


def run_folder(experiment: Path) -> Path:
    """Return the run folder of the experiment."""
    return Path(read_experiment(experiment)["output_dir"])


def finished(experiment: Path) -> bool:
    """Whether the experiment has finished its last step and exported its policy."""
    folder = run_folder(experiment)
    steps = [line["step"] for line in read_metrics(folder)]
    return (folder / "export").is_dir() and max(steps, default=0) >= read_experiment(experiment)["max_steps"]


def read_experiment(experiment: Path) -> dict[str, Any]:
    """Return the keys in the experiment's own file, without those of its presets."""
    return yaml.safe_load(experiment.read_text(encoding="utf-8"))


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return the complete lines of the run's metrics; an empty list if the run was not started."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return []
    return [
        json.loads(line) for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]


def run(arguments: Sequence[str]) -> int:
    """Run Python with these arguments. Return its exit status, or 128 + n if signal n killed it.

    Ctrl-C reaches the step directly. The demo ignores it and waits until the step has saved a checkpoint and ended.
    SIGTERM is forwarded to the step.
    """
    step: subprocess.Popen[bytes] | None = None
    early = False

    def pass_on(number: int, _: object) -> None:
        nonlocal early
        if number == signal.SIGTERM:
            if step is None:
                early = True
            else:
                step.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        step = subprocess.Popen([sys.executable, *arguments])
        if early:  # the signal arrived while the step was being started
            step.send_signal(signal.SIGTERM)
        status = step.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def summary(folder: Path) -> str:
    """Return the text with the accuracy on held-out problems before and after training, and the path of the report.

    Raises:
        ValueError: the metrics have fewer than two validations.
    """
    evaluated = [(int(line["step"]), 100 * line[ACCURACY]) for line in read_metrics(folder) if ACCURACY in line]
    if len(evaluated) < 2:
        raise ValueError(
            f"{folder / 'metrics.jsonl'} has {len(evaluated)} lines with {ACCURACY}; remove {folder} and run again"
        )
    (_, before), (last, after) = evaluated[0], evaluated[-1]
    return (
        f"\nRight answers to held-out problems: {before:.1f}% before, {after:.1f}% after {last} steps "
        f"({after - before:+.1f} points).\nReport of the run, to open in a browser: {folder / 'report.html'}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--agent", action="store_true", help="train an agent whose environment is a calculator")
    kinds.add_argument("--pictures", action="store_true", help="train a model that sees pictures")
    options = parser.parse_args()
    made, trained = (seeing_steps, SEEING) if options.pictures else (agent_steps, AGENT)
    sys.exit(main(made, trained) if options.agent or options.pictures else main())
