"""Compiling an extension with DeepSpeed and torch, after a process that compiled it was killed."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder
from torch.utils import cpp_extension

from roll.backend import Rank
from roll.system.signs import MARK
from roll.training.deepspeed import score as deepspeed_infer
from roll.training.deepspeed import strategy as deepspeed_train
from roll.training.deepspeed.extension_locks import LOCK, OWNER
from roll.training.deepspeed.score import DeepSpeedScore
from roll.training.deepspeed.setup import compiling_in_turn
from roll.training.deepspeed.strategy import DeepSpeedTrain
from tests import limits

AT_ONCE = Rank("actor_train", 0, 1, "", 0, "cpu", limits.EXPIRY, start_timeout=limits.NONE)
"""A rank whose start deadline has already expired: it gives up instead of waiting."""
NAME = "tiny_op"
SOURCE = f"""
#include <Python.h>
static PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "{NAME}"}};
PyMODINIT_FUNC PyInit_{NAME}() {{ return PyModule_Create(&definition); }}
"""
COMPILER = """#!/bin/sh
case "$*" in *" -c "*) touch "$0.runs"; exec sleep 60;; esac
exec c++ "$@"
"""
"""A compiler that never finishes."""


class TinyBuilder(CPUOpBuilder):
    """A DeepSpeed op that compiles in less than a second, because it includes none of torch's headers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(NAME)
        self._source = folder / "tiny.cpp"
        self._source.write_text(SOURCE)

    def absolute_name(self) -> str:
        return NAME

    def sources(self) -> list[str]:
        return [str(self._source)]

    def include_paths(self) -> list[str]:
        return []

    def cxx_args(self) -> list[str]:
        return []

    def is_compatible(self, verbose: bool = False) -> bool:
        return True


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def _load(cache: Path, log: Path, guarded: bool) -> None:
    logging.basicConfig(filename=log, level=logging.WARNING, force=True)
    try:
        if guarded:
            with compiling_in_turn(AT_ONCE):
                assert TinyBuilder(cache).load().__name__ == NAME
        else:
            TinyBuilder(cache).load()
    except TimeoutError as error:
        logging.error("%s", error)
        os._exit(3)


def start(cache: Path, log: Path, guarded: bool = True) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=_load, args=(cache, log, guarded))
    process.start()
    return process


def load(cache: Path, log: Path) -> int | None:
    """Load the op in another process, which compiles it if necessary. Return its exit status: 3 for a TimeoutError,
    None if it hung.
    """
    process = start(cache, log)
    process.join(limits.CALL)
    status = process.exitcode
    process.kill()
    process.join()
    return status


def test_a_stale_lock_makes_no_start_wait(cache: Path, tmp_path: Path) -> None:
    lock, log = cache / NAME / LOCK, tmp_path / "log"
    assert load(cache, log) == 0
    assert log.read_text() == ""
    lock.touch()
    blocked = start(cache, log, guarded=False)
    try:
        blocked.join(limits.EXPIRY)
        assert blocked.is_alive(), "without roll, torch waits for the stale lock"
    finally:
        blocked.kill()
        blocked.join()
    assert load(cache, log) == 0
    assert f"actor_train rank 0 removed a lock: {lock} " in log.read_text()
    assert not lock.exists() and (cache / NAME / f"{NAME}.so").exists()


def pids_of(processes: Sequence[psutil.Process], name: str) -> list[int]:
    """Return the ids of the processes with this name; a process that has ended is skipped."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found += [process.pid] * (process.name() == name)
    return found


def test_lock_of_killed_compiler_is_cleared(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lock, log, compiler = cache / NAME / LOCK, tmp_path / "log", tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    compiling, started = start(cache, log), []
    try:
        limits.until(compiler.with_suffix(".runs").exists, "the compiler runs and the lock is held")
        assert compiling.pid and lock.exists() and str(compiling.pid) in (cache / NAME / OWNER).read_text()
        started = psutil.Process(compiling.pid).children(recursive=True)
        ninjas = pids_of(started, "ninja")
        os.kill(compiling.pid, signal.SIGKILL)
        compiling.join()
        monkeypatch.delenv("CXX")
        assert load(cache, log) == 3
        assert any(f"process {ninja} (" in log.read_text() for ninja in ninjas) and lock.exists()
        stages = [line for line in capfd.readouterr().out.splitlines() if line.startswith(MARK)]
        assert stages[0] == f"{MARK}compiling {NAME}" and stages[1].startswith(
            f"{MARK}waiting to compile {NAME}: process "
        )
    finally:
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        compiling.kill()
    psutil.wait_procs(started, limits.CALL)
    assert load(cache, log) == 0
    assert f"removed a lock: {lock} " in log.read_text() and not (cache / NAME / OWNER).exists()


@pytest.mark.parametrize(("module", "strategy"), [(deepspeed_train, DeepSpeedTrain), (deepspeed_infer, DeepSpeedScore)])
def test_deepspeed_strategy_compiles_in_turn(module: Any, strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles_by: list[Any] = []

    def join(rank: Rank) -> None:
        compiles_by.append(cpp_extension.load)
        raise InterruptedError

    torchs_own = cpp_extension.load
    monkeypatch.setattr(cpp_extension, "load", torchs_own)  # so that it is restored after the test
    monkeypatch.setattr(module, "join_process_group", join)
    with pytest.raises(InterruptedError):
        strategy(None, AT_ONCE)
    assert compiles_by[0].__module__ == compiling_in_turn.__module__
