"""The exceptions of roll, and the exit status that a command has for each (see `run_command`)."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

BAD_INPUT = 2
PART_FAILED = 3
INTERRUPTED = 130


class RollError(Exception):
    """Base of every error that roll raises on purpose."""

    exit_status = PART_FAILED


def run_command(work: Callable[[], object]) -> int:
    """Run a command and return its exit status. Errors are printed to stderr, with a traceback only if it is a defect of roll."""
    try:
        work()
    except RollError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        return PART_FAILED
    return 0


@dataclass(frozen=True)
class Fault:
    """One fault of a configuration or of data, with its remedy."""

    place: str
    """Key path (`actor_train.training_args.learning_rate`) or `file:row`."""
    problem: str
    """The fault, with the value."""
    remedy: str
    """The remedy: the allowed values, the nearest known key, the command to run."""

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}\n    {self.remedy}"


class BadInput(RollError):
    """The configuration or the data cannot be used. Carries every fault found, not just the first."""

    exit_status = BAD_INPUT
    subject = "input"

    def __init__(self, faults: Sequence[Fault]) -> None:
        assert faults, "BadInput without a fault"
        self.faults = tuple(faults)
        count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        super().__init__(f"{count} in the {self.subject}:\n" + "\n".join(f"  {fault}" for fault in self.faults))

    def __reduce__(self) -> tuple[type[BadInput], tuple[tuple[Fault, ...]]]:
        return type(self), (self.faults,)


class ConfigError(BadInput):
    subject = "configuration"


class DataError(BadInput):
    subject = "data"


class WorkerFailed(RollError):
    """A worker raised, died or was late. `str()` is one line: role, rank and the first root cause."""

    def __init__(self, role: str, rank: int, cause: str, traceback: str = "") -> None:
        super().__init__(f"{role} rank {rank}: {cause}")
        self.role, self.rank, self.cause, self.traceback = role, rank, cause, traceback

    def __reduce__(self) -> tuple[type[WorkerFailed], tuple[str, int, str, str]]:
        return type(self), (self.role, self.rank, self.cause, self.traceback)


class WorkerDied(WorkerFailed):
    """A worker's process, or one that it needs, has ended or makes no progress."""


class WorkerLate(WorkerFailed):
    """A call of a worker missed its deadline."""


class EngineShortage(WorkerFailed):
    """An engine found too little memory on its device to start."""


ECHO_SECONDS = 2.0
"""Seconds to wait for further failures after the first, so that the cause is reported and not its consequence."""


class WorkerAbandoned(WorkerFailed):
    """A worker failed because another worker had failed or was missing. The cause is that of the other worker."""


class WorkerWaited(WorkerAbandoned):
    """A worker waited in a collective operation for workers that did not join it."""


class EnvironmentFailed(RollError):
    """The environment of an episode broke. `str()` says why: it raised, was late, held too much memory, its process died."""

    def __init__(self, why: str, reason: Literal["crashed", "timed_out"] = "crashed") -> None:
        super().__init__(why)
        self.why = why
        self.reason: Literal["crashed", "timed_out"] = reason

    def __reduce__(self) -> tuple[type[EnvironmentFailed], tuple[str, Literal["crashed", "timed_out"]]]:
        return type(self), (self.why, self.reason)


class NeighbourFailed(EnvironmentFailed):
    """The environment's process was lost through another one's call, or with its worker."""


class DeviceMemoryError(RollError):
    """A device has too little memory, and nothing can be made smaller."""


class NonFiniteError(RollError):
    """Losses or gradients were not finite too often in a row, or a non-finite one changed the weights."""


class WeightSyncError(RollError):
    """The engine's weights are not what the trainer sent: names, shapes, checksum or version differ."""


class CheckpointError(RollError):
    """A checkpoint cannot be written, or is incomplete on disk."""
