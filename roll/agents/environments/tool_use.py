"""Tasks to solve with the tools of the domain. The episode ends when the policy answers without a tool call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.agents.environments.base import ENVIRONMENTS, TOOL_ERRORS, Message, Observation, Step
from roll.agents.environments.tasks import task_of

UNKNOWN = "Error: there is no tool '{}'."


@ENVIRONMENTS.register("tool_use")
class ToolUse:
    """A row's task. Calls of the domain's tools (`tools`, `mcp`) are answered before they reach this class.

    Its steps have no reward: `rewards.<domain>` scores the episode.
    """

    def __init__(self, column: str | None = None) -> None:
        """`column` holds the row's task; by default it is `messages`, or `prompt` if the row has no `messages`."""
        self._column = column

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Return the row's task. Raises ValueError if the row has none."""
        return Observation(task_of(row, self._column))

    async def step(self, message: Message) -> Step:
        """End the episode. If the message calls tools that do not exist, tell the policy so and continue instead."""
        calls = message.get("tool_calls") or ()
        answers = [
            {"role": "tool", "name": call["function"]["name"], "content": UNKNOWN.format(call["function"]["name"])}
            | ({"tool_call_id": call["id"]} if call.get("id") else {})
            for call in calls
        ]
        return Step(answers, done=not calls, metrics={TOOL_ERRORS: float(len(answers))})

    def close(self) -> None:
        """Do nothing."""
