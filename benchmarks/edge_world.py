"""The agent and the environment of `edge_faults.py`. They are healthy until the campaign arms one of their faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.edge_strikes import act, claim

AGENT_KILLED, AGENT_STOPPED, SURROGATE = "agent killed", "agent stopped", "lone surrogate in a request"
ORPHANED, SUPERVISOR_KILLED = "agent stopped, its supervisor killed", "agent kills its supervisor and goes on"
ENVIRONMENT_KILLED, ENVIRONMENT_STOPPED = "environment killed", "environment stopped"
ENVIRONMENT_SURROGATE = "lone surrogate in an environment's message"


def play(row: Mapping[str, Any], base_url: str, api_key: str) -> None:
    """Ask the policy once, and once more if a fault strikes that leaves the agent alive."""
    messages = list(row["messages"])
    answer = ask(messages, base_url, api_key)
    if claim(AGENT_KILLED):
        act("kill")
    if claim(AGENT_STOPPED):
        act("stop")
    if claim(ORPHANED):
        os.kill(os.getppid(), signal.SIGKILL)
        act("stop")
    if claim(SUPERVISOR_KILLED):
        subprocess.Popen(["sleep", "600"])
        os.kill(os.getppid(), signal.SIGKILL)
        ask(messages, base_url, api_key)
    if claim(SURROGATE):
        ask([*messages, answer, cut_message()], base_url, api_key)


def cut_message() -> dict[str, str]:
    """Return a message with half of a surrogate pair, as JavaScript's `slice` makes it of an emoji."""
    return {"role": "user", "content": "cut: \ud83d"}


def ask(messages: Sequence[Mapping[str, Any]], base_url: str, api_key: str) -> dict[str, Any]:
    """Return the policy's next message."""
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["message"]


class Asks:
    """One turn about a sum, which earns the fraction of digits in the answer."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        """Return the row's prompt as the user's message."""
        from roll.agents.environments.base import Observation

        return Observation([{"role": "user", "content": row["prompt"]}])

    def step(self, message: Mapping[str, Any]) -> Any:
        """End the episode, unless a fault strikes."""
        from roll.agents.environments.base import Step

        if claim(ENVIRONMENT_KILLED):
            act("kill")
        if claim(ENVIRONMENT_STOPPED):
            act("stop")
        if claim(ENVIRONMENT_SURROGATE):
            return Step([cut_message()], 0.0, done=False)
        said = str(message["content"])
        return Step([], sum(letter.isdigit() for letter in said) / max(len(said), 1), done=True)

    def close(self) -> None:
        """Do nothing."""
