"""Environments that a server of OpenEnv (https://github.com/meta-pytorch/OpenEnv) holds.

Needs no package of OpenEnv: this module speaks the protocol of its WebSocket, `/ws`, where a connection is a session.
A request is `{"type": ..., "data": {...}}` with the type reset, step or close. An answer has the type observation, with
`data: {"observation": {...}, "reward": ..., "done": ...}`, or error, with `data: {"code": ..., "message": ...}`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from roll.agents.environments.base import ENVIRONMENTS, TOOL_ERRORS, Message, Observation, Step
from roll.agents.environments.server_session import Answer, ServerSession, UnreadableAction
from roll.agents.environments.shown import as_state, as_text, first_messages, picked
from roll.agents.environments.written import UNREADABLE_ACTION, WHOLE, WrittenAction
from roll.agents.tool_failures import note_failed
from roll.agents.tools import Answered, CallError, answered, failed_call
from roll.errors import EnvironmentFailed

SCHEMES = ("http", "https", "ws", "wss")
OF_KEYS = ("missing", "extra_forbidden")
"""Kinds of pydantic's errors that a text in the field `action_field` cannot cause: the key is wrong."""
BROKEN_TOOLS = "transport_error"
"""Kind of a tool's error that is the server's. All others are for the policy."""


@dataclass(kw_only=True, eq=False)
class OpenEnvKeys:
    """Keys of `environment_args` of `OpenEnv`.

    Raises:
        ValueError: a field has an invalid value.
    """

    base_url: str
    """Address of the server, as `http://127.0.0.1:8000`."""
    action_field: str | None = None
    """Field of the server's action that holds the policy's text. Without it, the policy writes the action as JSON."""
    observation_field: str | None = None
    """Field of the observation that the policy sees; dots reach into one, as `metadata.task`. Without it, the policy
    sees all fields but `metadata`, as JSON.
    """
    server_tools: bool = False
    """Whether the policy acts by calling the server's tools. A message without a call ends the episode."""
    action_pattern: str = WHOLE
    """Regular expression that finds the action in a message; see `WrittenAction`."""
    reset_columns: Sequence[str] = ()
    """Columns of the row that the server's `reset` receives, beside the seed."""
    format_penalty: float = 0.0
    """Reward of a message without a readable action."""
    env_instruction: str = ""
    """Text in front of the first observation; empty for none."""
    agent_system_template: str = ""
    """System message; empty for none."""
    api_key_env: str | None = None
    """Environment variable with the key that is sent as `Authorization: Bearer`."""

    def __post_init__(self) -> None:
        self._written = WrittenAction(self.action_pattern)
        parts = urlsplit(self.base_url)
        if parts.scheme not in SCHEMES or not parts.hostname:
            raise ValueError(f"base_url is '{self.base_url}'; write it as http://127.0.0.1:8000")
        if self.server_tools and self.action_field is not None:
            raise ValueError(f"action_field is '{self.action_field}', but with server_tools the actions are calls")
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise ValueError(f"the environment variable {self.api_key_env}, named by api_key_env, is not set")


