"""Parses the response of a chat server, and decides when to retry. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from random import Random
from typing import Any

from roll.rewards.judges.judge import Reply

TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses after which a retry of the same request may succeed."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0
"""Seconds before the first retry, and the largest number of seconds before any retry."""
SHOWN_CHARACTERS = 200
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Exceptions that the JSON of a server can cause: wrong types, missing keys, `Infinity` as a number of tokens, deep nesting."""


@dataclass(frozen=True)
class Refusal:
    """A failed request."""

    why: str
    again: bool
    """Whether to retry the request."""
    after: float | None = None
    """Seconds to wait before a retry, as requested by the server."""


def wait_seconds(attempt: int, after: float | None, random: Random) -> float:
    """Return the seconds to wait after `attempt` failed attempts (1 or more).

    The wait doubles each time, up to `LONGEST_WAIT`. A random factor of 0.5 to 1 spreads out requests that failed together.
    If the server requests a longer wait (`after`), that wait is used, also up to `LONGEST_WAIT`.
    """
    longest = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(attempt - 1, 30))
    return min(LONGEST_WAIT, max(longest * random.uniform(0.5, 1.0), after or 0.0))


def longest_wait(retries: int) -> float:
    """Return the largest total wait between `retries + 1` attempts, in seconds."""
    return retries * LONGEST_WAIT


def read_reply(status: int, headers: Mapping[str, str], body: bytes, now: datetime | None = None) -> Reply | Refusal:
    """Parse an HTTP response of the chat-completions protocol. `now` is the current time; a date in `Retry-After` is relative to it."""
    if status in TRANSIENT:
        return Refusal(f"status {status}: {_message(body)}", again=True, after=_retry_after(headers.get("retry-after"), now))
    if status != 200:
        return Refusal(f"status {status}: {_message(body)}", again=False)
    try:
        said: Any = json.loads(body)
        answers = tuple(_content(choice["message"]) for choice in said["choices"])
        usage = said.get("usage") or {}
        counts = [int(usage.get(key) or 0) for key in ("prompt_tokens", "completion_tokens")]
    except UNREADABLE:
        return Refusal(f"the response is not a chat completion: {_shown(body)}", again=True)
    if not answers:
        return Refusal("the response has no choices", again=True)
    return Reply(answers, counts[0], counts[1])


def _content(message: Mapping[str, Any]) -> str:
    """Return the text of a message. Servers send null for an empty text, and some send a list of parts."""
    content = message["content"]
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    if content is not None and not isinstance(content, str):
        raise TypeError("content is neither a string nor a list")
    return content or ""


def _retry_after(value: str | None, now: datetime | None) -> float | None:
    """Return the seconds that a `Retry-After` header (a number or a date) specifies, or None if it is neither."""
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
    """Return the error message if the body has OpenAI's error format, else the start of the body."""
    try:
        error = json.loads(body)["error"]
        return _shown((error["message"] if isinstance(error, dict) else str(error)).encode())
    except UNREADABLE:
        return _shown(body)


def _shown(body: bytes) -> str:
    text = " ".join(body[: 4 * SHOWN_CHARACTERS].decode(errors="replace").split())
    return repr(text[:SHOWN_CHARACTERS])
