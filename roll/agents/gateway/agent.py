"""Runs an agent as a process tree with limits on memory, processes and output. The caller sets the deadline."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from roll.system.event_loop import uninterrupted
from roll.system.orphans import end_marked, is_stopped
from roll.system.tree import LOOK_EVERY, STOPPED_LOOKS, TreeBounds

if TYPE_CHECKING:  # the process of an agent function does not import the schema
    from roll.config.schema.environments import AgentConfig

BASE_URL, KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"
ANTHROPIC_BASE_URL, ANTHROPIC_KEY = "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"
"""Anthropic's clients append `/v1` to the address themselves."""
NO_PROXY = ("NO_PROXY", "no_proxy")
CHECK = "check"
"""Argument after a function's name that makes the process only check the function."""
SUPERVISOR, CALLER = "roll.agents.gateway.supervisor", "roll.agents.gateway.call"
VERIFIERS = Path(__file__).with_name("verifiers_program.py")
"""The program that plays an episode of verifiers. Another interpreter runs it."""
KEPT_CHARACTERS = 2000
"""Number of characters at the end of an agent's output that are kept for the note of a failure."""
MOST_OUTPUT = 64 << 20
"""Largest number of bytes of an agent's output. An agent that writes more is killed."""
TOO_MUCH = -1
"""Exit status that is reported for an agent with too much output."""
LOST = -2
"""Exit status that is reported for an agent whose supervisor was killed or stopped."""
MARK = "ROLL_AGENT"
"""Environment variable that all processes of one run of an agent inherit. Its value is random."""
CHUNK_BYTES = 1 << 16
END_SECONDS = 15.0
"""Deadline in seconds for the supervisor to end its processes."""


@dataclass(frozen=True)
class AgentEnd:
    """How an agent ended."""

    status: int
    output: str
    """The end of its output."""


def command_of(function: str) -> tuple[str, ...]:
    """Return the command that runs an agent function in a process."""
    return (sys.executable, "-P", "-m", CALLER, function)


def command_for(agent: AgentConfig) -> tuple[str, ...]:
    """Return the command that runs an agent."""
    if agent.function is not None:
        return command_of(agent.function)
    if (played := agent.verifiers) is not None:
        # -I: the interpreter has its own packages, and none of roll's.
        return (played.python, "-I", str(VERIFIERS), played.env_id, json.dumps(played.env_args))
    assert agent.command, "an agent without a command or a function is a fault"
    return agent.command


def own_environment() -> dict[str, str]:
    """Return this process's environment variables, with a PYTHONPATH that finds the same modules as this process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def agent_environment(base_url: str, key: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of an agent: those of this process, `given`, and the gateway's address and key.

    The gateway's host is excluded from HTTP proxies.
    """
    anthropic = {ANTHROPIC_BASE_URL: base_url.removesuffix("/v1"), ANTHROPIC_KEY: key}
    variables = {**own_environment(), **given, BASE_URL: base_url, KEY: key, **anthropic}
    host = urlsplit(base_url).hostname or ""
    return variables | {name: ",".join(filter(None, (variables.get(name), host))) for name in NO_PROXY}


async def run_agent(
    command: Sequence[str], row: Mapping[str, Any], environment: Mapping[str, str], bounds: TreeBounds
) -> AgentEnd:
    """Run a command until it ends, with the row as JSON on stdin. Its tree is killed at a limit or a cancellation, and
    if its supervisor is lost.
    """
    ends, alive = os.pipe()
    mark = secrets.token_hex(16)
    try:
        process = await uninterrupted(_started(command, {**environment, MARK: mark}, bounds, ends))
        telling = asyncio.create_task(_write(process, json.dumps(dict(row), default=str).encode()))
        try:
            return await _run(process)
        finally:
            telling.cancel()
            os.close(alive)
            alive = -1
            await uninterrupted(_all_ended(process, mark))
    finally:
        os.close(ends)
        if alive >= 0:
            os.close(alive)


async def _started(
    command: Sequence[str], environment: Mapping[str, str], bounds: TreeBounds, descriptor: int
) -> asyncio.subprocess.Process:
    numbers = map(str, (descriptor, bounds.memory_bytes, bounds.processes))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", SUPERVISOR, *numbers, *command),
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        pass_fds=(descriptor,),
        start_new_session=True,
    )


async def _write(process: asyncio.subprocess.Process, text: bytes) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):  # the agent may end without reading the row
        process.stdin.write(text)
        await process.stdin.drain()
    process.stdin.close()


async def _run(process: asyncio.subprocess.Process) -> AgentEnd:
    """Return how the agent ended, or that its supervisor was lost: then a process of the agent may hold the output."""
    reading, watching = asyncio.create_task(_output(process)), asyncio.create_task(_lost(process))
    try:
        await asyncio.wait({reading, watching}, return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else AgentEnd(LOST, watching.result())
    finally:
        reading.cancel()
        watching.cancel()
        await asyncio.wait({reading, watching})


async def _lost(process: asyncio.subprocess.Process) -> str:
    """Wait until the supervisor was killed, or stays stopped. Return what happened."""
    stopped = 0
    while stopped < STOPPED_LOOKS:
        if (status := process.returncode) is not None and status < 0:
            return _died(status)
        stopped = stopped + 1 if is_stopped(process.pid) else 0
        await asyncio.sleep(LOOK_EVERY)
    return f"its supervisor {process.pid} was stopped (SIGSTOP)"


def _died(status: int) -> str:
    return f"its supervisor died of {signal.Signals(-status).name}"


async def _output(process: asyncio.subprocess.Process) -> AgentEnd:
    assert process.stdout is not None
    kept, count = bytearray(), 0
    while chunk := await process.stdout.read(CHUNK_BYTES):
        kept += chunk
        count += len(chunk)
        del kept[: -4 * KEPT_CHARACTERS]  # a character has at most four bytes in UTF-8
        if count > MOST_OUTPUT:
            return AgentEnd(TOO_MUCH, f"it wrote more than {MOST_OUTPUT >> 20} MiB")
    if (status := await process.wait()) < 0:
        return AgentEnd(LOST, _died(status))
    return AgentEnd(status, kept.decode(errors="replace").strip()[-KEPT_CHARACTERS:])


async def _all_ended(process: asyncio.subprocess.Process, mark: str) -> None:
    """Wait for the supervisor, which kills its processes once its pipe is closed. If it is lost or late, kill them."""
    if (process.returncode or 0) >= 0 and not is_stopped(process.pid):
        await _drained(process)
    if process.returncode is None or process.returncode < 0:
        await asyncio.to_thread(end_marked, MARK, mark)
        await _drained(process)


async def _drained(process: asyncio.subprocess.Process) -> None:
    """Read the output to its end, and wait for the supervisor, at most END_SECONDS."""
    assert process.stdout is not None
    with suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            while await process.stdout.read(CHUNK_BYTES):
                pass
            await process.wait()
