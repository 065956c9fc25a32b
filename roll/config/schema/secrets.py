"""Removes secrets from a configuration and texts: values of keys named like secrets, passwords in URLs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

HIDDEN = "***"
NAMES = re.compile(r"token(?!i[sz]|s|_level)|key|secret|password|passwd|credential", re.IGNORECASE)
"""Matches names of keys with secret values. `TOKENIZERS_PARALLELISM` and numbers of tokens are not secret."""
LOGIN = "login_kwargs"
"""Block of SwanLab's settings, hidden as a whole."""
NOT_SECRET = ("judge_api_key_env",)
"""Keys of the schema that match `NAMES` although their value is only the name of an environment variable."""
PASSWORD = re.compile(r"(?P<before>[a-z][a-z0-9+.-]*://[^/\s:@]*:)(?P<password>[^/\s@]+)@", re.IGNORECASE)
"""Matches the password in a URL, between the user and the host."""
SHORTEST = 6
"""Smallest length of a secret that is searched for in texts. Shorter strings occur in many words."""


def is_secret(key: object) -> bool:
    """Whether a key's name marks a string value as secret."""
    return isinstance(key, str) and key not in NOT_SECRET and NAMES.search(key) is not None


def redacted(tree: Any) -> Any:
    """Return a copy of a tree of blocks, lists and values without secrets. Numbers, as of tokens, are kept."""
    if isinstance(tree, Mapping):
        return {key: HIDDEN if value and _hides(key, value) else redacted(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [redacted(value) for value in tree]
    return PASSWORD.sub(rf"\g<before>{HIDDEN}@", tree) if isinstance(tree, str) else tree


def _hides(key: object, value: Any) -> bool:
    return is_secret(key) and isinstance(value, str) or key == LOGIN


@dataclass(frozen=True)
class Secrets:
    """The secrets of a run, to be removed from the output of other programs."""

    values: frozenset[str] = frozenset()

    @classmethod
    def of(cls, *trees: Any) -> Secrets:
        """Collect the secrets in trees of blocks, lists and values."""
        return cls(frozenset(secret for tree in trees for secret in _secrets(tree) if len(secret) >= SHORTEST))

    def hide(self, text: str) -> str:
        """Return the text without the secrets. The longest is removed first, because one secret may contain another."""
        for secret in sorted(self.values, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return PASSWORD.sub(rf"\g<before>{HIDDEN}@", text)


def _secrets(tree: Any) -> Iterator[str]:
    yield from (url["password"] for url in PASSWORD.finditer(tree if isinstance(tree, str) else ""))
    for key, value in (
        tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    ):
        if _hides(key, value):
            yield from [value] if isinstance(value, str) else (text for text in value.values() if isinstance(text, str))
        else:
            yield from _secrets(value)
