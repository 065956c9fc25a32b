"""Text from outside the run, made such that UTF-8 can express it.

JSON and Python's strings may hold half of a surrogate pair, for example when JavaScript cuts an emoji in two. A
tokenizer, a hash and a terminal refuse it.
"""

from __future__ import annotations

from typing import Any


def clean_text(text: str) -> str:
    """Return the text with U+FFFD in place of each half of a surrogate pair. The halves of a whole pair are joined."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def cleaned(value: Any) -> Any:
    """Return a copy of a decoded JSON value in which all texts are clean, those of its keys too."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_text(key): cleaned(one) for key, one in value.items()}
    return [cleaned(one) for one in value] if isinstance(value, list) else value
