"""TensorBoard, the stopwatch and the driver's log."""

import logging
import warnings
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from roll.runs import meter
from roll.tracking.base import RunFacts
from roll.tracking.logs import RunLog
from roll.tracking.trackers import TensorBoardTracker


def facts(folder: Path, resumed_step: int | None = None) -> RunFacts:
    return RunFacts(folder, "run", {}, resumed_step)


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, round(event.value, 4)) for event in events.Scalars(name)]


def test_tensorboard_has_each_step_once_after_resume(tmp_path: Path) -> None:
    first = TensorBoardTracker(facts(tmp_path), {})
    for step in range(5):
        first.log(step, {"val/gsm8k/pass@1": step / 10, "reward/mean": float(step)})
    first.close()
    folder = tmp_path / "tensorboard"
    assert scalars(folder, "val/gsm8k/pass@1") == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]

    resumed = TensorBoardTracker(facts(tmp_path, 2), {})
    resumed.log(3, {"reward/mean": 33.0})
    resumed.close()
    assert scalars(folder, "reward/mean") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 33.0)]

    fresh = TensorBoardTracker(facts(tmp_path), {})
    fresh.log(0, {"reward/mean": 7.0})
    fresh.close()
    assert scalars(folder, "reward/mean") == [(0, 7.0)]

    elsewhere = TensorBoardTracker(facts(tmp_path), {"log_dir": str(tmp_path / "elsewhere")})
    elsewhere.log(0, {"reward/mean": 8.0})
    elsewhere.close()
    assert scalars(tmp_path / "elsewhere", "reward/mean") == [(0, 8.0)]


class Clock:
    """A replacement for the module `time`, with a clock that advances only in `sleep`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that the stopwatch uses."""
    clock = Clock()
    monkeypatch.setattr(meter, "time", clock)
    return clock


def test_stopwatch_sums_parts_despite_exceptions(clock: Clock) -> None:
    watch = meter.Stopwatch()
    for _ in range(2):
        with watch("rollout"):
            clock.sleep(2)
    with pytest.raises(ValueError, match="late"), watch("train"):
        clock.sleep(3)
        with watch("weight_sync"):
            clock.sleep(4)
            raise ValueError("late")
    assert watch.reset() == {"time/rollout": 4, "time/train": 3, "time/weight_sync": 4}
    assert watch.reset() == {}


def test_driver_log_goes_to_file_and_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = (root.level, root.handlers[:])
    with RunLog(tmp_path) as log:
        logging.getLogger("roll.some.part").info("a detail")
        logging.getLogger("roll.some.part").warning("look here")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("old way", DeprecationWarning, stacklevel=1)
    assert (root.level, root.handlers) == before
    logging.getLogger("roll.some.part").warning("after the end")
    text = log.path.read_text()
    assert log.path == tmp_path / "logs" / "driver.log"
    assert "INFO roll.some.part: a detail" in text and "WARNING roll.some.part: look here" in text and "old way" in text
    assert "after the end" not in text
    terminal = capsys.readouterr()
    assert terminal.out == "" and "WARNING: look here" in terminal.err and "a detail" not in terminal.err


def test_full_disk_of_log_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "driver.log").symlink_to("/dev/full")
    with RunLog(tmp_path):
        for _ in range(3):
            logging.getLogger().info("a detail")
    told = capsys.readouterr().err
    assert told.count("driver.log cannot be written: [Errno 28]") == 1 and "Traceback" not in told


def test_a_second_process_appends_to_the_log(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with RunLog(tmp_path):
            logging.getLogger().info(text)
    assert [line.split(": ")[-1] for line in (tmp_path / "logs" / "driver.log").read_text().splitlines()] == [
        "first",
        "second",
    ]


def test_nested_part_counts_its_own_seconds(clock: Clock) -> None:
    watch = meter.Stopwatch()
    with watch("evaluate"):
        with watch("onload"):
            clock.sleep(5)
            with watch("inner"):
                clock.sleep(3)
        with watch("onload"):
            clock.sleep(1)
        clock.sleep(2)
    assert watch.reset() == {"time/evaluate": 2, "time/onload": 6, "time/inner": 3}
