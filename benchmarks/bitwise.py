"""Measures how far a vLLM engine and roll's trainer agree, down to the bit, and what would make them agree.

    python benchmarks/bitwise.py [--model tiny|0.5b|1.5b|7b] [--dtype bf16|fp32] [--prompts 64] [--prompt-tokens 128]
        [--response-tokens 96] [--engines today,invariant,...] [--scratch FOLDER] [--json FILE]

Engines of roll with different settings sample from the same random model: as today, with logits in fp32, and batch
invariant in four ways. Each samples all prompts together, again, and some alone. Then the trainer scores the
sampled tokens: as roll does, also with `engine_kernels`, and with one operation after the other computed by the kernel
that a batch-invariant engine uses. At the end, each operation of vLLM's model is compared with the trainer's.

All processes start at the same time, on one GPU if there is one; each measures alone. What was measured is also
reported if the benchmark is cut. The norm before the head is larger than in a new model, so that logits spread like
those of a trained one. What needs a GPU is left out without one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import models
from benchmarks.bitwise_work import ENGINES, LOOK_EVERY, NEED_GPU, Difference, Repeat, Work
from benchmarks.launch import environment, heed_sigterm

SPREAD = 3.0
"""Standard deviation of the logits."""
TRAINER, LAYERS = "trainer", "layers"
MEASURE_SECONDS, END_SECONDS = 300.0, 20.0
"""Seconds within which a process must have measured, and have ended. One that is late is ended."""


def write_model(folder: Path, shape: str, dtype: str) -> None:
    """Write a random model whose logits have the standard deviation `SPREAD`, and its tokenizer."""
    model: Any = models.build_model(shape, seed=0, dtype={"bf16": "bfloat16", "fp32": "float32"}[dtype])
    width = models.SHAPES[shape]["hidden_size"]
    with torch.no_grad():
        model.model.norm.weight.fill_(SPREAD / (models.STANDARD_DEVIATION * width**0.5))
    model.save_pretrained(folder)
    models.build_tokenizer(models.SHAPES[shape]["vocab_size"]).save_pretrained(folder)


class Part:
    """A process of the benchmark. Its output is in LOGS/NAME.log."""

    def __init__(self, folder: Path, logs: Path, name: str, module: str, *words: str) -> None:
        self.name, self._folder, self._log = name, folder, logs / f"{name}.log"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"benchmarks.{module}", str(folder), *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(str(folder)),
            )

    def wait_ready(self, until: float) -> None:
        """Wait until the process can measure, or has ended. End it at `until`, a time of the monotonic clock."""
        while not (self._folder / f"{self.name}.ready").exists() and self._process.poll() is None:
            if time.monotonic() > until:
                self.end()
            time.sleep(LOOK_EVERY)

    def measure(self) -> str | None:
        """Let the process measure, and wait for its end. Return the last line of its output if it failed."""
        (self._folder / f"{self.name}.go").touch()
        try:
            if self._process.wait(MEASURE_SECONDS) == 0:
                return None
        except subprocess.TimeoutExpired:
            self.end()
            return f"it did not measure within {MEASURE_SECONDS:g} s"
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no output")

    def interrupt(self) -> None:
        """Let the process end if it is still alive."""
        if self._process.poll() is None:
            self._process.terminate()

    def end(self) -> None:
        """End the process if it is still alive."""
        self.interrupt()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()


def measured(
    folder: Path, logs: Path, engines: Sequence[str], start_seconds: float
) -> Iterator[tuple[str, str | None]]:
    """Run all processes. Yield the name of each that has measured, and its error if it failed."""
    with ExitStack() as stack:
        parts = [Part(folder, logs, name, "bitwise_engine", name) for name in engines]
        parts += [Part(folder, logs, TRAINER, "bitwise_trainer", *engines)]
        parts += [Part(folder, logs, LAYERS, "bitwise_layers")]
        for part in parts:
            stack.callback(part.end)
        for part in parts:
            stack.callback(part.interrupt)  # called before the others: all end at the same time
        until = time.monotonic() + start_seconds
        for part in parts:
            part.wait_ready(until)
        print(f"ready after {time.monotonic() - until + start_seconds:.0f} s", flush=True)
        for part in parts:
            yield part.name, part.measure()


def read_engines(folder: Path, engines: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return by engine the seconds, and how it agrees with itself."""
    out: dict[str, dict[str, Any]] = {}
    for name in engines:
        if not (folder / f"{name}.npz").exists():
            continue
        found = np.load(folder / f"{name}.npz")
        ids, log_probs = found["together_ids"], found["together_log_probs"]
        out[name] = {"seconds": float(found["seconds"]), "tokens": ids.size}
        for way in ("again", "alone"):
            count = len(found[f"{way}_ids"])
            repeat = Repeat.of(ids[:count], log_probs[:count], found[f"{way}_ids"], found[f"{way}_log_probs"])
            out[name][way] = asdict(repeat)
    return out


