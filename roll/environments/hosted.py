"""One session within its process: an environment, and the tools that its domain adds to it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roll.environments.base import TOOL_ERRORS, Message, Observation, Step
from roll.environments.checked import BadReturn, observation_of, step_of
from roll.environments.tools import Tools, calls_for


class Hosted:
    """Answers calls of the domain's tools itself, and gives the environment all else."""

    def __init__(self, environment: Any, tools: Tools) -> None:
        self._environment, self._tools = environment, tools

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """The first observation, with the domain's tools. Raises BadReturn for what is none."""
        observation = observation_of(await _finished(self._environment.reset(row, seed)))
        taken = {tool["function"]["name"] for tool in observation.tools} & self._tools.names
        if taken:
            raise BadReturn(f"the environment has a tool '{min(taken)}' itself; remove it from the domain's tools")
        return replace(observation, tools=[*observation.tools, *self._tools.schemas])

    async def step(self, message: Message) -> Step:
        """The environment's answer; of calls of the domain's tools, theirs, before it. Raises BadReturn for what is no `Step`."""
        ours, others = calls_for(self._tools.names, message)
        if not ours:
            return step_of(await _finished(self._environment.step(message)))
        answers = [await self._tools.answer_awaited(call) for call in ours]
        messages, failed = [answer.message for answer in answers], float(sum(answer.failed for answer in answers))
        if not others:
            return Step(messages, metrics={TOOL_ERRORS: failed})
        step = step_of(await _finished(self._environment.step({**message, "tool_calls": others})))
        metrics = {**step.metrics, TOOL_ERRORS: step.metrics.get(TOOL_ERRORS, 0.0) + failed}
        return replace(step, messages=[*messages, *step.messages], metrics=metrics)

    async def close(self) -> None:
        """Ends the environment."""
        await _finished(self._environment.close())


async def _finished(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
