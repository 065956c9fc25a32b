"""Removes secrets from a configuration and from texts: values of keys with telling names, and passwords in URLs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

HIDDEN = "***"
NAMES = re.compile(r"token(?!i[sz]|s|_level)|key|secret|password|passwd|credential", re.IGNORECASE)
"""Keys of secrets have one of these in their name. `TOKENIZERS_PARALLELISM` and numbers of tokens are none."""
LOGIN = "login_kwargs"
"""A block of SwanLab's, secret as a whole."""
NOT_SECRET = ("judge_api_key_env",)
"""Keys of the schema whose value is the name of a variable."""
PASSWORD = re.compile(r"(?P<before>[a-z][a-z0-9+.-]*://[^/\s:@]*:)(?P<password>[^/\s@]+)@", re.IGNORECASE)
"""Matches the password in a URL, between the user and the host."""
SHORTEST = 6
"""Characters of a secret that is looked for in texts. A shorter one stands in many words."""


def is_secret(key: object) -> bool:
    """Whether the key of a text says that it is secret."""
    return isinstance(key, str) and key not in NOT_SECRET and NAMES.search(key) is not None


def redacted(tree: Any) -> Any:
    """A copy of blocks, lists and values without what is secret. Numbers stay: a number of tokens is none."""
    if isinstance(tree, Mapping):
        return {key: HIDDEN if value and _hides(key, value) else redacted(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [redacted(value) for value in tree]
    return PASSWORD.sub(rf"\g<before>{HIDDEN}@", tree) if isinstance(tree, str) else tree


def _hides(key: object, value: Any) -> bool:
    return is_secret(key) and isinstance(value, str) or key == LOGIN


@dataclass(frozen=True)
class Secrets:
    """Those of a run, to be taken out of texts that somebody else wrote."""

    values: frozenset[str] = frozenset()

    @classmethod
    def of(cls, *trees: Any) -> Secrets:
        """All that stand in blocks, lists and values."""
        return cls(frozenset(secret for tree in trees for secret in _secrets(tree) if len(secret) >= SHORTEST))

    def hide(self, text: str) -> str:
        """The text without them, the longest first: one may hold another."""
        for secret in sorted(self.values, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return PASSWORD.sub(rf"\g<before>{HIDDEN}@", text)


def _secrets(tree: Any) -> Iterator[str]:
    yield from (url["password"] for url in PASSWORD.finditer(tree if isinstance(tree, str) else ""))
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else ():
        if _hides(key, value):
            yield from [value] if isinstance(value, str) else (text for text in value.values() if isinstance(text, str))
        else:
            yield from _secrets(value)
