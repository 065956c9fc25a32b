"""The type of a key that names a method: text in the file, a `Method` in the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from roll.algorithms.methods.base import Method


@dataclass(frozen=True)
class Named:
    """Stands in `Annotated` beside `Method`: the methods that the key may name."""

    known: Mapping[str, Method[Any]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(str)
        return core_schema.no_info_plain_validator_function(self._method, serialization=written)

    def _method(self, name: Any) -> Method[Any]:
        if isinstance(name, Method):
            return name
        if isinstance(name, str) and name in self.known:
            return self.known[name]
        *others, last = (f"'{known}'" for known in self.known)
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(others)} or {last}"})
