"""The type of a key that names a method: a string in the file, a `Method` in the checked configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from roll.algorithms.methods.base import Method, is_path
from roll.algorithms.methods.kinds import MethodKey

NO_METHOD = "no_method"
"""Type of pydantic's error for an unknown name."""


@dataclass(frozen=True)
class Named:
    """Annotation of a `Method` in `Annotated`: the methods that the key may name.

    The validation context maps keys to the user's own methods and their traits. A user's method that is not in it gets
    default traits.
    """

    kind: MethodKey

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(str)
        return core_schema.with_info_plain_validator_function(self._method, serialization=written)

    def _method(self, name: Any, info: core_schema.ValidationInfo) -> Method[Any]:
        if isinstance(name, Method):
            return name
        if isinstance(name, str) and name in self.kind.known:
            return self.kind.known[name]
        if is_path(name):
            return (info.context or {}).get(self.kind.key) or Method(name, self.kind.traits)
        *others, last = (f"'{known}'" for known in self.kind.known)
        raise PydanticCustomError(NO_METHOD, "no method has this name", {"expected": f"{', '.join(others)} or {last}"})
