"""The exceptions of roll, and the exit status of a command for each of them (see `roll.system.command`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BAD_INPUT = 2
PART_FAILED = 3
INTERRUPTED = 130


class RollError(Exception):
    """Base class of all errors that roll raises deliberately."""

    exit_status = PART_FAILED


FaultCode = Literal[
    "already_exists",
    "changed",
    "contradiction",
    "duplicate",
    "empty",
    "exclusive",
    "failed",
    "malformed",
    "misplaced",
    "missing",
    "no_effect",
    "not_allowed",
    "not_below",
    "not_divisible",
    "not_found",
    "not_installed",
    "not_supported",
    "not_writable",
    "out_of_range",
    "owner_missing",
    "timed_out",
    "too_large",
    "too_small",
    "unfit",
    "unknown_key",
    "unknown_name",
    "unread",
    "unreadable",
    "unresolved",
    "unusable_rows",
    "wrong_type",
]
"""Kind of a fault. Unlike the text, it stays the same when a message is reworded.

| code             | meaning                                                                                       |
|------------------|-----------------------------------------------------------------------------------------------|
| `already_exists` | The folder or file to be written exists.                                                      |
| `changed`        | The value differs from that of the run or the checkpoint that is to be continued.             |
| `contradiction`  | The value cannot be combined with the value of another key, or with another part of the row.  |
| `duplicate`      | Something is named twice that may be named once.                                              |
| `empty`          | There are no entries, rows, messages or words where at least one is needed.                   |
| `exclusive`      | Only one of several keys may be set.                                                          |
| `failed`         | A program, a service or the user's code raised an error or ended.                             |
| `malformed`      | The text does not have the required form (a URL, YAML, JSON, KEY=VALUE).                      |
| `misplaced`      | The key is known, but belongs elsewhere.                                                      |
| `missing`        | A required key, column, variable or block is not given.                                       |
| `no_effect`      | The setting would change nothing, or nothing would be learnt.                                 |
| `not_allowed`    | The value is not one of the allowed values.                                                   |
| `not_below`      | The value must be below that of another key.                                                  |
| `not_divisible`  | Numbers must divide each other, and do not.                                                   |
| `not_found`      | There is no such file, folder, module, function, program or session.                          |
| `not_installed`  | A package is not installed, or cannot be imported.                                            |
| `not_supported`  | roll, or a library that it uses, cannot do this.                                              |
| `not_writable`   | A folder or file cannot be written.                                                           |
| `out_of_range`   | The number is outside its fixed bounds.                                                       |
| `owner_missing`  | The key has an effect only together with another key, which is not set.                       |
| `timed_out`      | Something did not end within its deadline.                                                    |
| `too_large`      | The number, or what it counts, is more than another key, a model or a machine allows.         |
| `too_small`      | The number, or what it counts, is less than another key needs.                                |
| `unfit`          | A model, tokenizer, template, class, function, argument or reference does not fit its use.    |
| `unknown_key`    | There is no key, flag or argument of this name.                                               |
| `unknown_name`   | The value names nothing that is known: no domain, reward, tracker, experiment or layer.       |
| `unread`         | The key is set, but the chosen method, pipeline or template does not read it.                 |
| `unreadable`     | The file, folder or model exists, or may exist, but cannot be read.                           |
| `unresolved`     | An expression `${...}` cannot be resolved.                                                    |
| `unusable_rows`  | Several rows cannot be used. The faults before this one are examples.                         |
| `wrong_type`     | The value has another type than the key or column needs.                                      |
"""


@dataclass(frozen=True)
class Fault:
    """One fault of a configuration or of data, with its remedy."""

    place: str
    """Path of the key (`actor_train.training_args.learning_rate`), or `file:row`."""
    problem: str
    """What is wrong, with the value."""
    remedy: str
    """How to fix it: the allowed values, the nearest known key, or the command to run."""
    code: FaultCode
    """Kind of the fault, for programs and tests. `str()` leaves it out."""

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}\n    {self.remedy}"


class BadInput(RollError):
    """The configuration or the data cannot be used. `faults` has all faults, not only the first."""

    exit_status = BAD_INPUT
    subject = "input"

    def __init__(self, *faults: Fault) -> None:
        assert faults, "BadInput without a fault"
        self.faults = faults
        count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        super().__init__(f"{count} in the {self.subject}:\n" + "\n".join(f"  {fault}" for fault in self.faults))

    def __reduce__(self) -> tuple[type[BadInput], tuple[Fault, ...]]:
        return type(self), self.faults


class ConfigError(BadInput):
    subject = "configuration"


class DataError(BadInput):
    subject = "data"


class HostUnreachable(RollError):
    """A process cannot connect to one on another host. `str()` has the addresses of both and the keys to set."""


class WorkerFailed(RollError):
    """A worker raised an exception, died or exceeded a timeout. `str()` is one line with role, rank and root cause."""

    def __init__(self, role: str, rank: int, cause: str, traceback: str = "") -> None:
        super().__init__(f"{role} rank {rank}: {cause}")
        self.role, self.rank, self.cause, self.traceback = role, rank, cause, traceback

    def __reduce__(self) -> tuple[type[WorkerFailed], tuple[str, int, str, str]]:
        return type(self), (self.role, self.rank, self.cause, self.traceback)


class WorkerDied(WorkerFailed):
    """The process of a worker, or a process that it needs, has ended or makes no progress."""


class WorkerLate(WorkerFailed):
    """A call to a worker exceeded its timeout."""


class WorkerStopped(WorkerFailed):
    """A call was under way, or was made, when the run had ended its worker. Nothing is wrong with the worker."""


class EngineShortage(WorkerFailed):
    """An engine could not start, because its device has too little free memory."""


ECHO_SECONDS = 2.0
"""Seconds to wait for further failures, so that the root cause is reported rather than a consequence."""


class WorkerAbandoned(WorkerFailed):
    """A worker failed only because another worker had failed or was missing. The root cause is in the other worker."""


class WorkerWaited(WorkerAbandoned):
    """A worker waited in a collective operation for other workers that did not join it."""


FailedHow = Literal["crashed", "timed_out", "unavailable"]


class EnvironmentFailed(RollError):
    """An episode's environment failed. `str()` is the reason: an exception, a timeout, memory, a dead process, or a
    partner that gave no answer (`unavailable`).
    """

    def __init__(self, why: str, reason: FailedHow = "crashed") -> None:
        super().__init__(why)
        self.why = why
        self.reason: FailedHow = reason

    def __reduce__(self) -> tuple[type[EnvironmentFailed], tuple[str, FailedHow]]:
        return type(self), (self.why, self.reason)


class NeighbourFailed(EnvironmentFailed):
    """An environment lost its process because of another environment's call there, or its worker's loss."""


class DeviceMemoryError(RollError):
    """A device has too little memory, and memory use cannot be reduced further."""


class NonFiniteError(RollError):
    """Too many consecutive updates had a loss or gradient that was not finite, or one changed the weights."""


class WeightSyncError(RollError):
    """The weights of the engine differ from those that the trainer sent, in names, shapes, checksum or version."""


class CheckpointError(RollError):
    """A checkpoint cannot be written, or is incomplete on disk."""
