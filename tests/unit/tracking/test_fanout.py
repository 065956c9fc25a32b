"""`Tracking` passes everything to all trackers, and drops a tracker that fails."""

import logging
from collections.abc import Callable, Sequence

import pytest

from roll.tracking.base import Notice
from roll.tracking.fanout import Tracking
from roll.types import Metrics, RolloutGroup


class Recorder:
    def __init__(self, name: str, fails_on: Sequence[str] = (), error: type[BaseException] = ConnectionError) -> None:
        self.name, self._error = name, error
        self.calls: list[tuple[str, int]] = []
        self._fails_on = fails_on

    def log(self, step: int, metrics: Metrics) -> None:
        self._note("log", step)

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        self._note("samples", step)

    def held_out(self, step: int, name: str, groups: Sequence[RolloutGroup]) -> None:
        self._note(f"held out {name}", step)

    def notices(self, found: Sequence[Notice]) -> None:
        for notice in found:
            self._note(f"notice {notice.topic}", notice.step)

    def close(self) -> None:
        self._note("close", -1)

    def _note(self, call: str, step: int) -> None:
        self.calls.append((call, step))
        if call in self._fails_on:
            raise self._error(f"{call} went wrong")


def test_all_hear_of_everything(group: Callable[..., RolloutGroup]) -> None:
    record, first, second = Recorder("jsonl"), Recorder("a"), Recorder("b")
    with Tracking(record, [first, second]) as tracking:
        tracking.log(1, {"reward/mean": 1.0})
        tracking.samples(1, [group()])
        tracking.held_out(1, "gsm8k", [group()])
    assert record.calls.pop(2) == ("held out gsm8k", 1), "only the record keeps the responses of validation"
    assert record.calls == first.calls == second.calls == [("log", 1), ("samples", 1), ("close", -1)]


@pytest.mark.parametrize("error", [ConnectionError, SystemExit])
def test_failing_tracker_is_reported_once_and_closed(
    caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    record, broken, sound = Recorder("jsonl"), Recorder("wandb", ["log"], error), Recorder("tensorboard")
    with caplog.at_level(logging.INFO), Tracking(record, [broken, sound]) as tracking:
        for step in range(3):
            tracking.log(step, {})
    assert broken.calls == [("log", 0), ("close", -1)]
    assert record.calls == sound.calls == [("log", 0), ("log", 1), ("log", 2), ("close", -1)]
    warnings = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]
    [warning] = warnings
    assert warning.startswith("tracker 'wandb' failed") and warning.endswith(f": {error.__name__}: log went wrong")
    assert "Traceback" in caplog.text, "the log has the traceback"


def test_tracker_failing_to_close_spares_others(caplog: pytest.LogCaptureFixture) -> None:
    record, broken, sound = Recorder("jsonl"), Recorder("wandb", ["close"]), Recorder("tensorboard")
    Tracking(record, [broken, sound]).close()
    assert record.calls == sound.calls == [("close", -1)]
    assert "tracker 'wandb' failed" in caplog.text


def test_failing_record_raises_and_others_are_closed() -> None:
    record, sound = Recorder("jsonl", ["log"]), Recorder("console")
    with pytest.raises(ConnectionError), Tracking(record, [sound]) as tracking:
        tracking.log(1, {})
    assert ("close", -1) in sound.calls and ("close", -1) in record.calls


def test_interrupt_inside_tracker_is_not_its_failure() -> None:
    class Interrupted(Recorder):
        def log(self, step: int, metrics: Metrics) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Tracking(Recorder("jsonl"), [Interrupted("console")]).log(1, {})
