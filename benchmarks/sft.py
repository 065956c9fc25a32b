"""Compares supervised fine-tuning with plain DeepSpeed on the same batches. One call measures both.

    python benchmarks/sft.py [--model tiny|0.5b|1.5b|7b] [--devices 0] [--stage 1] [--lora-rank 32] [--json FILE]
        [KEY=VALUE ...]

A step trains on texts of many lengths that together fill 64 rows of 4,096 tokens (with the tiny model, which needs no
GPU, 8 rows of 256) and are packed by roll. The run uses `python -m roll.pipeline`, which receives KEY=VALUE. Then each
floor (the same training without roll, plain_sft.py) runs alone, with the batches of the run and the same recomputed and
compiled layers. Prints a table, and writes JSON if requested.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import string
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import launch, models
from benchmarks.figures import mfu
from benchmarks.work import SftWork
from roll.config.derived.model_shape import read_shape
from roll.data.packing import split_to_budget
from roll.system.sizes import GIB

WARM_UP = 3
"""Number of initial steps that are not counted: layers compile, and recomputation settles."""
TEXTS_A_ROW = 4
FLOORS = {"deepspeed": "plain DeepSpeed", "train": "torch alone"}


@dataclass(frozen=True)
class SftResult:
    """A run and its floors."""

    work: SftWork
    versions: dict[str, str]
    texts: int
    micro_batches: int
    """Number of packed rows per step, over all ranks."""
    lines: list[dict[str, Any]]
    """The metrics of every step."""
    floors: dict[str, list[float]]
    """Seconds of each counted step by floor, and under `<floor>_loss` the loss of every step."""

    def metric(self, name: str) -> float:
        """Return the median of a metric over the counted steps."""
        return statistics.median(line[name] for line in self.lines[WARM_UP:])

    @property
    def tokens(self) -> int:
        """Return the number of tokens per step as the run counts them. Every step trains on all texts."""
        return round(self.lines[-1]["throughput/tokens_per_second"] * self.lines[-1]["time/step"])

    @property
    def seconds(self) -> dict[str, float]:
        """Return the median seconds of roll's step, of its training part, and of each floor."""
        measured = {
            kind: statistics.median(self.floors[f"sft_{kind}"]) for kind in FLOORS if f"sft_{kind}" in self.floors
        }
        return {"step": self.metric("time/step"), "step_train": self.metric("time/train"), **measured}

    @property
    def ratio(self) -> float | None:
        """Return the seconds of roll's step divided by those of a plain DeepSpeed step, or None if plain DeepSpeed was
        not measured.
        """
        seconds = self.seconds
        return seconds["step"] / seconds["deepspeed"] if "deepspeed" in seconds else None

    def mfu(self, seconds: float) -> float | None:
        """See `figures.mfu`. Return None on the CPU."""
        work = self.work
        return mfu(work.shape, work.lora_rank > 0, self.tokens, seconds, len(work.devices)) if work.devices else None

    def speed(self, seconds: float) -> float:
        """Return the tokens per second of one GPU, or of one process on the CPU."""
        return self.tokens / seconds / self.work.train_ranks

    @property
    def loss_difference(self) -> dict[str, float]:
        """Return, for each floor, the largest difference between its loss and roll's loss in any step, in nats per
        token.
        """
        own = [line["sft/loss"] for line in self.lines]
        losses = {kind: self.floors.get(f"sft_{kind}_loss", []) for kind in FLOORS}
        return {
            kind: max(abs(a - b) for a, b in zip(own, found, strict=False)) for kind, found in losses.items() if found
        }

    def summary(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        seconds = self.seconds
        return {
            "work": asdict(self.work),
            "versions": self.versions,
            "texts": self.texts,
            "micro_batches": self.micro_batches,
            "tokens": self.tokens,
            "seconds": seconds,
            "tokens_per_second_per_device": {name: self.speed(value) for name, value in seconds.items()},
            "mfu": {name: self.mfu(value) for name, value in seconds.items()},
            "ratio": self.ratio,
            "loss_difference": self.loss_difference,
            "floors": self.floors,
            "lines": self.lines,
        }


def main() -> int:
    """Measure, print, and write JSON on request: after the run, and again with the floors."""
    launch.heed_sigterm()
    options = parse()
    with tempfile.TemporaryDirectory(prefix="roll-benchmark-", dir=options.scratch) as folder:
        work = work_of(options, folder)
        # In another process, because this one must hold no GPU memory.
        dtype = "float32" if work.dtype == "fp32" else "bfloat16"
        launch.run(
            ["-m", "benchmarks.models", options.model, work.model, "--dtype", dtype], folder, options.logs, "models"
        )
        texts = draw_texts(options.rows, work.token_budget, seed=0)
        (Path(work.model) / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        keys = overrides(work, options.steps, len(texts))
        lines = launch.pipeline("sft", keys, options.overrides, work, options.logs, "sft")
        work = replace(work, checkpointed=int(lines[-1]["memory/sft_train/checkpointed_layers"]))
        result = SftResult(work, launch.versions(), len(texts), packed_rows(work, texts), lines, {})
        launch.write(result.summary(), options.json)
        check_budget(result)
        for kind in floors_of(options, work):
            result = replace(result, floors=result.floors | launch.floor(work, f"sft_{kind}", options.logs))
    show(result)
    launch.write(result.summary(), options.json)
    return 0


def parse() -> argparse.Namespace:
    """Parse the command line and fill in defaults that depend on the model."""
    parser = launch.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="number of processes that train, on the CPU")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=1, help="ZeRO stage")
    parser.add_argument("--lora-rank", type=int, default=0, help="0 trains all parameters")
    parser.add_argument("--rows", type=int, help="packed rows per step, over all GPUs (default: 64, for tiny 8)")
    parser.add_argument(
        "--row-tokens", type=int, help="tokens per packed row, which is a micro-batch (default: 4096, for tiny 256)"
    )
    parser.add_argument("--steps", type=int, default=6, help=f"steps of the run; the first {WARM_UP} are not counted")
    parser.add_argument(
        "--repetitions", type=int, default=3, help="counted steps of each floor, after one warm-up step"
    )
    parser.add_argument(
        "--floors", help=f"floors to measure, out of {','.join(FLOORS)}; '' for none (default: those that apply)"
    )
    options = parser.parse_args()
    tiny = options.model == "tiny"
    launch.fill(options, {"rows": 8 if tiny else 64, "row_tokens": 256 if tiny else 4096})
    ranks = len(launch.device_list(options.devices)) or options.ranks
    if options.steps <= WARM_UP:
        parser.error(f"--steps {options.steps}: the first {WARM_UP} are not counted; give at least {WARM_UP + 1}")
    if options.rows * TEXTS_A_ROW % ranks:
        parser.error(
            f"--rows {options.rows}: {options.rows * TEXTS_A_ROW} texts cannot be divided evenly among {ranks} ranks; "
            f"change it"
        )
    return options


