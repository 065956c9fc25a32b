"""Helpers for runs on GPUs: small models with random weights, and the pipeline in a separate process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import models
from tests import limits

ROOT = Path(__file__).parents[2]
PROMPTS, PROMPT_TOKENS = 64, 32


@dataclass(frozen=True)
class Run:
    """A run of the pipeline in a separate process, whose output is in a file."""

    folder: Path
    log: Path
    process: subprocess.Popen[bytes]
    began: float
    say: Callable[[str], None]

    def metrics(self) -> list[dict[str, Any]]:
        """Wait for the end of the run, which must be a success. Return the metrics of its steps, including step 0."""
        assert self.process.wait(limits.RUN) == 0, self.said(8000)
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def said(self, characters: int) -> str:
        """Return the end of the output so far."""
        return self.log.read_text(errors="replace")[-characters:]

    def end(self) -> None:
        """End the run if it has not ended, and say how long it took. Of one that had to be ended, say where it was."""
        status, seconds = self.process.poll(), limits.now() - self.began
        ended = "cut" if status is None else f"ended with status {status}"
        self.say(f"{self.folder.name}: {ended} after {seconds:.0f} s")
        if status is not None:
            return
        self.say(self.said(1000))
        self.process.terminate()
        try:
            self.process.wait(limits.END)
        except subprocess.TimeoutExpired:
            self.process.kill()


@dataclass(frozen=True)
class Runs:
    """A folder that is the working directory of runs."""

    folder: Path
    say: Callable[[str], None]
    """Is told where the output of a run is, and how long it took."""

    @contextmanager
    def started(self, name: str, experiment: tuple[str, ...], overrides: Mapping[str, Any]) -> Iterator[Run]:
        """Start the pipeline with the output folder `name`. The run is ended with the context."""
        keys = [f"{key}={value}" for key, value in {"output_dir": name, **overrides}.items()]
        places = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
        command, log = [sys.executable, "-m", "roll.pipeline", *experiment, *keys], self.folder / f"{name}.log"
        with open(log, "wb") as out:
            process = subprocess.Popen(
                command, cwd=self.folder, env=os.environ | places, stdout=out, stderr=subprocess.STDOUT
            )
        run = Run(self.folder / name, log, process, limits.now(), self.say)
        try:
            self.say(f"{name}: output in {log}")
            yield run
        finally:
            run.end()

    def run(self, name: str, experiment: tuple[str, ...], overrides: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Run the pipeline with the output folder `name`. Return the metrics of its steps, including step 0."""
        with self.started(name, experiment, overrides) as run:
            return run.metrics()

    def run_twice(
        self, names: tuple[str, str], experiment: tuple[str, ...], overrides: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Make the same run twice at the same time, with these output folders. Return the metrics of both."""
        with (
            self.started(names[0], experiment, overrides) as one,
            self.started(names[1], experiment, overrides) as two,
        ):
            return one.metrics(), two.metrics()


def say_at_once(capture: Any, text: str) -> None:
    """Print past pytest's capture, so that the text is there when the session is cut."""
    with capture.global_and_fixture_disabled():
        print(f"\n{text}", flush=True)


def interrupt(*_: object) -> None:
    """Take a signal as Ctrl-C: tests end what they have started, and pytest says where it was."""
    raise KeyboardInterrupt


@pytest.fixture(scope="session", autouse=True)
def ends_by_sigterm() -> Iterator[None]:
    """Let SIGTERM interrupt the tests."""
    before = signal.signal(signal.SIGTERM, interrupt)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Runs:
    """Return the folder of all runs of a test session."""
    capture = pytestconfig.pluginmanager.get_plugin("capturemanager")
    return Runs(tmp_path_factory.mktemp("runs"), partial(say_at_once, capture))


@pytest.fixture(scope="session")
def models_by_dtype(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of a small model with prompts for each dtype, `bf16` and `fp32`."""
    folder = tmp_path_factory.mktemp("models")
    for short, dtype in (("bf16", "bfloat16"), ("fp32", "float32")):
        models.write(folder / short, "tiny", PROMPTS, PROMPT_TOKENS, dtype=dtype)
    return {"bf16": folder / "bf16", "fp32": folder / "fp32"}


def need_devices(count: int) -> None:
    """Skip the test if there are fewer than `count` GPUs."""
    import torch

    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, but torch can use only {torch.cuda.device_count()}")


def write_qwen(folder: Path, **shape: Any) -> Path:
    """Write a Qwen2 with random weights, tied embeddings, a vocabulary of 2,048 and a byte tokenizer. Return its
    folder.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from examples.tiny.make_model import build_tokenizer

    config = Qwen2Config(vocab_size=2048, max_position_embeddings=1024, tie_word_embeddings=True, **shape)
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder
