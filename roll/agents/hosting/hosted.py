"""A session in a child process: an environment together with the tools of its domain."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from roll.agents.environments.base import TOOL_ERRORS, Message, Observation, Step
from roll.agents.environments.checked import BadReturn, observation_of, step_of
from roll.agents.tools import Answered, Tools, calls_for


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
        """Reset the environment. Return its observation with the domain's tools added. Raises BadReturn if the observation is invalid."""
        if self._servers is not None:
            await self._servers.open()
        observation = observation_of(await _finished(self._environment.reset(row, seed)))
        schemas = [*observation.tools, *self._tools.schemas, *(self._servers.schemas if self._servers else ())]
        named = Counter(tool["function"]["name"] for tool in schemas)
        if taken := [name for name, count in named.items() if count > 1]:
            raise BadReturn(f"two tools are named '{min(taken)}'; names must be unique among the environment's tools, `tools` and `mcp`")
        return replace(observation, tools=schemas)

    async def step(self, message: Message) -> Step:
        """Return a step with the answers of the domain's tools, followed by the environment's messages.

        Messages that call only tools of the domain do not reach the environment. Raises BadReturn if the environment's step is invalid.
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
        """Make the calls: those of servers concurrently, those of functions one after another. Return the answers in order."""
        servers = self._servers
        if servers is None:
            return [await self._tools.answer_awaited(call) for call in calls]
        asking = {number: servers.answer(call) for number, call in enumerate(calls) if call["function"]["name"] in servers.names}
        served = dict(zip(asking, await asyncio.gather(*asking.values()), strict=True))
        return [served[number] if number in served else await self._tools.answer_awaited(call) for number, call in enumerate(calls)]


async def _finished(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
