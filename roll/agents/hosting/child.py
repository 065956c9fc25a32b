"""A process that holds environments: `python -m roll.agents.hosting.child DESCRIPTOR PARENT`. process.py starts,
monitors and ends it.

    process.py                          child
      ── Assignment ──────────────────▶  imports the environment and the tools
      ◀─────────────────────── Ready ──
      ── Call (reset, step, close) ───▶
      ◀── Reply ──                       one for each call, as soon as the call ends

If `reset`, `step` and all tools are `async def`, calls run concurrently, and the child itself ends calls that exceed
the deadline. Otherwise the parent sends one call at a time. That call runs outside an event loop if no method and no
tool is `async def` and the domain has no MCP servers.

The socket is separate from stdout and stderr, so it never carries output that an environment prints.

A session in a child process: an environment together with the tools of its domain.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import socket
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from roll.agents.environments.base import TOOL_ERRORS, Message, Observation, Step
from roll.agents.environments.checked import BadReturn, observation_of, step_of
from roll.agents.hosting.loading import LoadedEnvironment, loaded
from roll.agents.hosting.messages import (
    Call,
    EnvironmentAssignment,
    EnvironmentReady,
    environment_ready_message,
    failed_message,
    returned_message,
)
from roll.agents.tools import Answered, Tools, calls_for
from roll.errors import ConfigError, EnvironmentFailed
from roll.hosted.frames import receive, receive_next
from roll.hosted.raised import raised_where
from roll.hosted.served import bound_memory, serving_parent


class Servers(Protocol):
    """Tools of external servers, for one episode."""

    schemas: list[Mapping[str, Any]]
    """Schemas of all tools in OpenAI's format, available after `open`."""

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all tools."""
        ...

    async def open(self) -> None:
        """Connect to the servers and list their tools."""
        ...

    async def answer(self, call: Mapping[str, Any]) -> Answered:
        """Call a tool and return its answer."""
        ...

    async def close(self) -> None:
        """Close all connections, and end the servers that were started."""
        ...


class Hosted:
    """Answers calls of the domain's tools, and passes all other messages and calls to the environment."""

    def __init__(self, environment: Any, tools: Tools, servers: Servers | None = None) -> None:
        self._environment, self._tools, self._servers = environment, tools, servers

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Reset the environment. Return its observation with the domain's tools added. Raises BadReturn if the
        observation is invalid.
        """
        if self._servers is not None:
            await self._servers.open()
        observation = observation_of(await _finished(self._environment.reset(row, seed)))
        schemas = [*observation.tools, *self._tools.schemas, *(self._servers.schemas if self._servers else ())]
        named = Counter(tool["function"]["name"] for tool in schemas)
        if taken := [name for name, count in named.items() if count > 1]:
            raise BadReturn(
                f"two tools are named '{min(taken)}'; names must be unique among the environment's tools, `tools` and "
                f"`mcp`"
            )
        return replace(observation, tools=schemas)

    async def step(self, message: Message) -> Step:
        """Return a step with the answers of the domain's tools, followed by the environment's messages.

        Messages that call only tools of the domain do not reach the environment. Raises BadReturn if the environment's
        step is invalid.
        """
        ours, others = calls_for(self._tools.names | (self._servers.names if self._servers else frozenset()), message)
        if not ours:
            return step_of(await _finished(self._environment.step(message)))
        answers = await self._answers(ours)
        messages, failed = [answer.message for answer in answers], float(sum(answer.failed for answer in answers))
        if not others:
            return Step(messages, metrics={TOOL_ERRORS: failed})
        step = step_of(await _finished(self._environment.step({**message, "tool_calls": others})))
        metrics = {**step.metrics, TOOL_ERRORS: step.metrics.get(TOOL_ERRORS, 0.0) + failed}
        return replace(step, messages=[*messages, *step.messages], metrics=metrics)

    async def close(self) -> None:
        """Close the environment and the servers."""
        try:
            await _finished(self._environment.close())
        finally:
            if self._servers is not None:
                await self._servers.close()

    async def _answers(self, calls: Sequence[Mapping[str, Any]]) -> list[Answered]:
        """Make the calls: those of servers concurrently, those of functions one after another. Return the answers in
        order.
        """
        servers = self._servers
        if servers is None:
            return [await self._tools.answer_awaited(call) for call in calls]
        asking = {
            number: servers.answer(call)
            for number, call in enumerate(calls)
            if call["function"]["name"] in servers.names
        }
        served = dict(zip(asking, await asyncio.gather(*asking.values()), strict=True))
        return [
            served[number] if number in served else await self._tools.answer_awaited(call)
            for number, call in enumerate(calls)
        ]


async def _finished(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


Returned = Observation | Step | None


class Sessions:
    """The environments of this process, by session number."""

    def __init__(self, assignment: EnvironmentAssignment, found: LoadedEnvironment) -> None:
        self._assignment, self._loaded = assignment, found
        self._hosted: dict[int, Hosted] = {}

    async def made(self, call: Call) -> Returned:
        """Make a call, and return its value."""
        if call.method == "reset":
            # Each environment gets its own copy, so that changes to its arguments do not affect the next one.
            environment_args = pickle.loads(pickle.dumps(self._assignment.environment_args))
            hosted = self._hosted[call.session] = Hosted(
                self._loaded.make(**environment_args), self._loaded.tools, self._servers()
            )
            return await hosted.reset(*call.given)
        if call.method == "step":
            return await self._hosted[call.session].step(*call.given)
        if (closed := self._hosted.pop(call.session, None)) is not None:
            await closed.close()
        return None

    def _servers(self) -> Servers | None:
        if not self._assignment.mcp:
            return None
        from roll.agents.mcp_tools import McpTools  # the import takes a second and is needed only for MCP servers

        return McpTools(self._assignment.mcp)


def main(descriptor: int, parent: int) -> None:
    """Serve calls until the parent closes the socket."""
    with serving_parent(descriptor, parent) as (connection, incoming):
        assignment: EnvironmentAssignment = receive(incoming)
        bound_memory(assignment.memory_bytes)
        try:
            found = loaded(assignment.domain, assignment.environment, assignment.environment_args, assignment.tools)
        except ConfigError as error:
            connection.sendall(environment_ready_message(EnvironmentReady(error.faults)))
            return
        connection.sendall(environment_ready_message(EnvironmentReady((), found.side_by_side, found.malformed_calls)))
        sessions = Sessions(assignment, found)
        if found.side_by_side:
            asyncio.run(_side_by_side(connection, assignment, sessions))
        else:
            _in_turn(connection, incoming, sessions, found.is_plain and not assignment.mcp)


def _in_turn(connection: socket.socket, incoming: Any, sessions: Sessions, is_plain: bool) -> None:
    own = os.getpid()
    with asyncio.Runner() as runner:
        finish = _finished_at_once if is_plain else runner.run
        while (call := receive(incoming)) is not None:
            reply = _reply(call, finish, sessions)
            if os.getpid() != own:  # this is a process that the environment forked
                os._exit(0)
            connection.sendall(reply)


def _reply(call: Call, finish: Callable[[Coroutine[Any, Any, Returned]], Returned], sessions: Sessions) -> bytes:
    try:
        return returned_message(call, finish(sessions.made(call)))
    except BaseException as error:  # sys.exit() in one environment must not end the others
        return failed_message(call, EnvironmentFailed(_error_note(call, error)))


def _finished_at_once(coroutine: Coroutine[Any, Any, Returned]) -> Returned:
    """Run a call whose methods are all plain. No event loop runs meanwhile, so the environment may run its own."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    coroutine.close()
    raise RuntimeError("a plain method returned an awaitable; write the method as async def")


