"""Reads a chat server's response, and decides when to retry. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from random import Random
from typing import Any

from roll.rewards.judge import Reply

TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses after which the same request may succeed."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0
"""Seconds before the second attempt, and the most before any."""
SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class Refusal:
    """A request without an answer."""

    why: str
    again: bool
    """Whether to retry."""
    after: float | None = None
    """Seconds that the server asks to wait."""


def wait_seconds(attempt: int, after: float | None, random: Random) -> float:
    """Return the seconds before the next attempt, after `attempt` failed ones (1 or more).

    The wait doubles each time, up to `LONGEST_WAIT`. A random factor of 0.5 to 1 spreads requests that failed together.
    It is at least what the server asks for, within the same bound.
    """
    longest = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(attempt - 1, 30))
    return min(LONGEST_WAIT, max(longest * random.uniform(0.5, 1.0), after or 0.0))


def longest_wait(retries: int) -> float:
    """Return the largest sum of waits between `retries + 1` attempts, in seconds."""
    return retries * LONGEST_WAIT


def read_reply(status: int, headers: Mapping[str, str], body: bytes, now: datetime | None = None) -> Reply | Refusal:
    """Parse an HTTP response of the chat-completions protocol. `now` is the present time, for a date in `Retry-After`."""
    if status in TRANSIENT:
        return Refusal(f"status {status}: {_message(body)}", again=True, after=_retry_after(headers.get("retry-after"), now))
    if status != 200:
        return Refusal(f"status {status}: {_message(body)}", again=False)
    try:
        said: Any = json.loads(body)
        answers = tuple(_content(choice["message"]) for choice in said["choices"])
        usage = said.get("usage") or {}
        counts = [int(usage.get(key) or 0) for key in ("prompt_tokens", "completion_tokens")]
    except (ValueError, KeyError, TypeError, AttributeError):
        return Refusal(f"the response is not that of a chat completion: {_shown(body)}", again=True)
    if not answers:
        return Refusal("the response has no choices", again=True)
    return Reply(answers, counts[0], counts[1])


def _content(message: Mapping[str, Any]) -> str:
    """Return the text of a message. Servers send None for an empty one, and some send parts."""
    content = message["content"]
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    if content is not None and not isinstance(content, str):
        raise TypeError("content is neither a text nor a list")
    return content or ""


def _retry_after(value: str | None, now: datetime | None) -> float | None:
    """Return seconds from a number or a date, None if it is neither."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (date - (now or datetime.now(UTC))).total_seconds())


def _message(body: bytes) -> str:
    """Return the error's own message, if the body has one in OpenAI's form."""
    try:
        error = json.loads(body)["error"]
        return _shown((error["message"] if isinstance(error, dict) else str(error)).encode())
    except (ValueError, KeyError, TypeError, AttributeError):
        return _shown(body)


def _shown(body: bytes) -> str:
    text = " ".join(body[: 4 * SHOWN_CHARACTERS].decode(errors="replace").split())
    return repr(text[:SHOWN_CHARACTERS])
