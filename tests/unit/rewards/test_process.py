from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll.config.schema_roles import Reward
from roll.errors import ConfigError, RollError
from roll.rewards.process import RewardProcess, RewardProcessFailed
from roll.types import Prompt, RewardOutcome, RewardResult

FAULTY = """
import ctypes, os, signal, subprocess, sys, time
from roll.types import RewardOutcome, RewardResult

def act(prompt, response, row, bonus=0.0):
    if response == "hang":
        time.sleep(600)
    if response == "swallow":
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            try:
                time.sleep(600)
            except BaseException:
                pass
    if response == "hang in C":
        ctypes.PyDLL(None).sleep(600)  # Holds the interpreter's lock: no Python code runs meanwhile.
    if response == "exit":
        os._exit(3)
    if response == "sys.exit":
        sys.exit("enough")
    if response == "segfault":
        ctypes.string_at(0)
    if response == "raise":
        raise KeyError("no such thing")
    if response == "raise with a note":
        error = KeyError("no such thing")
        error.add_note("a remark")
        raise error
    if response == "syntax":
        compile("1 +", "here", "eval")
    if response == "nan":
        return RewardResult(float("nan"))
    if response == "inf part":
        return RewardResult(1.0, parts={"style": float("inf")})
    if response == "garbage":
        return 1.0
    if response == "malformed":
        return RewardResult("high")
    if response == "unparsable":
        return RewardResult(7.0, RewardOutcome.UNPARSABLE, note="nothing there")
    if response == "print":
        print("x" * 100000)
        sys.stdout.flush()
    if response == "spawn and hang":
        subprocess.Popen(["sleep", "600"])
        time.sleep(600)
    if response == "spawn and exit":
        subprocess.Popen(["sleep", "600"])
        os._exit(3)
    if response.startswith("apart"):
        # A session of its own, whose leader ends at once and leaves an orphan in it.
        subprocess.run(["setsid", "sh", "-c", f"sleep 600 & echo $! > {row['file']}"])
        time.sleep(600 if response == "apart and hang" else 0)
        return RewardResult(1.0)
    if response == "fork":
        if not os.fork():
            sys.exit(0)  # meant to end the fork, as in a sandbox
        os.wait()
    if response == "take":
        return RewardResult(row["left"].pop() + prompt.row.pop("base"))
    if response == "slow":
        time.sleep(0.2)
    if response == "modules":
        return RewardResult(float("torch" in sys.modules) + 2 * float("ray" in sys.modules))
    if response == "environment":
        return RewardResult(float(os.environ["REWARD_LEVEL"]))
    return RewardResult(row["base"] + len(response) + bonus, parts={"length": float(len(response))}, note=response[:10])
"""
PROMPT = Prompt(3, np.arange(4, dtype=np.int32), "text", "act", {"base": 100.0})


@pytest.fixture(autouse=True)
def faulty_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faulty_rewards.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Any:
    """No process, socket or pipe may outlive a test."""
    channels, processes = open_channels(), descendants(os.getpid())
    yield
    assert [pid for pid in descendants(os.getpid()) if pid not in processes] == []
    assert open_channels() <= channels


def open_channels() -> set[str]:
    """Sockets and pipes of this process: those to its children, beside whatever other tests have left open."""
    places = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return {target for place in places if os.path.lexists(place) and (target := os.readlink(place)).startswith(("socket:", "pipe:"))}


def reward_children() -> list[int]:
    """Reward processes that this process holds."""
    return [pid for pid in descendants(os.getpid()) if b"roll.rewards.child" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def descendants(pid: int) -> list[int]:
    """Processes in the tree beneath `pid`, those of earlier tests included."""
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := stat_fields(int(entry))) and int(fields[1]) == pid:
            found += [int(entry), *descendants(int(entry))]
    return found


def stat_fields(pid: int) -> list[str]:
    """State, parent, group, session, ... of /proc/PID/stat; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    """Whether none of the processes lives (a zombie does not), at the latest after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if all((stat_fields(pid) or ["Z"])[0] in "ZX" for pid in pids):
            return True
        time.sleep(0.02)
    return False


def section(**others: Any) -> Reward:
    return Reward.model_validate({"reward": "faulty_rewards:act", "timeout": 0.5, "failed_value": -1.0, **others})


