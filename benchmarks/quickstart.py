"""Runs the quickstart's experiments at their real shapes and lengths, on a GPU with limited free memory.

    python benchmarks/quickstart.py [--gib 22] [--steps 3] [--only gsm8k_rlvr,gsm8k_sft] [--logs FOLDER] [--json FILE]
        [KEY=VALUE ...]

The models have random weights in the shapes of Qwen2.5-0.5B and 1.5B. Every row is nearly as long as its experiment
allows, so real rows need no more memory. This process first allocates all GPU memory except `--gib` GiB, so that a run
fails if a GPU of that size would be too small. It then measures the peak GPU memory of all processes of each run
together, including CUDA contexts, for comparison with the plan's estimate. KEY=VALUE is passed to every experiment. The
exit status is 1 if a run fails, takes too few steps or has a metric that is not finite.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import launch, models
from roll.system.sizes import GIB

GPU_GIB = 24
"""Memory of the GPU for which the experiments are written, in GiB."""
LOOK_SECONDS = 0.05
"""Seconds between two readings of the GPU's free memory."""
OVERHEAD = 80
"""Largest number of tokens that the chat template adds to a message."""
ROWS = {"train": 512, "validation": 32}
MESSAGES = 4
"""Number of messages of a conversation."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """An experiment of the quickstart."""

    name: str
    learner: str
    folder: str
    """Name of its data set's folder in `data/`."""
    kind: str
    """Kind of its rows: `problem`, `pair` or `conversation`."""
    prompt: int
    response: int
    """Largest number of tokens of a response. `prompt` is the corresponding limit for a prompt."""
    further: tuple[str, ...] = ()
    """Further overrides, as KEY=VALUE."""


EXPERIMENTS = (
    Experiment("gsm8k_rlvr", "actor_train", "gsm8k", "problem", 512, 512),
    Experiment("gsm8k_sft", "sft_train", "gsm8k", "problem", 512, 512),
    Experiment(
        "gsm8k_distill", "student", "gsm8k", "problem", 512, 512, ("teacher.model_args.model_name_or_path=1.5b",)
    ),
    Experiment("ultrafeedback_dpo", "actor_train", "ultrafeedback", "pair", 1024, 1024),
    Experiment("ultrafeedback_reward_model", "reward_train", "ultrafeedback", "pair", 1024, 1024),
    Experiment("capybara_sft", "sft_train", "capybara", "conversation", 3072, 1024),
)


@dataclass(frozen=True)
class Measured:
    """Measurements of one run of an experiment."""

    name: str
    status: int
    peak_gib: float
    """Peak GPU memory of all processes of the run together, in GiB."""
    seconds: float
    """Seconds from the start to the end of the command."""
    step_seconds: float | None
    """Seconds of the last step. None if the run completed no step."""
    finite: bool
    """Whether the run completed all steps and no metric is NaN or infinite."""


