"""Building blocks of the schema: a strict, frozen base class, and types for numbers, names, paths and methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from roll.algorithms.methods import Method, MethodKey, is_path
from roll.errors import ConfigError, Fault

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

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        own = {"type": "string", "pattern": r"^\w+(\.\w+)*:\w+$"}
        return {"anyOf": [{"enum": list(self.kind.known)}, own]}

    def _method(self, name: Any, info: core_schema.ValidationInfo) -> Method[Any]:
        if isinstance(name, Method):
            return name
        if isinstance(name, str) and name in self.kind.known:
            return self.kind.known[name]
        if is_path(name):
            return (info.context or {}).get(self.kind.key) or Method(name, self.kind.traits)
        *others, last = (f"'{known}'" for known in self.kind.known)
        raise PydanticCustomError(NO_METHOD, "no method has this name", {"expected": f"{', '.join(others)} or {last}"})


LARGEST_COUNT = 2**31 - 1
"""Default upper bound of integers. torch and vLLM store many of them in 32 bits."""
LARGEST_NUMBER = 1e12
SMALLEST_NUMBER = 1e-30
"""Default bounds of the magnitude of floats other than 0. Smaller magnitudes would be close to underflow in fp32."""
LARGEST_SIZE = 10**15
"""Upper bound of sizes in bytes or elements."""
MOST_RANKS = 1 << 14
"""Upper bound of the workers of a role and of the devices of a run. A larger number is probably a typing error."""
LONGEST_PATH, LONGEST_PART = 2048, 255
"""Largest length in bytes of a path, and of one name in it. Linux allows 4095 bytes, and a run appends names of files
to `output_dir`.
"""
LONGEST_NAME = 128
NAME = r"^[A-Za-z0-9_-]+$"
"""Pattern of names that become part of the names of files, processes and metrics."""


def _not_tiny(value: float) -> float:
    if 0 < abs(value) < SMALLEST_NUMBER:
        raise PydanticCustomError("greater_than_equal", "too near to 0", {"ge": f"{SMALLEST_NUMBER:g}"})
    return value


def _integer(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def variable_text(value: Any) -> Any:
    """Return a number as text, for an environment variable, and any other value unchanged."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _joined(value: Any) -> Any:
    """Return a list of names as one text with commas, and any other value unchanged."""
    names = isinstance(value, list) and value and all(isinstance(name, str) for name in value)
    return ",".join(value) if names else value


def _finite(value: Any) -> Any:
    """Return a tree of blocks, lists and values if all its numbers are finite."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for each in inner:
        _finite(each)
    if isinstance(value, float) and not isfinite(value):
        raise PydanticCustomError("finite_number", "not finite")
    return value


def _path(value: str) -> str:
    longest_part = max(len(part.encode(errors="replace")) for part in value.split("/"))
    if len(value.encode(errors="replace")) > LONGEST_PATH or longest_part > LONGEST_PART:
        expected = f"a path of at most {LONGEST_PATH} bytes, each name in it of at most {LONGEST_PART}"
        raise PydanticCustomError("path_too_long", "{expected}", {"expected": expected})
    return value


PositiveInt = Annotated[int, Field(gt=0, le=LARGEST_COUNT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Number = Annotated[float, Field(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER), AfterValidator(_not_tiny)]
PositiveFloat = Annotated[float, Field(gt=0, le=LARGEST_NUMBER), AfterValidator(_not_tiny)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=LARGEST_NUMBER), AfterValidator(_not_tiny)]
Fraction = Annotated[float, Field(ge=0, le=1), AfterValidator(_not_tiny)]
BelowOne = Annotated[float, Field(ge=0, lt=1), AfterValidator(_not_tiny)]
Large = Annotated[int, Field(ge=0, le=LARGEST_SIZE), BeforeValidator(_integer)]
"""An integer that may also be written as `1e8`, which YAML parses as a float."""
Ranks = Annotated[int, Field(gt=0, le=MOST_RANKS)]
"""A number of processes, or of devices per process."""
Seconds = Annotated[float, Field(ge=0.1, le=1e7)]
"""A timeout in seconds."""
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""A random seed in the range of NumPy."""
Name = Annotated[str, Field(pattern=NAME, max_length=LONGEST_NAME)]
PathText = Annotated[str, AfterValidator(_path)]
"""A path, or a name that may also be a path."""


Passed = Annotated[Any, AfterValidator(_finite)]
"""A value that is passed on to a library."""
VariableText = Annotated[str, BeforeValidator(variable_text), WithJsonSchema({"type": ["string", "number"]})]
"""Value of an environment variable. Numbers are first parsed by YAML: 0x10 becomes 16."""
Names = Annotated[
    str,
    BeforeValidator(_joined),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}),
]
"""Names with commas between them, or a list of names, as in PEFT's and TRL's files."""


class StrictConfig(BaseModel):
    """Base class of all blocks of the configuration: strictly typed, frozen, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to change a checked value. Raises ConfigError, in place of pydantic's error about its model."""
        problem, remedy = f"{value!r:.80}: a checked configuration cannot be changed", f"give {name}= to load_config"
        raise ConfigError(Fault(name, problem, remedy, "not_supported"))
