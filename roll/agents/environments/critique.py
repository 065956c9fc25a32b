"""Tasks whose answers another model criticises: the policy answers, reads a critique, and answers anew."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from roll.agents.environments.base import ENVIRONMENTS, Ask, Message, Observation, Step
from roll.agents.environments.tasks import task_of
from roll.config.derived.domains import CRITIC, CRITIQUES
from roll.rewards.answers import final_text, ground_truth

PROMPT = """Here are a task and an answer to it.

Task:
{question}

Answer:
{response}

Say briefly what is wrong or missing in the answer, and how to find it. Do not write a better answer yourself."""
"""What the critic is asked."""
REVISION = """A reader says about your answer:

{critique}

Answer the task again, whole. Keep what was right."""
"""What the policy reads after its answer."""
PLACEHOLDER = re.compile(r"\{(question|response|reference|critique)\}")


@ENVIRONMENTS.register("critique")
class Critique:
    """A row's task. The partner `critic` criticises each answer but the last, and the policy answers anew.

    Its steps have no reward: `rewards.<domain>` scores the last answer.
    """

    malformed_calls = "step"

    def __init__(
        self, critiques: int = CRITIQUES, prompt: str = PROMPT, revision: str = REVISION, column: str | None = None
    ) -> None:
        """
        Args:
            critiques: number of critiques in an episode. The policy has one turn more.
            prompt: message to the critic, with the placeholders `{question}`, `{response}` and, for the row's reference
                answer, `{reference}`.
            revision: message to the policy after an answer, with the placeholder `{critique}`.
            column: column that holds the row's task; by default `messages`, or `prompt` if there is none.

        Raises:
            ValueError: `critiques` is below 1, or a text lacks a placeholder without which it has no effect.
        """
        if critiques < 1:
            raise ValueError(f"critiques is {critiques}; give at least 1")
        if "{response}" not in prompt:
            raise ValueError("prompt lacks {response}, so the critic would not see the answer")
        if "{critique}" not in revision:
            raise ValueError("revision lacks {critique}, so the policy would not see it")
        self._left, self._prompt, self._revision, self._column = critiques, prompt, revision, column
        self._question = self._reference = ""

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Return the row's task. Raises ValueError if it has none, or no reference answer that the critic is to see."""
        messages = task_of(row, self._column)
        self._question = "\n\n".join(str(one.get("content") or "") for one in messages if one["role"] != "system")
        self._reference = ground_truth(row) if "{reference}" in self._prompt else ""
        return Observation(messages)

    async def step(self, message: Message) -> Step:
        """Ask the critic about the answer, or end the episode after the last one."""
        if not self._left:
            return Step(done=True)
        self._left -= 1
        texts = {
            "question": self._question,
            "response": final_text(str(message.get("content") or "")),
            "reference": self._reference,
        }
        return Step(asks=Ask(CRITIC, [{"role": "user", "content": filled(self._prompt, texts)}]))

    async def hear(self, partner: str, text: str) -> Step:
        """Show the critique to the policy."""
        content = filled(self._revision, {"critique": text})
        counts = {"critiques": 1.0, "empty_critiques": float(not text)}
        return Step([{"role": "user", "content": content}], metrics=counts)

    def close(self) -> None:
        """Do nothing."""


def filled(template: str, texts: Mapping[str, str]) -> str:
    """Return a template with its placeholders filled in, but not those within the inserted texts."""
    return PLACEHOLDER.sub(lambda found: texts.get(found[1], found[0]), template)
