"""Messages for probing a chat template. Their words occur in no template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roll.data.renderers.templates import Messages, Tools

SYSTEM: Mapping[str, Any] = {"role": "system", "content": "Be brief."}
TOOL = "wallaby"
CALL: Mapping[str, Any] = {"name": TOOL, "arguments": {"leaf": "eucalyptus", "number": 3}}
TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "Feed it.",
            "parameters": {
                "type": "object",
                "properties": {"leaf": {"type": "string"}, "number": {"type": "integer"}},
                "required": ["leaf"],
            },
        },
    }
]


def calling(calls: Sequence[Mapping[str, Any]], answers: Messages = ()) -> dict[str, Any]:
    """Return an assistant's message with the given tool calls, with the ids and names in `answers`, if they have
    any.
    """
    named = [
        {
            "id": (answers[number].get("tool_call_id") if number < len(answers) else None) or f"call{number:05d}",
            "type": "function",
            "function": {
                **call,
                "name": (answers[number].get("name") if number < len(answers) else None) or call["name"],
            },
        }
        for number, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": named}