@asynccontextmanager
async def process(start_seconds: float = 120.0, **others: Any) -> AsyncIterator[RewardProcess]:
    """Started, and closed whatever happens."""
    rewards = RewardProcess("act", section(**others), start_seconds)
    try:
        await rewards.start()
        yield rewards
    finally:
        await rewards.close()


def scored(*responses: str, **others: Any) -> list[RewardResult]:
    async def go() -> list[RewardResult]:
        async with process(**others) as rewards:
            return await rewards.score(PROMPT, responses)

    return run(go())


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


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
        ("hang", RewardOutcome.TIMED_OUT, "no verdict after 0.5 s"),
        ("swallow", RewardOutcome.TIMED_OUT, "no verdict after 0.5 s"),
        ("hang in C", RewardOutcome.TIMED_OUT, "no verdict after 0.5 s"),
        ("exit", RewardOutcome.CRASHED, "the process ended itself with status 3"),
        ("segfault", RewardOutcome.CRASHED, "the process died of SIGSEGV"),
        ("sys.exit", RewardOutcome.CRASHED, "SystemExit: enough"),
        ("raise", RewardOutcome.CRASHED, "KeyError: 'no such thing'"),
        ("raise with a note", RewardOutcome.CRASHED, "KeyError: 'no such thing'"),
        ("syntax", RewardOutcome.CRASHED, "SyntaxError: invalid syntax"),
        ("nan", RewardOutcome.CRASHED, "returned a malformed RewardResult: its value is nan"),
        ("inf part", RewardOutcome.CRASHED, "returned a malformed RewardResult: its part 'style' is inf"),
        ("garbage", RewardOutcome.CRASHED, "returned a float, not a RewardResult: 1.0"),
        ("malformed", RewardOutcome.CRASHED, "returned a malformed RewardResult: could not convert string to float: 'high'"),
        ("unparsable", RewardOutcome.UNPARSABLE, "nothing there"),
    ],
)
def test_a_failed_reward_is_recorded_and_the_group_goes_on(response: str, outcome: RewardOutcome, note: str) -> None:
    before, failed, after = scored("fine", response, "after")
    assert (before.value, after.value) == (104.0, 105.0)
    assert (failed.value, failed.outcome, failed.note) == (-1.0, outcome, note)


def test_the_deadline_holds_for_each_response_and_is_kept() -> None:
    async def go() -> tuple[list[RewardResult], float]:
        async with process(timeout=0.6) as rewards:
            start = time.monotonic()
            results = await rewards.score(PROMPT, ["slow"] * 5 + ["hang"])
            return results, time.monotonic() - start

    results, seconds = run(go())
    assert [result.outcome for result in results] == [RewardOutcome.SCORED] * 5 + [RewardOutcome.TIMED_OUT]
    assert 1.6 <= seconds < 2.1


def test_a_blocked_event_loop_does_not_make_a_reward_late() -> None:
    async def go() -> list[RewardResult]:
        async with process(timeout=0.3) as rewards:
            scoring = asyncio.create_task(rewards.score(PROMPT, ["slow"]))
            await asyncio.sleep(0.05)
            time.sleep(0.5)
            return await scoring

    assert [result.outcome for result in run(go())] == [RewardOutcome.SCORED]


def test_several_failures_in_one_group_and_in_groups_at_once() -> None:
    async def go() -> list[list[RewardResult]]:
        async with process() as rewards:
            groups = [["hang", "ok", "exit", "ok"], ["ok"] * 4, ["raise", "hang"], ["ok"]]
            return await asyncio.gather(*(rewards.score(PROMPT, group) for group in groups))

    outcomes = [[str(result.outcome) for result in results] for results in run(go())]
    assert outcomes == [["timed_out", "scored", "crashed", "scored"], ["scored"] * 4, ["crashed", "timed_out"], ["scored"]]


def test_what_a_reward_prints_does_not_disturb_its_results(capfd: pytest.CaptureFixture[str]) -> None:
    assert scored("print")[0].value == 105.0
    assert "x" * 100000 in capfd.readouterr().err


def test_a_process_that_a_reward_forked_says_nothing_in_its_place() -> None:
    assert [result.value for result in scored("fork", "ok", "fork", "good")] == [104.0, 102.0, 104.0, 104.0]


def test_a_child_imports_neither_torch_nor_ray_and_gets_its_environment() -> None:
    results = scored("modules", "environment", system_envs={"REWARD_LEVEL": "6"})
    assert [result.value for result in results] == [0.0, 6.0]