async def _side_by_side(connection: socket.socket, assignment: EnvironmentAssignment, sessions: Sessions) -> None:
    own, running = os.getpid(), dict[int, asyncio.Task[None]]()
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection)

    async def run(call: Call, before: asyncio.Task[None] | None) -> None:
        if before is not None:  # the session is being closed during a call
            before.cancel()
            await asyncio.wait([before])
        reply = await _awaited(call, assignment.step_timeout, sessions)
        if os.getpid() != own:
            os._exit(0)
        writer.write(reply)

    while (call := await receive_next(reader)) is not None:
        task = asyncio.create_task(run(call, running.get(call.session)))
        running[call.session] = task
        task.add_done_callback(
            lambda done, session=call.session: running.pop(session) if running.get(session) is done else None
        )
    os._exit(0)  # The parent is gone. A normal exit would wait for tasks that ignore cancellation.


async def _awaited(call: Call, seconds: float, sessions: Sessions) -> bytes:
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            reply = returned_message(call, await sessions.made(call))
    except BaseException as error:
        reply = failed_message(call, EnvironmentFailed(_error_note(call, error)))
    if deadline.expired():  # a call that ends after the deadline has timed out, whatever its result
        return failed_message(call, late(call.method, seconds))
    return reply


def late(method: str, seconds: float) -> EnvironmentFailed:
    """Return the error of a call that exceeded its deadline."""
    return EnvironmentFailed(f"{method} did not end within step_timeout, {seconds:g} s", "timed_out")


def _error_note(call: Call, error: BaseException) -> str:
    return f"{call.method} failed: {error if isinstance(error, BadReturn) else raised_where(error, __file__)}"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
