"""The console trackers: plain lines, the live view, and the estimate of the remaining time."""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from roll.tracking.console import (
    ConsoleProgress,
    LiveConsole,
    PlainConsole,
    console_tracker,
    duration,
    plain_line,
    sparkline,
)
from roll.types import Metrics
from tests import limits
from tests.quiet import quiet_life

STEP: Metrics = {
    "reward/mean": 0.61,
    "val/gsm8k/pass@1": 0.55,
    "val/gsm8k/pass@k": 0.7,
    "time/step": 2.31,
    "time/rollout": 1.2,
    "time/train": 0.84,
    "time/weight_sync": 0.1,
    "time/reference": 0.0,
    "throughput/tokens_per_second": 1234.4,
}


def test_plain_line_shows_progress_reward_and_speed(capsys: pytest.CaptureFixture[str]) -> None:
    tracker = PlainConsole(100, quiet_life())
    tracker.log(12, STEP)
    tracker.close()
    expected = "step 12/100  reward 0.61  val pass@1 0.55  2.3 s (rollout 1.2, train 0.8, sync 0.1)  1,234 tok/s\n"
    assert capsys.readouterr().out == expected


def test_plain_lines_of_first_and_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    tracker = PlainConsole(1, quiet_life())
    tracker.log(0, {"val/a/pass@1": 0.25, "val/b/pass@1": 0.012, "time/evaluate": 3.0})
    tracker.log(1, {"reward/mean": -0.5, "time/step": 9.96})
    assert capsys.readouterr().out.splitlines() == [
        "step 0/1  val pass@1 a 0.25, b 0.012",
        "step 1/1  reward -0.50  10.0 s",
    ]


def test_supervised_fine_tuning_shows_its_loss(capsys: pytest.CaptureFixture[str]) -> None:
    tracker = PlainConsole(2, quiet_life())
    tracker.log(1, {"sft/loss": 2.345, "val/held_out/loss": 2.5, "epoch": 0.5})
    assert capsys.readouterr().out == "step 1/2  epoch 0.50  loss 2.35  val loss 2.50\n"


def test_without_a_terminal_lines_are_plain() -> None:
    assert isinstance(console_tracker("run", 10, quiet_life()), PlainConsole)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (200, "3m20s"), (3599.7, "1h00m"), (18_420, "5h07m")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sparkline() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([0.5, 0.5], 10) == "▁▁"
    assert sparkline([0.0, float("nan"), 7.0], 10) == "▁█"
    assert sparkline([float(value) for value in range(8)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, 2.0, 6.0, 8.0, 15.0], 3) == "▁▄█", "means 1, 7 and 15"


def test_eta_follows_the_last_ten_steps() -> None:
    progress = ConsoleProgress(max_steps=100)
    assert progress.eta_seconds is None
    for step, seconds in enumerate((300.0, 90.0, 2.0)):
        progress = progress.after(step, {"time/step": seconds})
        assert progress.eta_seconds is None, (
            "neither step 0 nor step 1, which compiles, predicts the duration of later steps"
        )
    assert progress.after(3, {"time/step": 4.0}).eta_seconds == 3.0 * 97, "the mean of two steps, for 97 steps"
    progress = ConsoleProgress(max_steps=100)
    for step in range(1, 21):
        progress = progress.after(step, {"time/step": 50.0 if step <= 10 else 2.0})
    assert progress.eta_seconds == 160.0


def test_the_live_view_shows_the_run() -> None:
    out = io.StringIO()
    tracker = LiveConsole("qwen-rlvr", 100, quiet_life(), Console(file=out, force_terminal=True, width=120))
    for step in (1, 2, 3):
        tracker.log(step, STEP | {"reward/mean": step / 4})
    tracker.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    for part in (
        "qwen-rlvr",
        "step 3/100",
        "eta 3m",
        "reward 0.75  ▁▅█",
        "0.55 (step 3)",
        "rollout 1.2 · train 0.8",
        "1,234 tok/s",
    ):
        assert part in shown, part