@pytest.mark.parametrize("response", ["spawn and hang", "spawn and exit"])
def test_what_a_reward_started_ends_with_it(response: str) -> None:
    async def go() -> list[int]:
        async with process() as rewards:
            (leader,) = reward_children()
            await rewards.score(PROMPT, [response])
            return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and stat_fields(int(pid))[3:4] == [str(leader)]]

    assert gone(run(go()))


@pytest.mark.parametrize("response", ["apart", "apart and hang"])
def test_what_a_reward_started_in_a_session_apart_ends_with_it(response: str, tmp_path: Path) -> None:
    file = tmp_path / "pid"

    async def go() -> None:
        async with process() as rewards:
            await rewards.score(replace(PROMPT, row={"file": str(file)}), [response])

    run(go())
    pid = int(file.read_text())
    try:
        assert gone([pid])
    finally:
        if not gone([pid], 0.1):
            os.kill(pid, signal.SIGKILL)


def test_what_a_reward_does_to_its_row_stays_with_the_response() -> None:
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


def test_a_cancelled_group_leaves_no_result_to_the_next() -> None:
    async def go() -> list[RewardResult]:
        async with process(timeout=5.0) as rewards:
            scoring = asyncio.create_task(rewards.score(PROMPT, ["slow", "stale", "stale"]))
            await asyncio.sleep(0.1)
            scoring.cancel()
            with pytest.raises(asyncio.CancelledError):
                await scoring
            return await rewards.score(PROMPT, ["fresh"])

    assert [result.note for result in run(go())] == ["fresh"]


def test_close_ends_what_is_under_way() -> None:
    async def go() -> tuple[float, list[BaseException | list[RewardResult]]]:
        rewards = RewardProcess("act", section(timeout=60.0), 60.0)
        await rewards.start()
        tasks = [asyncio.create_task(rewards.score(PROMPT, ["hang", "ok"])) for _ in range(3)]
        await asyncio.sleep(0.1)
        start = time.monotonic()
        await rewards.close()
        await rewards.close()
        seconds = time.monotonic() - start
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(RollError, match="is closed"):
            await rewards.score(PROMPT, ["ok"])
        return seconds, outcomes

    seconds, outcomes = run(go())
    assert seconds < 2
    assert all(isinstance(outcome, RollError) and "closed" in str(outcome) for outcome in outcomes)


def test_a_reward_that_cannot_be_loaded_is_known_at_the_start() -> None:
    async def go(**others: Any) -> None:
        async with process(**others):
            pytest.fail("started")

    with pytest.raises(ConfigError, match=r"rewards\.act\.reward: no reward is named 'math_rul'"):
        run(go(reward="math_rul"))
    with pytest.raises(ConfigError, match=r"rewards\.act\.reward_args: does not fit 'faulty_rewards:act': .*'bonsu'"):
        run(go(reward_args={"bonsu": 1}))


def test_a_child_that_dies_or_is_late_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "dying_rewards.py").write_text("import os\nos._exit(9)\n")
    (tmp_path / "late_rewards.py").write_text("import time\ntime.sleep(600)\n")

    async def go(name: str) -> None:
        async with process(start_seconds=3.0, reward=name):
            pytest.fail("started")

    with pytest.raises(RewardProcessFailed, match="^the reward's process did not start: .* status 9"):
        run(go("dying_rewards:reward"))
    with pytest.raises(RewardProcessFailed, match="^the reward's process was not ready after 3 s"):
        run(go("late_rewards:reward"))


PARENT = """
import asyncio, sys
import numpy as np
from roll.config.schema_roles import Reward
from roll.rewards.process import RewardProcess
from roll.types import Prompt

async def main():
    rewards = RewardProcess("act", Reward.model_validate({"reward": "faulty_rewards:act", "timeout": 600.0}), 60.0)
    await rewards.start()
    asyncio.create_task(rewards.score(Prompt(0, np.zeros(1, dtype=np.int32), "", "act", {}), ["hang in C"]))
    await asyncio.sleep(0.3)
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_child_dies_with_a_parent_that_is_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    # The program comes by -c: such a parent has no importable __main__, nor need it.
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        children = descendants(parent.pid)
        assert len(children) == 1
        parent.kill()
        parent.wait(5)
    assert gone(children)
