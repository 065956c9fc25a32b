"""The tiny world, warmed up once by the SFT pipeline, and helpers that start runs and inspect their results."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from roll.system.own_folder import PREFIX
from tests import limits

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny"
SMALL = (
    "rollout_batch_size=16",
    "eval_steps=0",
    "actor_infer.generating_args.seeded=true",
    "rewards.arithmetic.world_size=1",
    # Otherwise each vLLM process compiles the function that ranks sampled tokens. tests/engines/test_generate.py runs
    # it compiled.
    "+actor_infer.system_envs={TORCHDYNAMO_DISABLE: '1'}",
    "validation.data_args.file_name=few.jsonl",
)
FEW = 64
"""Number of held-out problems in a run's validation set."""


TIMED = ("time/", "throughput/", "memory/", "engine/", "run/")
"""Prefixes of metrics that may differ between otherwise equal runs."""
OWNED = re.compile(rf"{PREFIX}(\d+)-")
"""The name of a private folder, with the process id of its owner."""


@dataclass(frozen=True)
class Outcome:
    """What a run printed and how it ended."""

    status: int
    output: str
    """stdout and stderr, interleaved."""

    @property
    def last_line(self) -> str:
        return self.output.strip().splitlines()[-1]


@dataclass(frozen=True)
class World:
    """A folder with a model, problems and a warmed-up policy. It is the working directory of the runs."""

    folder: Path

    def start(self, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start `python -m roll.pipeline` in a new session, with additional environment variables."""
        command = [sys.executable, "-m", "roll.pipeline", *arguments]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ | dict(environment or {}),
        )

    def run(self, *arguments: str) -> Outcome:
        """Start a run and wait for its end."""
        return self.wait(self.start(*arguments))

    def wait(self, process: subprocess.Popen[str]) -> Outcome:
        """Wait for the end of a run."""
        output, _ = process.communicate(timeout=limits.RUN)
        return Outcome(process.returncode, output)

    def rlvr(self, name: str, *overrides: str) -> tuple[str, ...]:
        """Return the arguments of a small RLVR run with the output folder `name`."""
        return (
            "--config-name",
            "tiny/tiny_rlvr_lora_zero3",
            f"output_dir={name}",
            "pretrain=warm/export",
            *SMALL,
            *overrides,
        )

    def descendants(self, run: subprocess.Popen[str], title: str) -> list[psutil.Process]:
        """Return the processes of a run whose command line begins with this title."""
        found = []
        for child in psutil.Process(run.pid).children(recursive=True):
            with suppress(psutil.Error):  # it has ended
                found += [child] if " ".join(child.cmdline()).startswith(title) else []
        return found

    def working_rank(self, name: str, run: subprocess.Popen[str], role: str, rank: int) -> psutil.Process:
        """Wait until a rank is executing a call, and return its process. It is identified by the log file that is its
        stdout.
        """
        log, found = self.folder / name / "logs" / f"{role}-{rank}.log", list[psutil.Process]()

        def works() -> bool:
            assert run.poll() is None, f"the run ended: {run.communicate()[0]}"
            for process in self.descendants(run, "ray::Process.call"):
                with suppress(OSError):  # it has ended
                    found.extend([process] if log.samefile(f"/proc/{process.pid}/fd/1") else [])
            return bool(found)

        limits.until(works, f"rank {rank} of {role} executes a call")
        return found[0]

    def go_back(self, name: str, copy: str, last: int) -> None:
        """Copy a finished run's folder to `copy`, but without the checkpoint `step_<last>` and the export, as if it had
        been killed.
        """
        shutil.copytree(self.folder / name, self.folder / copy)
        shutil.rmtree(self.folder / copy / "checkpoints" / f"step_{last}")
        shutil.rmtree(self.folder / copy / "export")

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of a run's metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]

    def assert_same_steps(self, name: str, other: str) -> None:
        """Check that two runs have equal metrics, except for those with a prefix in `TIMED`."""
        expected, found = self.metrics(other), self.metrics(name)
        assert [line["step"] for line in found] == [line["step"] for line in expected]
        for before, after in zip(expected, found, strict=True):
            for metric, value in before.items():
                if not metric.startswith(TIMED):
                    assert after[metric] == pytest.approx(value, abs=1e-5, rel=1e-5), f"step {before['step']}: {metric}"

    def wait_for_step(self, name: str, step: int, process: subprocess.Popen[str]) -> None:
        """Wait until the run has logged a step."""
        path = self.folder / name / "metrics.jsonl"

        def is_logged() -> bool:
            assert process.poll() is None, f"the run ended before step {step}: {process.communicate()[0]}"
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            return any(json.loads(line)["step"] >= step for line in lines if line.endswith("\n"))

        limits.until(is_logged, f"{name} has logged step {step}", limits.RUN)


def engine_processes(driver: int) -> list[psutil.Process]:
    """Wait until a run has engines, and return their worker processes."""
    found = list[psutil.Process]()

    def looks() -> bool:
        found[:] = present_engines(driver)
        return bool(found)

    def names() -> list[str]:
        return [child.name() for child in psutil.Process(driver).children(recursive=True)]

    limits.until(looks, "an engine has a process of vLLM", found=names)
    return found


def present_engines(driver: int) -> list[psutil.Process]:
    """Return the worker processes of the engines that run now, which are ancestors of vLLM's processes."""
    found = list[psutil.Process]()
    for child in psutil.Process(driver).children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if "EngineCore" in child.name():
                # A process of vLLM outlives its worker for a moment.
                workers = [parent for parent in child.parents() if parent.name().startswith("ray::")]
                found += [worker for worker in workers[:1] if worker not in found]
    return found


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return the warmed-up tiny world. The warm-up is itself a run of the SFT pipeline."""
    folder = tmp_path_factory.mktemp("world")
    for script, name in (("make_model.py", "model"), ("make_problems.py", "problems")):
        subprocess.run(
            [sys.executable, str(TINY / script), f"output/tiny/{name}"], cwd=folder, check=True, timeout=limits.PROCESS
        )
    heldout = (folder / "output/tiny/problems/heldout.jsonl").read_text().splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join(heldout[:FEW]))
    tiny_world = World(folder)
    outcome = tiny_world.run("--config-name", "tiny/tiny_warm_up", "output_dir=warm", "max_steps=60")
    assert outcome.status == 0, outcome.output
    return tiny_world


@pytest.fixture
def leaves_nothing() -> Iterator[Callable[[], None]]:
    """Return a function that checks that no process, shared memory or temporary folder of the test is left on the
    machine.

    Other tests may run beside this one, as in `make test`. Their processes do not count, and a file that one of them
    makes after the test's end does not either.
    """
    processes, files = _processes(), _files()

    def check() -> None:
        made = _files() - files

        def left() -> set[str]:
            return (_processes() - processes) | (_files() & made)

        limits.until(lambda: not left(), "what the test started is gone", limits.END, left)

    yield check


def _in_container(pid: int) -> bool:
    """Return whether a process is in a different PID namespace. Such a process runs in a container and is not from a
    test.
    """
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    return False


def _of_other_tests(process: psutil.Process) -> bool:
    """Return whether another session of pytest started a process. An orphan may be from this one."""
    here = {psutil.Process(), *psutil.Process().parents()}
    with suppress(psutil.Error):
        for parent in process.parents():
            if parent in here:
                return False
            if "pytest" in " ".join(parent.cmdline()):
                return True
    return False


def _processes() -> set[str]:
    """Return the processes of Ray, vLLM, runs and rewards, without those of other tests."""
    names = (
        "ray::",
        "raylet",
        "gcs_server",
        "EngineCore",
        "VLLM",
        "roll.rewards.child",
        "roll.agents.environments.child",
        "roll.system.caretaker",
        "roll.system.survivors",
        "roll.pipeline",
    )
    found = set()
    for process in psutil.process_iter(["pid", "name", "cmdline"]):
        line = f"{process.info['name']} {' '.join(process.info['cmdline'] or ())}"
        if any(name in line for name in names) and not (_in_container(process.pid) or _of_other_tests(process)):
            found.add(f"{process.pid} {line[:120]}")
    return found


def _files() -> set[str]:
    """Return the files in shared memory, and the temporary folders of runs and of Ray, except those of others."""
    temporary = Path(os.environ.get("TMPDIR", "/tmp")).iterdir()
    found = {
        *Path("/dev/shm").iterdir(),
        *(path for path in temporary if path.name.startswith(("roll-", "ray"))),
    }
    return {str(path) for path in found if not _is_owned_elsewhere(path.name)}


def _is_owned_elsewhere(name: str) -> bool:
    """Return whether a folder with this name has a living owner that this session of pytest did not start.

    An owner that it did start, and that is an orphan by now, is itself among the processes that are left.
    """
    owner = OWNED.match(name)
    with suppress(psutil.Error):
        return owner is not None and psutil.Process() not in (one := psutil.Process(int(owner[1])), *one.parents())
    return False
