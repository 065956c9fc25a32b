"""The fault-injection campaign: its plan, how it reads a run, and its tables. It is run as a benchmark, not here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fault_table
from benchmarks.fault_plan import ENDS_RUN, PER_RUN, Kind, Phase, PlannedFault, planned
from benchmarks.fault_runs import Injected, RunOutcome, differences, false_alarms
from benchmarks.fault_watch import Course, Watch, is_running
from tests import limits

LINE = "2026-01-01 10:00:{second:02d},000 INFO roll.somewhere: {text}\n"


def test_fault_plan_depends_on_seed_only() -> None:
    whole = planned(0, 100)
    assert sum(map(len, whole)) == 100 and planned(0, 100) == whole != planned(1, 100)
    assert planned(0, 3 * PER_RUN) == whole[:3]


def test_every_fault_kind_has_both_signals_and_phases() -> None:
    faults = [fault for run in planned(0, 100) for fault in run]
    kinds = Counter(fault.kind for fault in faults)
    assert kinds.keys() == set(Kind) and min(kinds.values()) >= 3
    assert (
        {fault.kind for fault in faults if fault.is_stop}
        == set(Kind)
        == {fault.kind for fault in faults if not fault.is_stop}
    )
    assert {fault.phase for fault in faults} == set(Phase) - {Phase.MOVE}
    for run in planned(0, 100)[:-1]:
        assert len(run) == PER_RUN and any(fault.kind in ENDS_RUN for fault in run)
        again = next(
            place for place, fault in enumerate(run) if fault.phase is Phase.START and fault.kind is Kind.ENGINE
        )
        assert run[again - 1].kind in (Kind.ENGINE, Kind.CORE), "the fault before it must restart an engine"


def test_a_course_is_read_as_it_grows(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log, course = tmp_path / "logs" / "driver.log", Course(tmp_path)
    assert course.look() == [] and course.step == -1
    log.write_text(
        LINE.format(second=1, text="step 3/24  reward 0.1")
        + "a line of a traceback\n"
        + "2026-01-01 10:00:02,000 INFO ro"
    )
    (found,) = course.look()
    assert found.text.startswith("step 3/24") and course.step == 3
    with log.open("a") as stream:
        stream.write("ll.here: actor_infer rank 1 died: gone\n")
    (second,) = course.look()
    assert second.at - found.at == 1.0
    assert (
        course.since(found.at, r"rank 1 (died|is replaced)") == second and course.since(second.at + 1, "died") is None
    )


def test_processes_are_identified_by_their_logs(tmp_path: Path) -> None:
    sleeps = f"import time; time.sleep({limits.PROCESS})"
    # The name is put together in the child, so that the parent's own command line does not contain it.
    starts = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{sleeps}', 'VLLM::Engine' + 'Core']).wait()"
    )
    with (tmp_path / "actor_infer-1.log").open("w") as log:
        engine = subprocess.Popen([sys.executable, "-c", starts], stdout=log)
    watch = Watch(os.getpid(), tmp_path)
    core = 0
    try:
        limits.until(lambda: bool(Watch(os.getpid(), tmp_path).victims(Kind.CORE)), "the engine's process has started")
        (core,) = watch.victims(Kind.CORE).values()
        assert watch.victims(Kind.CORE).keys() == {1} and watch.victims(Kind.ENGINE) == {} and is_running(core)
        assert watch.victims(Kind.DRIVER) == {0: os.getpid()}
        os.kill(core, signal.SIGSTOP)
        limits.until(lambda: not is_running(core), "the engine's process is stopped")
    finally:
        if core:
            os.kill(core, signal.SIGKILL)
        engine.kill()
        engine.wait()


def test_phases_are_what_files_show(tmp_path: Path) -> None:
    watch = Watch(os.getpid(), tmp_path)
    assert watch.phases() == set()
    (tmp_path / "checkpoints" / ".step_2.unfinished").mkdir(parents=True)
    assert watch.phases() == {Phase.SAVE}


def test_metrics_differ_or_do_not() -> None:
    still: list[dict[str, Any]] = [
        {"step": 0, "reward/mean": 0.5, "time/step": 1.0},
        {"step": 1, "reward/mean": 1000.0},
    ]
    assert differences(still, [still[0] | {"time/step": 9.0}, {"step": 1, "reward/mean": 1000.001}]) == ()
    assert differences(still, [still[0], {"step": 1, "reward/mean": 1000.1}]) == (
        "step 1: reward/mean: 1000.1 instead of 1000.0",
    )
    assert differences(still, [still[0], {"step": 1}]) == ("step 1: reward/mean: None instead of 1000.0",)
    assert differences(still, still[:1]) == ("steps [0] instead of [0, 1]",)


def test_what_no_fault_explains_is_a_false_alarm() -> None:
    lines = [
        (10.0, "actor_infer rank 0 died: the process died"),
        (500.0, "reference rank 0: late; restart 1 of 3: the run continues from its start"),
        (600.0, "step 4/24"),
    ]
    assert false_alarms(lines, [9.0]) == (lines[1][1],)
    assert false_alarms(lines, []) == (lines[0][1], lines[1][1])


@pytest.fixture
def outcome() -> dict[str, Any]:
    """Return a run with two faults: an engine killed during training, and a trainer rank stopped between two phases."""
    engine = PlannedFault(Kind.ENGINE, False, Phase.TRAIN, 0, at_once=False)
    rank = replace(engine, kind=Kind.TRAINER, is_stop=True)
    first = Injected(engine, 100.0, 0, 3, ("train",), 7, 7, 0, noticed=102.0, healed=140.0, caught_up=142.0)
    second = Injected(rank, 200.0, 0, 5, (), 8, 8, 1, noticed=212.0, healed=260.0, steps_lost=1, caught_up=262.0)
    run = RunOutcome(0, "one engine", (first, second), 0, (0,), 1, (), (), 35.0, 2.0, 300.0)
    return json.loads(json.dumps(run.to_json()))


def test_the_table_says_what_was_measured(outcome: dict[str, Any]) -> None:
    text = fault_table.markdown([outcome])
    assert "| kill engine | 1 | 2.0, 2.0 | 40.0, 40.0 | 0.0, 0 | 0 |" in text
    assert "| stop trainer rank | 1 | 12.0, 12.0 | 60.0, 60.0 | 1.0, 1 | 0 |" in text
    assert "| train | 1 |" in text and "| between two phases | 1 |" in text
    assert "| 0 | one engine | 2 | 0 | 0 | 1 | 0 | 0 | 300 |" in text
    assert "| engine | 40.0, 40.0 | cold start + 10 s + the rest of the trainer's step | 0 of 1 |" in text
    assert "| rank | 60.0, 60.0 | cold start + 10 s + the steps since the checkpoint | 1 of 1 |" in text
    # An engine's failure costs (2 + 120) / 32 s, and a rank's failure 12 + 10 + 180 + 5 x 60 s. Each kind occurs once
    # in two hours.
    share = f"**{100 * (1 - (122 / 32 + 502) / 2 / 3600):.1f}%** of the time is spent on training"
    assert "failure then costs 3.8 s, " in text and "31 other engines" in text
    assert f"failure 502 s, and {share}" in text


def test_simultaneous_failures_are_attributed_to_neither(outcome: dict[str, Any]) -> None:
    outcome["injected"][1] |= {"at": 130.0, "caught_up": 192.0}
    text = fault_table.markdown([outcome])
    assert "| engine | - | cold" in text and "| rank | - | cold" in text


def test_good_run_took_all_steps_with_equal_metrics(outcome: dict[str, Any]) -> None:
    assert fault_table.is_good(outcome)
    for bad in (
        {"statuses": [0, 3]},
        {"unequal": ["step 3: reward/mean"]},
        {"false_alarms": ["actor_infer rank 0 died"]},
    ):
        assert not fault_table.is_good(outcome | bad)