def engine_table(engines: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the table of the engines: their speed, and whether they repeat themselves."""
    table = Table(title="Engines: equal to themselves with the same seeds")
    columns = ("tokens/s", "again: responses", "tokens", "largest", "alone: responses", "tokens", "largest")
    for column in ("engine", *columns):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for name, found in engines.items():
        cells = [f"{found['tokens'] / found['seconds']:,.0f}"]
        for way in ("again", "alone"):
            repeat = Repeat(**found[way])
            cells += [f"{repeat.same_tokens:.2%}", f"{repeat.same_log_probs:.2%}", f"{repeat.largest:.2g}"]
        table.add_row(name, *cells)
    return table


def trainer_table(measured: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the table of engine and trainer: one row for each engine and each way to score."""
    table = Table(title="Engine and trainer: differences of log-probs in nats")
    columns = ("largest", "mean", "KL", "equal", "scoring s", "again equal", "alone equal")
    for column in ("engine", "trainer", *columns):
        table.add_column(column, justify="left" if column in ("engine", "trainer") else "right")
    for engine, ways in measured.items():
        for number, (way, found) in enumerate(ways.items()):
            apart = Difference(**found["difference"])
            cells = [f"{apart.largest:.2g}", f"{apart.mean:.2g}", f"{apart.kl:.2g}", f"{apart.equal:.2%}"]
            cells += [f"{found['seconds']:.3f}", f"{found['again_equal']:.2%}", f"{found['alone_equal']:.2%}"]
            table.add_row("" if number else engine, way, *cells)
        table.add_section()
    return table


def kinds_that_differ(operations: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the operations whose results differ in some layer by kind, in the order in which they first differ."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for one in operations:
        if one["equal"] < 1:
            kinds.setdefault(one["operation"].partition(", ")[2] or one["operation"], []).append(one)
    return kinds


def print_operations(operations: Sequence[Mapping[str, Any]]) -> None:
    """Print which operations differ. The first line is about the operation that differs first."""
    kinds = kinds_that_differ(operations)
    differ = sum(map(len, kinds.values()))
    print(f"operations: {len(operations) - differ} of {len(operations)} results are equal bit for bit")
    for kind, found in kinds.items():
        first = found[0]
        share = f"{first['equal']:.2%} equal, largest difference {first['largest']:.2g}"
        print(f"  {kind}: differs {len(found)} times, first: {first['operation']}, {share}")


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=models.DENSE, default="tiny")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--response-tokens", type=int, default=96)
    parser.add_argument("--alone", type=int, default=4, help="prompts that are also answered and scored alone")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a micro-batch of the trainer")
    parser.add_argument("--engines", default=",".join(ENGINES), help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--start-seconds", type=float, default=240.0, help="a process that starts later is ended")
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--logs", type=Path, help="folder for the output of the processes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    asked = [name for name in options.engines.split(",") if name]
    engines = [name for name in asked if on_gpu or name not in NEED_GPU]
    for name in asked:
        if name not in engines:
            print(f"{name}: left out: vLLM's batch-invariant kernels need a GPU")
    heed_sigterm()
    with (
        tempfile.TemporaryDirectory(dir=options.scratch, prefix="bitwise-") as scratch,
        tempfile.TemporaryDirectory(prefix="roll-") as sockets,
    ):
        os.environ["TMPDIR"] = sockets  # of vLLM's processes, which leave files there; a socket's path must be short
        folder, logs = Path(scratch), options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        write_model(folder / "model", options.model, options.dtype)
        Work(
            str(folder / "model"),
            options.dtype,
            "cuda" if on_gpu else "cpu",
            options.prompts,
            options.prompt_tokens,
            options.response_tokens,
            options.alone,
            options.budget,
            models.SHAPES[options.model]["vocab_size"],
            seed=0,
        ).write(folder)
        begin = time.monotonic()
        missing = dict.fromkeys((*engines, TRAINER, LAYERS), "the benchmark was cut")
        try:
            for name, error in measured(folder, logs, engines, options.start_seconds):
                missing[name] = error or ""
                print(f"{time.monotonic() - begin:.0f} s: {name}: {error or 'measured'}", flush=True)
        finally:  # also when it is cut: what was measured is not lost
            missing = {name: error for name, error in missing.items() if error}
            report(folder, engines, missing, time.monotonic() - begin, options)


def report(
    folder: Path, engines: Sequence[str], missing: Mapping[str, str], seconds: float, options: argparse.Namespace
) -> None:
    """Print the tables of what was measured, and write it."""
    console = Console(width=160)
    found: dict[str, Any] = {"missing": dict(missing), "engines": read_engines(folder, engines)}
    console.print(engine_table(found["engines"]))
    if (file := folder / f"{TRAINER}.json").exists():
        trainer = json.loads(file.read_text())
        found["trainer"], missing = trainer["measured"], {**missing, **trainer["failed"]}
        console.print(trainer_table(found["trainer"]))
    if (file := folder / f"{LAYERS}.json").exists():
        found["layers"] = json.loads(file.read_text())
        print_operations(found["layers"])
    for name, error in missing.items():
        print(f"{name}: missing: {error}")
    print(f"{options.model}, {options.dtype}, {options.prompts} prompts, all in {seconds:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
