"""Agents as separate processes: their input, how they end, and that they leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from roll.agents.environments.base import Observation, Step
from roll.agents.episodes import EpisodeLimits
from roll.agents.gateway import supervisor
from roll.agents.gateway.agent import LOST, agent_environment, command_of, run_agent
from roll.agents.gateway.episodes import Agent, AgentEpisodes
from roll.agents.gateway.server import Gateway, GatewayBounds
from roll.config.schema.environments import EnvironmentConfig
from roll.errors import EnvironmentFailed, RollError
from roll.runs.rlvr.environment_trial import agent_faults
from roll.system.tree import TreeBounds
from roll.types import Episode, Sampling, StopReason
from tests import limits
from tests.unit.gateway.asking import RESPONSE, SEQUENCE, check_exact, laid, turns
from tests.unit.gateway.serving import BODY_BYTES, LOOPBACK, run
from tests.unit.rollout.playing import DOMAIN, Chat, Engine, World, Worlds, task

ASKING = """
import json, os, urllib.request
def ask(messages, **more):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    body = json.dumps({"messages": messages, **more}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
"""
TWO_TURNS = f"""{ASKING}
import sys
row = json.load(sys.stdin)
first = ask(row["messages"])
ask([*row["messages"], first, {{"role": "user", "content": str(row["number"])}}])
"""
FOR_EVER = f"{ASKING}\nwhile True: ask([{{'role': 'user', 'content': os.urandom(4).hex()}}])"
SLOW = f"{ASKING}\nask([{{'role': 'user', 'content': 'go'}}])\nimport time\ntime.sleep(1e6)"
SPAWNS = """
import os, subprocess, sys, time
apart = [subprocess.Popen(["sleep", "1000000"], start_new_session=new) for new in (True, False)]
os.spawnlp(os.P_WAIT, "sh", "sh", "-c", "setsid sleep 1000000 & echo $! >&2")
print(*[one.pid for one in apart], flush=True)
"""


GREEDY = "import time; kept = b'x' * (1 << 28); time.sleep(1e6)"
CROWDED = (
    "import subprocess, time; started = [subprocess.Popen(['sleep', '1000000']) for _ in range(9)]; time.sleep(1e6)"
)
BOUNDS = TreeBounds(1 << 32, 64)


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


async def episode(
    command: Sequence[str],
    worlds: Worlds,
    engine: Engine,
    seconds: float = limits.CALL,
    max_turns: int = 5,
    attempts: int = 2,
    within: TreeBounds = BOUNDS,
) -> Episode:
    gateway, bounds = Gateway(GatewayBounds(BODY_BYTES, 8)), EpisodeLimits(max_turns, seconds, attempts)
    agents = {DOMAIN: Agent(tuple(command), {}, bounds, within)}
    async with gateway.listening(LOOPBACK, 0):
        player = AgentEpisodes(worlds, gateway, engine, Chat(), Sampling(RESPONSE), agents, SEQUENCE)
        return await player.play(task(7), 5, 11)


def one(command: Sequence[str], world: World, engine: Engine, **keys: Any) -> Episode:
    before = children()
    found = run(episode(command, Worlds(lambda: world), engine, **keys))
    assert children() <= before, "the agent left no process"
    return found


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def names(pids: set[int]) -> set[str]:
    """Return the names of the given processes that are still running."""
    return {process.info["name"] for process in psutil.process_iter(["name"]) if process.pid in pids}


def quick(says: Any = None) -> Engine:
    return Engine(says or turns(), takes=0)


def test_command_agent_plays_and_environment_judges_last_message() -> None:
    world, engine = World([Step(reward=0.75, done=True, metrics={"found": 1.0})]), quick()
    found = one(python(TWO_TURNS), world, engine)
    assert laid(found) == [["user:go|assistant:", "turn 1|", "user:7|assistant:", "turn 2|"]]
    assert found.stop is StopReason.COMPLETED and found.reward.value == 0.75 and found.metrics["environment/found"] == 1
    assert [message["content"] for message in world.heard] == ["turn 2"] and world.closed == 1
    assert found.metrics["retried"] == 0 and found.metrics["environment_seconds"] >= 0
    check_exact(found, engine)


FUNCTION = """
import openai

async def play(row, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await client.chat.completions.create(model="m", messages=row["messages"])

def plain(row, base_url, api_key):
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        client.chat.completions.create(model="m", messages=row["messages"])

async def claude(row, base_url, api_key):
    import anthropic
    async with anthropic.AsyncAnthropic() as client:
        await client.messages.create(model="m", messages=row["messages"], max_tokens=99)

def falls(row, base_url, api_key):
    raise ValueError("it fell over")

def takes_less(row): ...
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_agents.py").write_text(FUNCTION)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_agents"


@pytest.mark.parametrize("name", ["play", "plain", "claude"])
def test_a_function_plays(module: str, name: str) -> None:
    found = one(command_of(f"{module}:{name}"), World([Step(reward=1.0, done=True)]), quick())
    assert laid(found) == [["user:go|assistant:", "turn 1|"]] and found.reward.value == 1


FAILING = {
    "it says why": (python("import sys; sys.exit('no idea')"), "status 1: no idea"),
    "it is killed": (python("import os; os.kill(os.getpid(), 9)"), "status 137: it wrote nothing"),
    "it asks nothing": (python("print('hello')"), "because it sent no request: hello"),
    "it is refused": (
        python(f"{ASKING}\nask([], n=2)"),
        "status 1: the gateway refused a request: n: 2 is not supported; send one request for each answer",
    ),
    "its message is refused": (
        python(
            "import anthropic\nanthropic.Anthropic().messages.create(model='m', max_tokens=9, "
            "messages=[{'role': 'user', 'content': 'go'}], tool_choice={'type': 'any'})"
        ),
        "status 1: the gateway refused a request: tool_choice.type: 'any' is not supported; give 'auto'",
    ),
    "it does not start": (("/no/such/program",), "status 127: /no/such/program cannot be started"),
}


@pytest.mark.parametrize("case", FAILING)
def test_failing_agent_is_retried_and_gives_no_verdict(case: str) -> None:
    command, why = FAILING[case]
    worlds = Worlds(lambda: World([Step(reward=1.0, done=True)]))
    found = run(episode(command, worlds, quick()))
    assert found.stop is StopReason.ENVIRONMENT_FAILED and why in found.reward.note, found.reward.note
    assert len(worlds.opened) == 2 and all(world.closed == 1 and not world.heard for world in worlds.opened)


def test_raising_agent_function_is_named_by_traceback(module: str) -> None:
    found = run(episode(command_of(f"{module}:falls"), Worlds(lambda: World([])), quick(), attempts=1))
    assert "ValueError: it fell over" in found.reward.note and found.stop is StopReason.ENVIRONMENT_FAILED


def test_agent_exceeding_its_turns_is_ended_with_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("roll.agents.gateway.episodes.GRACE_SECONDS", limits.LOOK)
    engine = quick()
    found = one(python(FOR_EVER), World([Step(reward=0.5)]), engine, max_turns=3)
    assert found.stop is StopReason.MAX_TURNS and found.reward.value == 0.5 and len(engine.requests) == 3
    check_exact(found, engine)


def test_an_agent_that_is_late_has_no_verdict() -> None:
    world = World([Step(reward=1.0)])
    found = one(python(SLOW), world, quick(), seconds=3 * limits.EXPIRY)
    assert (
        found.stop is StopReason.DEADLINE
        and "episode_timeout" in found.reward.note
        and not world.heard
        and world.closed == 1
    )


def test_environment_failure_and_engine_failure_are_distinguished() -> None:
    broken = run(
        episode(python(TWO_TURNS), Worlds(lambda: World([EnvironmentFailed("it fell over")])), quick(), attempts=1)
    )
    assert broken.stop is StopReason.ENVIRONMENT_FAILED and broken.reward.note == "it fell over"

    class Failing(Engine):
        async def generate(self, *given: Any, **keys: Any) -> Any:
            raise RollError("no engine is left")
            yield

    with pytest.raises(RollError, match="no engine is left"):
        one(python(TWO_TURNS), World([]), Failing(turns()))


def given_environment() -> Mapping[str, str]:
    return agent_environment(f"http://{LOOPBACK}:1/v1", "key", {"OWN": "1"})


def test_everything_that_an_agent_started_ends_with_it() -> None:
    end = run(run_agent(python(SPAWNS), {}, given_environment(), BOUNDS))
    pids = [int(word) for word in end.output.split()]
    assert end.status == 0 and len(pids) == 3 and not any(map(psutil.pid_exists, pids))


def test_processes_of_agents_end_with_the_run(tmp_path: Path) -> None:
    """The run is killed, so it cannot end the agent's processes itself."""
    code = f"""
import asyncio
from roll.agents.gateway.agent import agent_environment, run_agent
from roll.system.tree import TreeBounds
spawns = {SPAWNS + "time.sleep(1e6)"!r}
asyncio.run(run_agent(({sys.executable!r}, "-c", spawns.replace("flush=True", "flush=True, file=open('pids', 'w')")),
{{}},
    agent_environment("http://127.0.0.1:1/v1", "key", {{}}), TreeBounds(1 << 32, 64)))
"""
    parent = subprocess.Popen(python(code), cwd=tmp_path)
    file = tmp_path / "pids"
    limits.until(lambda: file.exists() and len(file.read_text().split()) == 2, "the agent has started others")
    below = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
    assert len(below) >= 4
    parent.send_signal(signal.SIGKILL)
    parent.wait(limits.END)
    limits.until(lambda: not any(map(psutil.pid_exists, below)), "all processes of the agent are gone", limits.END)


STOPS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
LOSES_SUPERVISOR = """
import os, signal, subprocess, sys
apart = subprocess.Popen(["sleep", "1000000"], start_new_session=True, stdin=-3, stdout=-3, stderr=-3)
bare = subprocess.Popen(["sleep", "1000000"], env={})
print(os.getppid(), os.getpid(), apart.pid, bare.pid, file=open(sys.argv[1], "w"), flush=True)
os.kill(os.getppid(), int(sys.argv[2]))
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_stopped_agent_is_ended_and_repeated(tmp_path: Path) -> None:
    code = f"""{ASKING}
import pathlib, signal
if not pathlib.Path({str(tmp_path / "once")!r}).exists():
    pathlib.Path({str(tmp_path / "once")!r}).touch()
    os.kill(os.getpid(), signal.SIGSTOP)
ask([{{"role": "user", "content": "go"}}])
"""
    found = one(python(code), World([Step(reward=1.0)]), quick())
    assert found.reward.value == 1 and found.metrics["retried"] == 1
    end = run(run_agent(python(STOPS_ITSELF), {}, given_environment(), BOUNDS))
    assert end.status == supervisor.STOPPED and end.output.endswith("was stopped (SIGSTOP)")


@pytest.mark.parametrize(("number", "said"), [(signal.SIGKILL, "died of SIGKILL"), (signal.SIGSTOP, "was stopped")])
def test_an_agent_without_supervisor_leaves_nothing(tmp_path: Path, number: signal.Signals, said: str) -> None:
    pids = tmp_path / "pids"
    end = run(run_agent((*python(LOSES_SUPERVISOR), str(pids), str(int(number))), {}, given_environment(), BOUNDS))
    assert end.status == LOST and said in end.output
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 4
    limits.until(lambda: not any(map(psutil.pid_exists, started)), "all processes of the agent are gone", limits.END)


def test_agent_receives_gateway_address_and_row() -> None:
    code = "import json, os, sys; print(json.load(sys.stdin), *[os.environ[name] for name in sys.argv[1:]])"
    names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "OWN", "NO_PROXY")
    end = run(run_agent((*python(code), *names), {"a": 1}, given_environment(), BOUNDS))
    told = "{'a': 1} http://127.0.0.1:1/v1 key http://127.0.0.1:1 key 1 "
    assert end.output.startswith(told) and end.output.endswith(LOOPBACK)


def test_agent_may_ignore_row_and_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(run_agent(("true",), {"long": "x" * (1 << 22)}, given_environment(), BOUNDS)).status == 0
    assert (
        run(run_agent(python("print('x' * 100_000 + 'end')"), {}, given_environment(), BOUNDS)).output
        == "x" * 1997 + "end"
    )
    monkeypatch.setattr("roll.agents.gateway.agent.MOST_OUTPUT", 1 << 20)
    end = run(run_agent(("yes",), {}, given_environment(), BOUNDS))
    assert end.status != 0 and end.output.endswith("more than 1 MiB")


@pytest.mark.parametrize(
    ("code", "bounds", "named"),
    [
        (GREEDY, TreeBounds(1 << 27, 64), "memory_gib is 0.125"),
        (CROWDED, TreeBounds(1 << 32, 8), "10 processes; max_processes is 8"),
    ],
)
def test_agent_exceeding_a_bound_ends_with_its_children(code: str, bounds: TreeBounds, named: str) -> None:
    before = children()
    end = run(run_agent(python(code), {}, given_environment(), bounds))
    assert end.status == supervisor.EXCEEDED and named in end.output
    assert children() <= before


def test_agent_exceeding_a_bound_gets_no_reward() -> None:
    found = one(python(GREEDY), World([]), Engine(turns()), within=TreeBounds(1 << 27, 64))
    assert found.stop is StopReason.ENVIRONMENT_FAILED and "memory_gib is 0.125" in found.reward.note


@pytest.mark.parametrize("turns_of_loop", [*range(12), None])
def test_a_cancelled_run_leaves_nothing(turns_of_loop: int | None) -> None:
    """A run may be cancelled at any turn of the event loop, even if its agent has started while the loop was busy."""
    before, files = children(), set(os.listdir("/proc/self/fd"))
    value = f"roll-test-{os.getpid()}-{turns_of_loop}"

    def sleeps() -> bool:
        return "sleep" in names(children() - before)

    async def work() -> None:
        environment = {**given_environment(), "STARTED_BY": value}
        running = asyncio.create_task(run_agent(("sleep", "1000000"), {}, environment, BOUNDS))
        if turns_of_loop is None:
            await limits.comes_true(sleeps, "the agent sleeps")
        for _ in range(turns_of_loop or 0):
            await asyncio.sleep(0)
        if children() - before:
            limits.until(sleeps, "the agent sleeps")
        running.cancel()
        await asyncio.wait({running}, timeout=limits.CALL)
        assert running.cancelled()

    run(work())
    assert children() <= before and not started_by(value)
    # A file that another thread of the test session has open for a moment is no leftover.
    limits.until(lambda: set(os.listdir("/proc/self/fd")) <= files, "no file more is open")


def started_by(value: str) -> list[str]:
    """Return the names of all processes with this value of STARTED_BY, whoever their parent is."""
    processes = psutil.process_iter(["name", "environ"])
    return [one.info["name"] for one in processes if (one.info["environ"] or {}).get("STARTED_BY") == value]


def test_agents_are_looked_at_before_anything_starts(module: str) -> None:
    agents = {
        "missing": {"command": ("no-such-program",)},
        "there": {"command": ("true",)},
        "plays": {"function": f"{module}:play"},
        "less": {"function": f"{module}:takes_less"},
        "unknown": {"function": f"{module}:nothing"},
        "elsewhere": {"function": "no_such_module:play"},
    }
    sections = {name: EnvironmentConfig.model_validate({"agent": agent}) for name, agent in agents.items()}
    faults = {fault.place: fault.problem for fault in agent_faults(sections, limits.START)}
    assert list(faults) == [
        *("environments.missing.agent.command", "environments.less.agent.function"),
        *("environments.unknown.agent.function", "environments.elsewhere.agent.function"),
    ]
    less, unknown, elsewhere = list(faults.values())[1:]
    assert "row, base_url and api_key" in less and "no function 'nothing'" in unknown and "no_such_module" in elsewhere


def test_the_first_observation_is_part_of_the_row() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    world = World([Step(reward=1.0)], Observation([{"role": "user", "content": "hello"}], tools))
    code = (
        f"{ASKING}\nimport sys\nrow = json.load(sys.stdin)\nassert row['number'] == 7\nask(row['messages'], "
        f"tools=row['tools'])"
    )
    assert laid(one(python(code), world, quick())) == [["user:hello|assistant:", "turn 1|"]]
