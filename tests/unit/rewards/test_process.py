"""Reward processes: verdicts, failures, deadlines and cleanup."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roll.errors import ConfigError, RollError
from roll.hosted.process import HostedProcessFailed
from roll.rewards.reward_workers import RewardProcess
from roll.types import RewardOutcome, RewardResult
from tests import limits
from tests.unit.rewards.running import (
    LATE,
    PROMPT,
    descendants,
    gone,
    process,
    reward_children,
    run,
    scored,
    section,
    skip,
    stat_fields,
)

pytestmark = pytest.mark.usefixtures("marks", "nothing_left_behind")


def test_results_come_back_whole_and_in_order() -> None:
    results = scored("a", "bbb", "", reward_args={"bonus": 0.5})
    assert results == [
        RewardResult(101.5, parts={"length": 1.0}, note="a"),
        RewardResult(103.5, parts={"length": 3.0}, note="bbb"),
        RewardResult(100.5, parts={"length": 0.0}, note=""),
    ]


@pytest.mark.parametrize(
    ("response", "outcome", "note"),
    [
        ("hang", RewardOutcome.TIMED_OUT, LATE),
        ("swallow", RewardOutcome.TIMED_OUT, LATE),
        ("hang in C", RewardOutcome.TIMED_OUT, LATE),
        ("exit", RewardOutcome.CRASHED, "the process ended itself with status 3"),
        ("segfault", RewardOutcome.CRASHED, "the process died of SIGSEGV"),
        ("sys.exit", RewardOutcome.CRASHED, "SystemExit: enough (HERE)"),
        ("raise", RewardOutcome.CRASHED, "KeyError: 'no such thing' (HERE)"),
        ("raise with a note", RewardOutcome.CRASHED, "KeyError: 'no such thing' (HERE)"),
        ("raise far away", RewardOutcome.CRASHED, "ValueError: the row has neither 'ground_truth' nor 'answer' (HERE)"),
        ("syntax", RewardOutcome.CRASHED, "SyntaxError: invalid syntax (HERE)"),
        ("nan", RewardOutcome.CRASHED, "returned a malformed RewardResult: its value is nan, which is not finite"),
        (
            "inf part",
            RewardOutcome.CRASHED,
            "returned a malformed RewardResult: its part 'style' is inf, which is not finite",
        ),
        ("garbage", RewardOutcome.CRASHED, "returned a list, not a RewardResult or a number: [1.0]"),
        ("nan number", RewardOutcome.CRASHED, "returned nan, which is not finite"),
        ("unavailable", RewardOutcome.UNAVAILABLE, "no sandbox here"),
        (
            "malformed",
            RewardOutcome.CRASHED,
            "returned a malformed RewardResult: could not convert string to float: 'high'",
        ),
        ("unparsable", RewardOutcome.UNPARSABLE, "nothing there"),
    ],
)
def test_failed_reward_is_recorded_and_group_continues(
    response: str, outcome: RewardOutcome, note: str, marks: Path
) -> None:
    before, failed, after = scored("fine", response, "after", hangs_end=marks)
    assert (before.value, after.value) == (104.0, 105.0)
    assert (failed.value, failed.outcome) == (-1.0, outcome)
    assert failed.note == note.replace("HERE", f"{marks / 'faulty_rewards.py'}, line {line_of(response)}")


def test_a_crash_keeps_the_frames_of_user_code(marks: Path) -> None:
    far, died = scored("raise far away", "exit", hangs_end=marks)
    frames = [line for line in far.trace.splitlines() if line.startswith("  File ")]
    file = marks / "faulty_rewards.py"
    assert {line.split('"')[1] for line in frames} == {str(file)}
    assert frames[-1].endswith(f"line {line_of('raise far away')}, in fail")
    assert "    ground_truth({})" in far.trace.splitlines()
    assert far.trace.splitlines()[-1].startswith("ValueError: ") and far.trace.endswith("'ground_truth' nor 'answer'")
    assert died.trace == ""


def line_of(response: str) -> int:
    """Return the line at which the reward fails: the one marked with the response, or the one after the line that names
    it.
    """
    lines = Path(__file__).with_name("faulty.py").read_text().splitlines()
    named = next((number for number, line in enumerate(lines, 1) if f'response == "{response}"' in line), 0)
    return next((number for number, line in enumerate(lines, 1) if line.endswith(f"# {response}")), named + 1)


def test_reward_deadline_holds_for_each_response(marks: Path) -> None:
    waits = [f"wait {number}" for number in range(5)]

    async def go() -> list[RewardResult]:
        async with process() as rewards:
            scoring = asyncio.create_task(rewards.score(PROMPT, [*waits, "hang"]))
            for wait in waits:
                await limits.comes_true((marks / f"begun {wait}").exists, f"{wait} has begun")
                skip(limits.CALL / 2)
                await asyncio.sleep(limits.LOOK)
                (marks / f"end of {wait}").touch()
            await limits.comes_true((marks / "hanging").exists, "the last call hangs")
            skip(limits.CALL / 2)
            await asyncio.sleep(limits.LOOK)
            assert not scoring.done()
            skip(limits.CALL)
            return await scoring

    assert [result.outcome for result in run(go())] == [RewardOutcome.SCORED] * 5 + [RewardOutcome.TIMED_OUT]


def test_blocked_event_loop_does_not_time_out_rewards(marks: Path) -> None:
    async def go() -> list[RewardResult]:
        async with process() as rewards:
            scoring = asyncio.create_task(rewards.score(PROMPT, ["wait", "wait again"]))
            await limits.comes_true((marks / "begun wait").exists, "the first call has begun")
            (marks / "end of wait").touch()
            # The event loop is blocked until the first verdict is in its socket, and for longer than the deadline.
            limits.until((marks / "begun wait again").exists, "the second call has begun")
            skip(2 * limits.CALL)
            (marks / "end of wait again").touch()
            return await scoring

    assert [result.outcome for result in run(go())] == [RewardOutcome.SCORED] * 2


def test_concurrent_groups_record_their_own_failures(marks: Path) -> None:
    async def go() -> list[list[RewardResult]]:
        async with process() as rewards:
            groups = [["hang", "ok", "exit", "ok"], ["ok"] * 4, ["raise", "hang"], ["ok"]]
            return await asyncio.gather(*(rewards.score(PROMPT, group) for group in groups))

    outcomes = [[str(result.outcome) for result in results] for results in run(go(), marks)]
    assert outcomes == [
        ["timed_out", "scored", "crashed", "scored"],
        ["scored"] * 4,
        ["crashed", "timed_out"],
        ["scored"],
    ]


def test_reward_output_does_not_disturb_results(capfd: pytest.CaptureFixture[str]) -> None:
    assert scored("print")[0].value == 105.0
    assert "x" * 100000 in capfd.readouterr().err


def test_forked_reward_process_sends_no_result() -> None:
    assert [result.value for result in scored("fork", "ok", "fork", "good")] == [104.0, 102.0, 104.0, 104.0]


def test_reward_child_imports_lightly_with_its_environment() -> None:
    results = scored("modules", "environment", system_envs={"REWARD_LEVEL": "6"})
    assert [result.value for result in results] == [0.0, 6.0]


@pytest.mark.parametrize("response", ["spawn and hang", "spawn and exit"])
def test_what_a_reward_started_ends_with_it(response: str, marks: Path) -> None:
    async def go() -> list[int]:
        async with process() as rewards:
            (leader,) = reward_children()
            await rewards.score(PROMPT, [response])
            return [
                int(pid) for pid in os.listdir("/proc") if pid.isdigit() and stat_fields(int(pid))[3:4] == [str(leader)]
            ]

    started = run(go(), marks)
    limits.until(lambda: gone(started), "the processes that the reward started have ended", limits.END)


@pytest.mark.parametrize("response", ["apart", "apart and hang"])
def test_detached_processes_of_reward_end_with_it(response: str, marks: Path) -> None:
    file = marks / "pid"

    async def go() -> None:
        async with process() as rewards:
            await rewards.score(replace(PROMPT, row={"file": str(file)}), [response])

    run(go(), marks)
    pid = int(file.read_text())
    try:
        limits.until(lambda: gone([pid]), "the processes that the reward started have ended", limits.END)
    finally:
        if not gone([pid]):
            os.kill(pid, signal.SIGKILL)


def test_reward_changes_its_own_row_only() -> None:
    async def go() -> list[RewardResult]:
        async with process() as rewards:
            return await rewards.score(replace(PROMPT, row={"base": 1.0, "left": [7.0]}), ["take", "take", "ok"])

    assert [result.value for result in run(go())] == [8.0, 8.0, 3.0]


def test_a_child_that_died_while_idle_is_replaced() -> None:
    async def go() -> list[RewardResult]:
        async with process() as rewards:
            (child,) = reward_children()
            os.kill(child, signal.SIGKILL)
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            return await rewards.score(PROMPT, ["ok"])

    assert run(go())[0].value == 102.0


def test_call_of_killed_or_stopped_child_is_repeated(marks: Path) -> None:
    async def disturbed(rewards: RewardProcess, number: signal.Signals) -> None:
        mark = marks / "begun wait"
        await limits.comes_true(mark.exists, "the call has begun")
        mark.unlink()
        (child,) = reward_children()
        os.kill(child, number)
        if number is signal.SIGSTOP:
            await limits.comes_true(lambda: stat_fields(child)[0] == "T", "the child is stopped")
            skip(limits.CALL)

    async def go() -> list[RewardResult]:
        found = []
        async with process() as rewards:
            for numbers in ((signal.SIGKILL,), (signal.SIGSTOP,), (signal.SIGKILL, signal.SIGKILL)):
                for mark in ("begun wait", "end of wait"):
                    (marks / mark).unlink(missing_ok=True)
                scoring = asyncio.create_task(rewards.score(PROMPT, ["wait"]))
                for number in numbers:
                    await disturbed(rewards, number)
                (marks / "end of wait").touch()
                found += await scoring
        return found

    killed, stopped, twice = run(go())
    assert [killed.outcome, stopped.outcome, twice.outcome] == [
        RewardOutcome.SCORED,
        RewardOutcome.SCORED,
        RewardOutcome.CRASHED,
    ]


OUTLIVES = """
import os, signal, subprocess
from roll.hosted.protocol import outlive_sigterm
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
outlive_sigterm()
os.kill(os.getpid(), signal.SIGTERM)
started = subprocess.run(["sh", "-c", "kill -TERM $$; echo alive"])
if not (forked := os.fork()):
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
print(started.returncode, os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
"""


def test_sigterm_ends_only_what_user_code_starts() -> None:
    done = subprocess.run([sys.executable, "-c", OUTLIVES], capture_output=True, text=True, timeout=limits.PROCESS)
    assert done.stdout.split() == ["-15", "-15"], done.stderr


def test_cancelled_group_leaves_no_result_behind(marks: Path) -> None:
    async def go() -> list[RewardResult]:
        async with process() as rewards:
            scoring = asyncio.create_task(rewards.score(PROMPT, ["wait", "stale", "stale"]))
            await limits.comes_true((marks / "begun wait").exists, "the first call has begun")
            scoring.cancel()
            with pytest.raises(asyncio.CancelledError):
                await scoring
            return await rewards.score(PROMPT, ["fresh"])

    assert [result.note for result in run(go())] == ["fresh"]


def test_close_ends_what_is_under_way(marks: Path) -> None:
    """Closing does not wait for the deadline, which is longer than the limit of this test."""

    async def go() -> list[BaseException | list[RewardResult]]:
        rewards = RewardProcess("act", section(timeout=limits.RUN), limits.START)
        await rewards.start()
        tasks = [asyncio.create_task(rewards.score(PROMPT, ["hang", "ok"])) for _ in range(3)]
        await limits.comes_true((marks / "hanging").exists, "the first call hangs")
        await rewards.close()
        await rewards.close()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(RollError, match="is closed"):
            await rewards.score(PROMPT, ["ok"])
        return outcomes

    assert all(isinstance(outcome, RollError) and "closed" in str(outcome) for outcome in run(go()))


def test_unloadable_reward_raises_at_start() -> None:
    async def go(**others: Any) -> None:
        async with process(**others):
            pytest.fail("the reward process started")

    with pytest.raises(ConfigError, match="'math_rul'") as raised:
        run(go(reward="math_rul"))
    assert [(fault.place, fault.code) for fault in raised.value.faults] == [("rewards.act.reward", "not_found")]
    with pytest.raises(ConfigError, match=r"rewards\.act\.reward_args: does not fit 'faulty_rewards:act': .*'bonsu'"):
        run(go(reward_args={"bonsu": 1}))


def test_dead_or_late_child_start_raises(tmp_path: Path) -> None:
    (tmp_path / "dying_rewards.py").write_text("import os\nos._exit(9)\n")
    (tmp_path / "late_rewards.py").write_text("import time\ntime.sleep(3600)\n")

    async def go(name: str, start_seconds: float) -> None:
        async with process(start_seconds, reward=name):
            pytest.fail("the reward process started")

    with pytest.raises(HostedProcessFailed, match="did not start: .* status 9"):
        run(go("dying_rewards:reward", limits.START))
    with pytest.raises(HostedProcessFailed, match="not ready after 1 s"):
        run(go("late_rewards:reward", limits.EXPIRY))


PARENT = """
import asyncio, sys
from pathlib import Path
import numpy as np
from roll.config.schema.roles import RewardConfig
from roll.rewards.reward_workers import RewardProcess
from roll.types import Prompt
from tests import limits

async def main():
    rewards = RewardProcess("act", RewardConfig.model_validate({"reward": "faulty_rewards:act", "timeout": limits.RUN}),
    limits.START)
    await rewards.start()
    asyncio.create_task(rewards.score(Prompt(0, np.zeros(1, dtype=np.int32), "", "act", {}), ["hang in C"]))
    await limits.comes_true(Path(sys.argv[1]).exists, "the response hangs")
    print("ready", flush=True)
    await asyncio.sleep(limits.RUN)

asyncio.run(main())
"""


def test_reward_child_dies_with_killed_parent(marks: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    # The parent runs with -c and has no importable __main__. The child does not need one.
    command = [sys.executable, "-c", PARENT, str(marks / "hanging")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        children = descendants(parent.pid)
        assert len(children) == 1
        parent.kill()
        parent.wait(limits.END)
    limits.until(lambda: gone(children), "the child process has ended", limits.END)
