"""What environments of other packages get from a row, and what the policy sees of them. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from roll.agents.environments.base import Message
from roll.agents.environments.checked import MOST_STATE


def picked(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """Return the columns of a row. Raises ValueError if it lacks one."""
    if missing := [column for column in columns if column not in row]:
        raise ValueError(f"the row has no '{missing[0]}'; it has the columns {', '.join(map(str, row))}")
    return {column: row[column] for column in columns}


def first_messages(system: str, instruction: str, text: str) -> list[Message]:
    """Return the messages that begin an episode. The system message and the instruction may be empty."""
    begin: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*begin, {"role": "user", "content": "\n".join(filter(None, (instruction, text)))}]


def as_state(text: str) -> str | None:
    """Return the shown text as the environment's state; None if it is too long, and the messages identify the state."""
    return text if len(text) <= MOST_STATE else None


def as_text(observation: Any) -> str:
    """Return a text as it is, and anything else as JSON. Raises TypeError if JSON cannot express it."""
    return observation if isinstance(observation, str) else json.dumps(observation, default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Return an array or a number of NumPy as lists and numbers of Python."""
    if callable(listed := getattr(value, "tolist", None)):
        return listed()
    raise TypeError(f"an observation has a {type(value).__name__}, which JSON cannot express; name a function instead")
