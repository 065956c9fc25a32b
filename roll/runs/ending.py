"""Reports how a run ended: in the log, on the terminal, in the run folder and in the report."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal

from roll.errors import BadInput, RollError, WorkerFailed
from roll.runs.checkpointer import Checkpointer
from roll.tracking.card import loading_call
from roll.tracking.history import END_FILE, RunEnd, write_end
from roll.tracking.jsonl import METRICS_FILE
from roll.tracking.report.write import write_report

LOG = logging.getLogger(__name__)


class RunEnding:
    """A context that spans a run and reports how it ended. Only the log and the lock of the run folder outlive it."""

    def __init__(self, folder: Path, hide: Callable[[str], str]) -> None:
        """`hide` removes secrets from a text."""
        self._folder, self._hide = folder, hide
        self._checkpointer: Checkpointer | None = None
        self._last_step: int | None = None

    def begin(self, checkpointer: Checkpointer, last_step: int) -> None:
        """From now on, record the end in the run folder. `last_step` is the last step of the complete run."""
        self._last_step = last_step
        (self._folder / END_FILE).unlink(missing_ok=True)
        self._checkpointer = checkpointer

    def __enter__(self) -> RunEnding:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, WorkerFailed):  # The worker's own traceback goes to the log; the terminal gets one line.
            LOG.info("%s\n%s", error, error.traceback)
        elif error is not None and not isinstance(error, RollError | KeyboardInterrupt | SystemExit):
            LOG.info("the run failed", exc_info=error)
        checkpoint = "" if self._checkpointer is None else checkpoint_line(self._checkpointer)
        early = "" if error or self._checkpointer is None else self._checkpointer.stopped_early
        end = RunEnd(outcome(error), self._hide(cause(error)) if error else early, checkpoint, self._last_step)
        LOG.info("the run ended: %s", "; ".join(filter(None, (end.outcome, end.cause, end.checkpoint))))
        if self._checkpointer is None:
            return
        if error is not None and not isinstance(error, BadInput) and not self._checkpointer.is_at_end:
            with suppress(OSError):
                print(f"no checkpoint was written when the run ended; {checkpoint}", file=sys.stderr, flush=True)
        try:
            write_end(self._folder, end)
        except OSError as failure:
            LOG.warning("%s cannot be written: %s", self._folder / END_FILE, failure)
        write_report_if_any(self._folder)
        if early:
            print(early, flush=True)
        if self._checkpointer.best:
            print(f"best: {self._checkpointer.best}", flush=True)
        if isinstance(error, KeyboardInterrupt) and self._checkpointer.is_at_end and self._checkpointer.last:
            step, saved = self._checkpointer.last
            print(f"saved: {saved}; the same command continues after step {step}", flush=True)
        if self._checkpointer.exported is not None:
            export = self._checkpointer.exported
            call = loading_call(export, str(export), self._checkpointer.trained_model)
            print(f"exported: {export}\nload it:  {call}", flush=True)


def outcome(error: BaseException | None) -> Literal["done", "interrupted", "failed"]:
    """Return the `outcome` of `RunEnd` for the error that ended the run, or for None."""
    return "done" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def cause(error: BaseException) -> str:
    """Return the reason why the run ended, without a traceback."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped by a signal"
    return str(error) if isinstance(error, RollError) else f"{type(error).__name__}: {error}"


def checkpoint_line(checkpointer: Checkpointer) -> str:
    """Describe the checkpoint from which the same command would continue."""
    if checkpointer.last is None:
        return "there is no checkpoint, and the same command starts from the beginning"
    step, folder = checkpointer.last
    return f"the last checkpoint is of step {step}, {folder}"


def write_report_if_any(folder: Path) -> None:
    """Write the report if any metrics were recorded. Errors are only logged: they must not hide the end."""
    metrics = folder / METRICS_FILE
    if not metrics.is_file() or not metrics.stat().st_size:
        return
    try:
        print(f"report: {write_report(folder)}")
    except Exception as error:
        LOG.warning("the report could not be written: %s: %s", type(error).__name__, error)
        LOG.info("traceback of the failed report:", exc_info=error)
