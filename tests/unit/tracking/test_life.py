"""The progress display of roles that start or work: plain lines, or a panel in a terminal."""

from __future__ import annotations

import io
import re
from itertools import pairwise

import pytest
from rich.console import Console

from roll.system.signs import Activity, Usage
from roll.tracking.console import LiveConsole, PlainConsole
from roll.tracking.life import LINE_EVERY as T
from roll.tracking.life import LINE_MOST, ActivityDisplay, PlainActivity
from roll.types import Metrics

GIB = 1 << 30
STEP: Metrics = {"reward/mean": 0.5, "time/step": 2.0}


def sign(role: str, stage: str, cpu: float = 0.0, progress: str = "", is_busy: bool = True) -> Activity:
    return Activity(role, stage, Usage(cpu, GIB), progress, is_busy)


def test_stage_is_reported_once_at_its_start() -> None:
    chosen = PlainActivity()
    assert chosen.lines([sign("actor_train", "loading the model", 1.25)], 0.0) == [
        "actor_train: loading the model, 1.2 s of CPU, 1.00 GiB"
    ]
    assert chosen.lines([sign("actor_train", "loading the model", 2.0)], 0.5 * T) == []
    assert chosen.lines(
        [Activity("actor_train", "building the engine"), sign("critic", "ready", is_busy=False)], 0.6 * T
    ) == ["actor_train: building the engine", "critic: ready, 0.0 s of CPU, 1.00 GiB"]


def test_only_progressing_roles_are_reported_between_stages() -> None:
    chosen, still = PlainActivity(), sign("reference", "loading the model", 7.0)
    told = [
        chosen.lines(
            [sign("actor_train", "training", tick), sign("actor_infer", "generating", 0.0, f"{tick} of 8"), still],
            tick * T,
        )
        for tick in range(4)
    ]
    assert [[line.partition(":")[0] for line in lines] for lines in told] == [
        ["actor_train", "actor_infer", "reference"],
        ["actor_train"],
        ["actor_infer"],
        ["actor_train"],
    ]
    assert told[2] == ["actor_infer: generating, 2 of 8, 0.0 s of CPU, 1.00 GiB"]
    assert chosen.lines([still], 100 * T) == [], "a role without progress is not reported again"
    assert chosen.lines([sign("reference", "loading the model", 9.0, is_busy=False)], 200 * T) == [], (
        "an idle role is not reported"
    )


def test_lines_of_long_stage_become_rarer() -> None:
    chosen = PlainActivity()
    times = [second for second in range(3600) if chosen.lines([sign("actor_infer", "generating", second)], second)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps[0] == T and gaps == sorted(gaps) and gaps[-1] == LINE_MOST
    assert chosen.lines([sign("actor_infer", "loading weights", 3600)], 3601) and chosen.lines(
        [sign("actor_infer", "loading weights", 3601)], 3601 + T
    ), "a new stage is reported as often as the first"


def test_stage_reports_stop_at_first_step_until_restart(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    with ActivityDisplay(Console(file=out)) as life:
        life.driver("starting Ray")
        console = PlainConsole(2, life)
        console.log(0, {"time/step": 1.0})
        life.show([sign("actor_train", "loading the model")])
        console.log(1, STEP)
        life.show([sign("actor_train", "training")])
        life.wake()
        life.show([sign("actor_train", "process started")])
    roles = [line.partition(",")[0] for line in out.getvalue().splitlines()]
    assert roles == ["driver: starting Ray", "actor_train: loading the model", "actor_train: process started"]
    assert re.match(r"driver: starting Ray, \d+\.\d s of CPU, \d\.\d\d GiB", out.getvalue()), (
        "CPU time and memory of this process"
    )


@pytest.mark.parametrize("width", [60, 80])
def test_start_panel_fits_terminal_and_yields_to_steps(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width)
    with ActivityDisplay(console) as life:
        life.show(
            [sign("rewards.arithmetic", "loading libraries, compiling (1 of 2 ranks); process started (1 of 2 ranks)")]
        )
        assert life._live is not None
        life._live.refresh()
        view = LiveConsole("run", 2, life, console)
        view.log(0, {"time/step": 1.0})
        life.show([sign("actor_infer", "generating", progress="3 of 8 responses")])
        view.log(1, STEP)
        view.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert (
        "rewards.arithmetic: loading libraries, compiling" in shown
        and "actor_infer: generating, 3 of 8 responses" in shown
    )
    assert max(map(len, re.split(r"[\r\n]+", shown))) <= width
    assert shown.rindex("step 1/2") > shown.index("rewards.arithmetic")