@ENVIRONMENTS.register("openenv")
class OpenEnv(OpenEnvKeys):
    """One session of a server. It begins with `reset` and ends with `close`, or when the server is lost."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Open a session, and reset it with the seed.

        Raises:
            ValueError: the row lacks a column of `reset_columns`.
            EnvironmentFailed: the server cannot be reached, refuses the session, or answers with an error.
        """
        given = picked(row, self.reset_columns)
        key = os.environ[self.api_key_env] if self.api_key_env else None
        self._session = ServerSession(self.base_url, key)
        await self._session.open()
        answer = await self._session.ask("reset", {"seed": seed, **given})
        if answer.done:
            raise EnvironmentFailed("the server's episode is over after reset")
        tools = await self._tools() if self.server_tools else ()
        self._text = self._seen(answer)
        return Observation(
            first_messages(self.agent_system_template, self.env_instruction, self._text), tools, as_state(self._text)
        )

    async def step(self, message: Message) -> Step:
        """Take the action in the message. Raises EnvironmentFailed if the server is lost, or answers with an error."""
        if self.server_tools:
            return await self._called(message)
        try:
            answer = await self._session.ask("step", self._action(str(message.get("content") or "")))
        except UnreadableAction as error:
            if self.action_field is not None and any(one.get("type") in OF_KEYS for one in error.errors):
                raise EnvironmentFailed(f"the server's action does not consist of action_field: {error}") from error
            text = f"{UNREADABLE_ACTION} {error}\n{self._text}"
            return Step(
                [{"role": "user", "content": text}],
                self.format_penalty,
                False,
                {"invalid_actions": 1.0},
                as_state(self._text),
            )
        if answer.done:  # the policy does not see the last observation, which may lack `observation_field`
            return Step((), answer.reward or 0.0, True, counted(answer))
        self._text = self._seen(answer)
        messages = [{"role": "user", "content": self._text}]
        return Step(messages, answer.reward or 0.0, False, counted(answer), as_state(self._text))

    async def close(self) -> None:
        """End the session, if there is one."""
        if (session := getattr(self, "_session", None)) is not None:
            await session.close()

    def _action(self, text: str) -> dict[str, Any]:
        """Return the server's action for a message. Raises UnreadableAction if it has none."""
        written = self._written(text)
        if written is None:
            raise UnreadableAction("")
        if self.action_field is not None:
            return {self.action_field: written}
        try:
            action = json.loads(written)
        except ValueError as error:
            raise UnreadableAction(f"It is not JSON: {error}.") from error
        if not isinstance(action, dict):
            raise UnreadableAction("It is not a JSON object.")
        return action

    def _seen(self, answer: Answer) -> str:
        """Return what the policy sees of an observation. Raises EnvironmentFailed if it lacks `observation_field`."""
        seen = answer.observation
        if self.observation_field is None:
            return as_text({name: value for name, value in seen.items() if name != "metadata"})
        shown: Any = seen
        for name in self.observation_field.split("."):
            if not isinstance(shown, Mapping) or name not in shown:
                raise EnvironmentFailed(
                    f"the observation has no '{self.observation_field}': {json.dumps(seen, ensure_ascii=False):.300}"
                )
            shown = shown[name]
        return as_text(shown)

    async def _tools(self) -> list[dict[str, Any]]:
        """Return the schemas of the server's tools. Raises EnvironmentFailed if it has none, or cannot list them."""
        listed = (await self._session.ask("step", {"type": "list_tools"})).observation
        if not isinstance(tools := listed.get("tools"), list) or not tools:
            raise EnvironmentFailed(
                f"the server lists no tools; its answer is {json.dumps(listed, ensure_ascii=False):.300}"
            )
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
                },
            }
            for tool in tools
        ]

    async def _called(self, message: Message) -> Step:
        """Make the calls of a message one after another, until the episode is over."""
        answers, reward, calls = list[Answered](), 0.0, message.get("tool_calls") or ()
        done, unrewarded = not calls, 0
        for call in calls:
            said, answer = await self._call(call)
            answers.append(said)
            if answer is not None:
                reward, done, unrewarded = (
                    reward + (answer.reward or 0.0),
                    answer.done,
                    unrewarded + (answer.reward is None),
                )
            if done:
                break
        metrics = {TOOL_ERRORS: float(sum(one.failed for one in answers)), "unrewarded_steps": float(unrewarded)}
        return Step([one.message for one in answers], reward, done, metrics)

    async def _call(self, call: Mapping[str, Any]) -> tuple[Answered, Answer | None]:
        """Make one call. Return the message to the policy, and the server's answer; None if it could not be asked."""
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except ValueError as error:
            return failed_call(call, CallError(f"the arguments are not JSON: {error}")), None
        action = {"type": "call_tool", "tool_name": call["function"]["name"], "arguments": arguments}
        try:
            answer = await self._session.ask("step", action)
        except UnreadableAction as error:
            return failed_call(call, CallError(str(error))), None
        failed = answer.observation.get("error")
        if isinstance(failed, Mapping):
            if failed.get("error_type") == BROKEN_TOOLS:
                raise EnvironmentFailed(f"the server cannot reach its tools: {failed.get('message')}")
            name, said = str(call["function"]["name"]), str(failed.get("message"))
            note_failed(name, "the server answered with an error", f"the server answered with an error: {said}")
            return failed_call(call, CallError(said)), answer
        return answered(call, result_text(answer.observation.get("result"))), answer


def counted(answer: Answer) -> dict[str, float]:
    """Return the metric of a step: whether it had no reward, which counts as 0."""
    return {"unrewarded_steps": float(answer.reward is None)}


def result_text(result: Any) -> str:
    """Return the text of a tool's result: its parts of text, or without them the value as JSON."""
    parts = result.get("content") if isinstance(result, Mapping) else None
    texts = (
        [part["text"] for part in parts if isinstance(part, Mapping) and "text" in part]
        if isinstance(parts, list)
        else []
    )
    return "\n".join(map(str, texts)) if texts else as_text(result)