def test_terminal_is_restored_when_run_fails() -> None:
    """Uses a real pseudo-terminal: printed text appears above the view, and the cursor is visible again at the end."""
    program = (
        "from roll.tracking.console import LiveConsole, console_tracker\nfrom roll.tracking.fanout import Tracking\n"
        "from tests.quiet import quiet_life\nconsole = console_tracker('run', 10, quiet_life())\n"
        "assert isinstance(console, LiveConsole)\nwith Tracking(console) as tracking:\n"
        "    tracking.log(1, {'reward/mean': 0.5, 'time/step': 1.0})\n    print('printed meanwhile')\n"
        "    raise KeyboardInterrupt\n"
    )
    leader, follower = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "PYTHONPATH": str(Path(__file__).parents[3])}
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=follower, stdout=follower, stderr=follower, env=environment
    )
    os.close(follower)
    shown = b""
    try:
        while chunk := os.read(leader, 65536):
            shown += chunk
    except OSError:  # A pseudo-terminal whose other side is closed raises instead of returning end of file.
        pass
    finally:
        os.close(leader)
        child.wait(timeout=limits.PROCESS)
    text = shown.decode()
    assert "step 1/10" in text and "printed meanwhile" in text and "KeyboardInterrupt" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor is hidden once and restored once"
    assert text.index("\x1b[?25h") < text.index("Traceback")


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"val/a/avg@4": 0.25, "val/a/length_mean": 3.0}, "val avg@4 0.25"),
        ({"val/a/pass@1": 0.5, "val/a/avg@1": 0.25}, "val pass@1 0.50"),
        ({"val/a/pass@1": 0.5, "val/a/avg@1": 0.4, "val/b/avg@2": -1.0}, "val pass@1 a 0.50, b avg@2 -1.00"),
        ({"val/a/loss": 0.5}, "val loss 0.50"),
        ({"val/a/pass@1": 0.5, "val/a/avg@1": 0.5, "val/a/no_verdict_fraction": 0.0}, "val pass@1 0.50"),
        (
            {"val/a/pass@1": 0.5, "val/a/avg@1": 0.5, "val/a/no_verdict_fraction": 0.125},
            "val pass@1 0.50 (12% not scored)",
        ),
        ({"val/a/no_verdict_fraction": 1.0}, "val none (100% not scored)"),
        (
            {"val/a/pass@1": 0.5, "val/a/no_verdict_fraction": 0.004, "val/b/no_verdict_fraction": 1.0},
            "val pass@1 a 0.50 (<1% not scored), b none (100% not scored)",
        ),
    ],
)
def test_a_set_shows_its_accuracy_or_mean(metrics: dict[str, float], expected: str) -> None:
    assert plain_line(ConsoleProgress(1).after(1, metrics)).endswith(expected)


def rewarded(
    scored: float, crashed: float = 0.0, timed_out: float = 0.0, mean: float | None = None
) -> dict[str, float]:
    shares = {
        "reward/scored_fraction": scored,
        "reward/crashed_fraction": crashed,
        "reward/timed_out_fraction": timed_out,
    }
    return shares | ({} if mean is None else {"reward/mean": mean})


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (rewarded(1.0, mean=0.0), "reward 0.00"),
        (rewarded(0.75, 0.25, mean=0.5), "reward 0.50 (25% crashed)"),
        (rewarded(0.5, 0.498, 0.002, mean=0.5), "reward 0.50 (50% crashed, <1% timed out)"),
        (rewarded(0.0, 1.0), "reward none (100% crashed)"),
        (rewarded(0.0, 0.75, 0.25), "reward none (75% crashed, 25% timed out)"),
    ],
)
def test_a_step_shows_what_was_not_scored(metrics: dict[str, float], expected: str) -> None:
    assert (
        plain_line(ConsoleProgress(9).after(1, rewarded(1.0, mean=0.25)).after(2, metrics)) == f"step 2/9  {expected}"
    )
    assert plain_line(ConsoleProgress(9).after(2, metrics)) == f"step 2/9  {expected}"
