"""A task to solve with the domain's tools. The policy may call them until it answers without a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.environments.base import ENVIRONMENTS, TOOL_ERRORS, Message, Observation, Step
from roll.environments.tasks import task_of

UNKNOWN = "Error: there is no tool '{}'."


@ENVIRONMENTS.register("tool_use")
class ToolUse:
    """A row's task, and the tools of the domain (`tools`), whose calls are answered before this is asked.

    It gives no reward: `rewards.<domain>` judges what the policy said.
    """

    def __init__(self, column: str | None = None) -> None:
        """
        Args:
            column: of the row, that holds the task; `messages`, else `prompt`, if not given.
        """
        self._column = column

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Return the row's task. Raises ValueError if it has none."""
        return Observation(task_of(row, self._column))

    async def step(self, message: Message) -> Step:
        """End the episode, unless the message calls tools that the domain does not have."""
        calls = message.get("tool_calls") or ()
        answers = [
            {"role": "tool", "name": call["function"]["name"], "content": UNKNOWN.format(call["function"]["name"])}
            | ({"tool_call_id": call["id"]} if call.get("id") else {})
            for call in calls
        ]
        return Step(answers, done=not calls, metrics={TOOL_ERRORS: float(len(answers))})

    def close(self) -> None:
        """Nothing is held."""