def main() -> int:
    """Run the experiments one after the other, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gib", type=float, default=22.0, help="GPU memory that the runs can use, in GiB (default: 22)"
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--only", type=named, default=EXPERIMENTS, metavar="NAME,...", help="experiments to run (default: all)"
    )
    parser.add_argument("--logs", type=Path, help="folder for the output of the runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    launch.heed_sigterm()
    with tempfile.TemporaryDirectory(prefix="quickstart-") as scratch:
        folder = Path(scratch)
        chosen = [replace(one, further=(*one.further, *options.overrides)) for one in options.only]
        prepare(folder, chosen)
        with occupied(options.gib) as memory:
            found = [measure(one, folder, memory, options.gib, options.steps, options.logs) for one in chosen]
    show(found, options.gib)
    launch.write(
        {"device": torch.cuda.get_device_name(), "gib": options.gib, "runs": [asdict(one) for one in found]},
        options.json,
    )
    return int(any(one.status or not one.finite for one in found))


def named(names: str) -> list[Experiment]:
    """Return the experiments with these names, which are separated by commas.

    Raises:
        ArgumentTypeError: no experiment has one of the names.
    """
    known = {one.name: one for one in EXPERIMENTS}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"there is no experiment {', '.join(unknown)}; give some of {', '.join(known)}"
        )
    return [known[name] for name in names.split(",")]


def prepare(folder: Path, chosen: Sequence[Experiment]) -> None:
    """Write the models of the experiments, and their data sets with the columns that their configurations name."""
    for shape in ["0.5b", *(["1.5b"] if any(one.name == "gsm8k_distill" for one in chosen) else [])]:
        models.write(folder / shape, shape, prompts=1)
    generator = random.Random(0)
    for one in {one.folder: one for one in chosen}.values():
        for split, count in ROWS.items():
            file = folder / "data" / one.folder / f"{split}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(row(one, generator)) + "\n" for _ in range(count)))


def row(experiment: Experiment, generator: random.Random) -> Row:
    """Return a row of random letters, one token each, that is nearly as long as the experiment allows."""

    def letters(count: int) -> str:
        return "".join(generator.choices(string.ascii_lowercase, k=count))

    prompt, response = experiment.prompt - OVERHEAD, experiment.response - OVERHEAD
    if experiment.kind == "problem":
        return {"prompt": letters(prompt), "response": letters(response), "ground_truth": "0", "tag": "math_rule"}
    if experiment.kind == "pair":
        return {
            "messages": [{"role": "user", "content": letters(prompt)}],
            "chosen": letters(response),
            "rejected": letters(response),
        }
    lengths = [prompt // (MESSAGES - 1) - OVERHEAD] * (MESSAGES - 1) + [response]
    roles = ("user", "assistant") * (MESSAGES // 2)
    return {
        "messages": [{"role": role, "content": letters(length)} for role, length in zip(roles, lengths, strict=True)]
    }


@dataclass
class FreeMemory:
    """Free memory of the GPU, which a thread reads repeatedly."""

    least: int
    """Smallest number of free bytes since the last `reset`."""

    def reset(self) -> int:
        """Start a new measurement. Return the number of bytes that are free now."""
        self.least = torch.cuda.mem_get_info()[0]
        return self.least


@contextmanager
def occupied(gib: float) -> Iterator[FreeMemory]:
    """Allocate the GPU's memory except `gib` GiB while the block lasts. Yield the measurement of the free memory.

    Raises:
        SystemExit: less than `gib` GiB is free.
    """
    torch.zeros(1, device="cuda")
    ballast = list[torch.Tensor]()
    surplus = torch.cuda.mem_get_info()[0] - int(gib * GIB)
    if surplus < 0:
        raise SystemExit(
            f"the GPU has only {torch.cuda.mem_get_info()[0] / GIB:.1f} GiB of free memory; give a smaller --gib"
        )
    ballast.append(torch.empty(surplus, dtype=torch.uint8, device="cuda"))
    memory, ended = FreeMemory(torch.cuda.mem_get_info()[0]), threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_SECONDS):
            memory.least = min(memory.least, torch.cuda.mem_get_info()[0])

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield memory
    finally:
        ended.set()
        thread.join()
        ballast.clear()
        torch.cuda.empty_cache()


def command(experiment: Experiment, gib: float, steps: int) -> list[str]:
    """Return the experiment's command, with the random models in place of the models from the Hub."""
    total = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else int(GPU_GIB * GIB)
    words = ["-m", "roll.pipeline", "--config-name", experiment.name, f"output_dir={experiment.name}", "pretrain=0.5b"]
    words += [
        f"max_steps={steps}",
        f"eval_steps={steps}",
        "save_steps=0",
        f"{experiment.learner}.data_args.template=chatml",
    ]
    words += ["validation.data_args.template=chatml", *experiment.further]
    if experiment.name == "gsm8k_rlvr":  # scale the experiment's fraction of 0.7 to the memory that is left
        share = "actor_infer.strategy_args.strategy_config.gpu_memory_utilization"
        words.append(f"{share}={0.7 * gib * GIB / total:.4f}")
    return words


def measure(
    experiment: Experiment, folder: Path, memory: FreeMemory, gib: float, steps: int, logs: Path | None
) -> Measured:
    """Run an experiment, and return its measurements."""
    before, began = memory.reset(), time.monotonic()
    words, environment = [sys.executable, *command(experiment, gib, steps)], launch.environment(str(folder))
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    seconds, peak = time.monotonic() - began, (before - memory.least) / GIB
    if logs:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{experiment.name}.log").write_text(done.stdout + done.stderr)
    file = folder / experiment.name / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    if done.returncode:
        print(
            f"{experiment.name} failed with status {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}",
            flush=True,
        )
    shutil.rmtree(folder / experiment.name, ignore_errors=True)
    taken = [line for line in lines if line["step"] > 0]
    print(f"{experiment.name}: status {done.returncode}, {len(taken)} steps, {peak:.2f} GiB", flush=True)
    last = taken[-1]["time/step"] if taken else None
    return Measured(
        experiment.name, done.returncode, peak, seconds, last, len(taken) == steps and all(map(finite, taken))
    )


def finite(metrics: Mapping[str, Any]) -> bool:
    """Return whether every number of a step is finite. `metrics.jsonl` has null in place of other numbers."""
    return None not in metrics.values()


def show(found: Sequence[Measured], gib: float) -> None:
    """Print a table of the runs."""
    table = Table("experiment", "status", "peak, GiB", "last step, s", "whole command, s", title=f"of {gib:g} GiB")
    for one in found:
        step = f"{one.step_seconds:.1f}" if one.step_seconds is not None else "-"
        table.add_row(one.name, str(one.status), f"{one.peak_gib:.2f}", step, f"{one.seconds:.0f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    sys.exit(main())