def work_of(options: argparse.Namespace, scratch: str) -> SftWork:
    """Return the work that the options describe. The number of recomputed layers is not known yet, because the run
    chooses it.
    """
    devices = launch.device_list(options.devices)
    return SftWork(
        model=f"{scratch}/model",
        shape=models.SHAPES[options.model],
        dtype="bf16" if devices else "fp32",
        devices=devices,
        train_ranks=len(devices) or options.ranks,
        token_budget=options.row_tokens,
        lora_rank=options.lora_rank,
        stage=options.stage,
        repetitions=options.repetitions,
        scratch=scratch,
        checkpointed=0,
    )


def draw_texts(rows: int, row_tokens: int, seed: int) -> list[str]:
    """Return texts of random letters, one token each. A text fills about 0.06 to 0.44 of a row.

    All texts together, with their end tokens, fill `rows` rows.
    """
    generator = random.Random(seed)
    shares = list(accumulate(generator.uniform(0.25, 1.75) for _ in range(rows * TEXTS_A_ROW)))
    ends = [0] + [round(share / shares[-1] * rows * row_tokens) for share in shares]
    return ["".join(generator.choices(string.ascii_lowercase, k=end - begin - 1)) for begin, end in pairwise(ends)]


def packed_rows(work: SftWork, texts: list[str]) -> int:
    """Return the number of micro-batches per step. The order of the texts does not matter, because the longest are
    packed first.
    """
    shape = read_shape(Path(work.model) / "config.json")
    assert shape, "the shape of a benchmark's model is known"
    return (
        split_to_budget(
            [len(text) + 1 for text in texts], work.train_ranks, work.token_budget, shape.attention_cost
        ).forwards
        * work.train_ranks
    )


