"""The token side of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from roll.types import Ints


@dataclass(frozen=True)
class Parsed:
    message: Mapping[str, Any]
    malformed: Sequence[str] = ()


class ChatRenderer(Protocol):
    stop_token_ids: frozenset[int]

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Ints: ...
    def bridge(
        self, before: Ints, sampled: Ints, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> Ints | None: ...
    def parse(self, sampled: Ints, tools: Sequence[Mapping[str, Any]]) -> Parsed: ...
    def text(self, token_ids: Ints) -> str: ...
