"""Runs several commands at a time, each in a process of its own, and ends all of them with this one."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType

from roll.errors import ConfigError, Fault
from roll.system.command import SIGNALS
from roll.system.orphans import die_with

TICK = 0.2
"""Longest time until a signal or the end of a process is noticed, in seconds."""
GRACE = 60.0
"""Seconds that processes have to end by themselves, if an error ends this one."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Command:
    """A command, with the bytes that it reads from standard input."""

    words: Sequence[str]
    given: bytes = b""


@dataclass
class _Running:
    """A command that runs."""

    number: int
    slot: int
    """No two running commands have the same slot, a number below the largest number of them."""
    process: subprocess.Popen[bytes]
    pending: bytes = field(default=b"")
    """Output after the last end of a line."""


def slot_environments(most: int, gpus: int, environment: Mapping[str, str], present: int) -> list[dict[str, str]]:
    """Return the variables of each slot, so that commands that run side by side have GPUs of their own.

    Args:
        most: Number of slots.
        gpus: Number of GPUs that each command uses.
        environment: Variables of this process.
        present: Number of GPUs of this host.

    Raises:
        ConfigError: the commands would share a cluster, or this host has too few GPUs for them.
    """
    if not gpus:
        return [{} for _ in range(most)]
    if environment.get("RAY_ADDRESS"):
        problem = f"{most}, but RAY_ADDRESS is set: all runs would join that cluster and use the same devices"
        remedy = "leave it out, so that the runs follow each other; or unset RAY_ADDRESS"
        raise ConfigError(Fault("--parallel", problem, remedy, "not_supported"))
    seen = environment[VISIBLE].split(",") if environment.get(VISIBLE) else [*map(str, range(present))]
    if most * gpus > len(seen):
        problem = f"{most} runs of {gpus} GPU(s) need {most * gpus}, but this host has {len(seen)}"
        fits = f"write --parallel {len(seen) // gpus}, or " if len(seen) // gpus > 1 else ""
        remedy = f"{fits}leave it out, so that the runs follow each other, or map the roles to fewer devices"
        raise ConfigError(Fault("--parallel", problem, remedy, "too_large"))
    return [{VISIBLE: ",".join(seen[slot * gpus : (slot + 1) * gpus])} for slot in range(most)]


def present_gpus() -> int:
    """Return the number of NVIDIA GPUs of this host, without importing anything that would start their driver."""
    return sum(file.name.removeprefix("nvidia").isdigit() for file in Path("/dev").glob("nvidia[0-9]*"))


def run_side_by_side(
    commands: Sequence[Command], slots: Sequence[Mapping[str, str]], write: Callable[[str], object]
) -> list[int | None]:
    """Run all commands, at most as many at a time as there are slots, and return their exit statuses.

    A command that fails does not stop the others. SIGINT and SIGTERM are passed on to all that run; those that have
    not started by then never start, and have no status. If this process is killed, so are they.

    Args:
        commands: The commands.
        slots: The variables of each slot, in addition to those of this process.
        write: Called with each line of their output, with the number of the command before it.
    """
    statuses: list[int | None] = [None] * len(commands)
    waiting, running = list(range(len(commands)))[::-1], list[_Running]()
    with _passed_on(running) as signals, selectors.DefaultSelector() as outputs:
        try:
            while running or (waiting and not signals):
                while waiting and not signals and len(running) < len(slots):
                    number = waiting.pop()
                    slot = min(set(range(len(slots))) - {one.slot for one in running})
                    running.append(_started(number, slot, commands[number], slots[slot]))
                    if signals:  # it arrived meanwhile
                        running[-1].process.send_signal(signals[-1])
                    stdout = running[-1].process.stdout
                    assert stdout is not None
                    outputs.register(stdout, selectors.EVENT_READ, running[-1])
                for key, _ in outputs.select(TICK):
                    _pass_output(key.data, write)
                for one in [one for one in running if one.process.poll() is not None]:
                    while _pass_output(one, write):
                        pass
                    if one.pending:
                        write(f"[{one.number}] {one.pending.decode(errors='replace')}")
                    assert one.process.stdout is not None
                    outputs.unregister(one.process.stdout)
                    one.process.stdout.close()
                    statuses[one.number] = one.process.returncode
                    running.remove(one)
        finally:
            _end(running)
    return statuses


def _started(number: int, slot: int, command: Command, variables: Mapping[str, str]) -> _Running:
    """Start a command in a session of its own, so that the terminal's signals reach only this process."""
    with TemporaryFile() as given:
        given.write(command.given)
        given.seek(0)
        process = subprocess.Popen(
            command.words,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
            preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509 - this process has no threads yet
        )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return _Running(number, slot, process)


def _pass_output(one: _Running, write: Callable[[str], object]) -> bool:
    """Write the whole lines of what a command has printed. Return whether there may be more."""
    assert one.process.stdout is not None
    try:
        read = os.read(one.process.stdout.fileno(), 1 << 16)
    except BlockingIOError:
        return False
    *lines, one.pending = (one.pending + read).split(b"\n")
    for line in lines:
        write(f"[{one.number}] {line.decode(errors='replace')}")
    return bool(read)


@contextmanager
def _passed_on(running: Sequence[_Running]) -> Iterator[list[int]]:
    """A context in which signals are passed on to running commands. The yielded list receives their numbers."""
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for one in running:
            with suppress(ProcessLookupError):
                one.process.send_signal(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, pass_on)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(running: Sequence[_Running]) -> None:
    """End commands that still run, which is the case only if an error ends this process."""
    for one in running:
        one.process.terminate()
    for one in running:
        try:
            one.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()


def outcome(status: int | None) -> str:
    """Return an exit status of `run_side_by_side` in words."""
    known = {None: "not started", 0: "done", 130: "interrupted"}
    return known.get(status, f"failed, with status {status}")


def python_module(name: str) -> list[str]:
    """Return the words of a command that runs a module with this Python."""
    return [sys.executable, "-m", name]