def overrides(work: SftWork, steps: int, texts: int) -> dict[str, Any]:
    """Return the experiment's keys for the work. A step is an epoch: all steps train on the same texts, shuffled."""
    keys: dict[str, Any] = {
        "output_dir": f"{work.scratch}/run",
        "pretrain": work.model,
        "max_steps": steps,
        "prompt_length": work.token_budget // 2,
        "response_length": work.token_budget - work.token_budget // 2,
        "sft_train.model_args.dtype": work.dtype,
        "sft_train.training_args.per_device_train_batch_size": texts // work.train_ranks,
        "sft_train.training_args.num_train_epochs": steps,
        "sft_train.strategy_args.strategy_config.zero_optimization.stage": work.stage,
        "sft_train.max_tokens_per_microbatch": work.token_budget,
        "sft_train.device_mapping": f"[{','.join(map(str, work.devices))}]" if work.devices else "null",
    }
    if work.lora_rank:
        lora = {"lora_target": "all-linear", "lora_rank": work.lora_rank, "lora_alpha": 32}
        keys |= {f"sft_train.model_args.{name}": value for name, value in lora.items()}
    if not work.devices:
        threads = max(1, (os.cpu_count() or 1) // work.train_ranks)  # The floors use the same number.
        keys |= {"sft_train.world_size": work.train_ranks, "sft_train.system_envs.OMP_NUM_THREADS": f'"{threads}"'}
    return keys


def floors_of(options: argparse.Namespace, work: SftWork) -> list[str]:
    """Return the floors to measure. `train` (torch alone) needs a single process and unsharded weights."""
    if options.floors is not None:
        return options.floors.split(",") if options.floors else []
    return list(FLOORS) if work.train_ranks == 1 and work.stage < 3 else ["deepspeed"]


def check_budget(result: SftResult) -> None:
    """Check that the run used the same micro-batches as the floors.

    Raises:
        SystemExit: the run made micro-batches smaller for lack of memory.
    """
    found = int(result.lines[-1]["memory/sft_train/token_budget"])
    if found != result.work.token_budget:
        raise SystemExit(
            f"the run lowered its micro-batches to {found} tokens for lack of memory: give --row-tokens {found}"
        )


def show(result: SftResult) -> None:
    """Print one table of the step and its floors, and one of the other figures."""
    work, seconds, console = result.work, result.seconds, Console(width=100)
    size = (
        f"{result.texts} texts, {result.tokens:,} tokens in {result.micro_batches} rows of at most "
        f"{work.token_budget:,}"
    )
    table = Table(title=f"{size}, {work.train_ranks} rank(s), ZeRO-{work.stage}")
    for column in (
        "one step",
        "seconds",
        "tokens/s per " + ("GPU" if work.devices else "process"),
        "MFU",
        "ratio of roll's step to it",
    ):
        table.add_column(column, justify="left" if column == "one step" else "right")
    for name, title in {"step": "roll, whole step", "step_train": "roll, training only", **FLOORS}.items():
        if name in seconds:
            share = result.mfu(seconds[name])
            cells = (
                f"{seconds[name]:.3f}",
                f"{result.speed(seconds[name]):,.0f}",
                f"{100 * share:.1f}%" if share else "-",
            )
            table.add_row(title, *cells, f"{seconds['step'] / seconds[name]:.3f}")
    console.print(table)
    beside = Table(show_header=False)
    beside.add_row("recomputed layers", f"{work.checkpointed} of {work.shape['num_hidden_layers']}")
    beside.add_row("peak memory of roll's trainer", f"{result.metric('memory/sft_train/peak_bytes') / GIB:.2f} GiB")
    beside.add_row(
        "loss of roll's first and last step", f"{result.lines[0]['sft/loss']:.4f}, {result.lines[-1]['sft/loss']:.4f}"
    )
    for kind, difference in result.loss_difference.items():
        beside.add_row(f"largest difference in loss, {FLOORS[kind]} and roll", f"{difference:.2g}")
    console.print(beside)


if __name__ == "__main__":
    sys.exit(main())
