"""Removes secrets from a configuration and texts: values of keys named like secrets, passwords in URLs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

HIDDEN = "***"
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""Matches the words of a key: `API_KEY`, `X-Api-Key` and `apiKey` have the words api and key."""
NAMES = re.compile(
    r"keys?|\w*(api|access|secret|private|auth)keys?|\w*tokens?|\w*secrets?|\w*passw(or)?ds?|passphrases?|pwd|pat|"
    r"credentials?|access|auth|authorization|bearer|cookies?|webhooks?"
)
"""Matches words that mark a value as secret. `monkey` and `keyboard` do not."""
COUNTS = {"max", "min", "num", "n", "new", "per", "level", "ids", "id", "special", "stop"}
"""Words that make `token` one of text: `max_tokens_per_microbatch`, `add_token_level_kl`."""
NAMED = ("name", "key", "header")
"""Keys that hold the name of the value beside them, as in `{name: Authorization, value: ...}`."""
LOGIN = "login_kwargs"
"""Block of SwanLab's settings, hidden as a whole."""
NOT_SECRET = ("judge_api_key_env", "api_key_variable")
"""Keys of the schema that match `NAMES` although their value is only the name of an environment variable."""
IN_TEXT = re.compile(
    r"(?P<url>[a-z][a-z0-9+.-]*://(?:[^/\s:@?#]*:)?)(?P<user>[^/\s@?#]+)(?=@)"
    r"|(?P<parameter>(?:[?&]|--)(?P<name>[\w.-]+)=)(?P<value>[^&\s#\"']+)"
    r"|(?P<header>\b(?:authorization|x-api-key|cookie)[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|token)\s+)?)(?P<sent>[^\s\"',}]+)"
    r"|(?P<scheme>\bbearer\s+)(?P<token>(?=\S*\d)[^\s\"',}]{8,})"
    r"|\b(?P<issued>(?:sk|glpat|xox[a-z])-(?=[\w-]*\d)[\w-]{16,}|(?:hf|gh[a-z]|github_pat)_(?=\w*\d)\w{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}\b)",
    re.IGNORECASE,
)
"""Matches secrets in a text: user info of a URL, parameters of a query or command, headers, bearer tokens, and keys
that OpenAI, GitLab, Slack, Hugging Face, GitHub and AWS issue.
"""
SHORTEST = 6
"""Smallest length of a secret that is searched for in texts. Shorter strings occur in many words."""


def is_secret(key: object) -> bool:
    """Whether a key's name marks its value as secret."""
    if not isinstance(key, str) or key in NOT_SECRET:
        return False
    words = [word.lower() for word in WORDS.findall(key)]
    found = [word for word in words if NAMES.fullmatch(word)]
    return any(not word.startswith("token") or not COUNTS.intersection(words) for word in found)


def _is_secret_in(block: Mapping[Any, Any], key: object) -> bool:
    return is_secret(key) or (key == "value" and any(is_secret(block.get(name)) for name in NAMED))


def redacted(tree: Any, hidden: bool = False) -> Any:
    """Return a copy of a tree of blocks, lists and values without secrets. Numbers, as of tokens, are kept.

    Args:
        hidden: whether a key above marks all texts of the tree as secret.
    """
    if isinstance(tree, Mapping):
        return {
            key: HIDDEN if key == LOGIN and value else redacted(value, hidden or _is_secret_in(tree, key))
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [redacted(value, hidden) for value in tree]
    if not isinstance(tree, str):
        return tree
    return HIDDEN if hidden and tree else without_secrets(tree)


def without_secrets(text: str) -> str:
    """Return a text without the secrets that its form shows: in URLs, queries, options and headers."""
    for secret in sorted(_in_text(text), key=lambda found: found.start(), reverse=True):
        begin, end = secret.span(_secret_group(secret))
        text = text[:begin] + HIDDEN + text[end:]
    return text


def _in_text(text: str) -> Iterator[re.Match[str]]:
    return (found for found in IN_TEXT.finditer(text) if found["name"] is None or is_secret(found["name"]))


def _secret_group(found: re.Match[str]) -> str:
    return next(group for group in ("user", "value", "sent", "token", "issued") if found[group] is not None)


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
        return without_secrets(text)


def _secrets(tree: Any, hidden: bool = False) -> Iterator[str]:
    if isinstance(tree, str):
        yield from [tree] if hidden else (found[_secret_group(found)] for found in _in_text(tree))
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _secrets(value, hidden or key == LOGIN or _is_secret_in(tree, key))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _secrets(value, hidden)
