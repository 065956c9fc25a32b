"""Building blocks of the schema: a strict, frozen section, numbers with bounds, names and paths."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

LARGEST_COUNT = 2**31 - 1
"""Largest value of whole numbers whose key has no bound of its own. torch and vLLM keep many of them in 32 bits."""
LARGEST_NUMBER = 1e12
SMALLEST_NUMBER = 1e-30
"""Smallest and largest magnitude of other numbers except 0. Smaller ones are 0 in 32 bits."""
LARGEST_SIZE = 10**15
"""Bytes or elements."""
MOST_RANKS = 1024
"""Largest number of workers of a role and of devices of a run. A larger number is more likely a typing error."""
LONGEST_PATH, LONGEST_PART = 2048, 255
"""Largest number of bytes of a path and of one name in it. Linux allows 4095 bytes, and the run's files are below `output_dir`."""
LONGEST_NAME = 128
NAME = r"^[A-Za-z0-9_-]+$"
"""Pattern of texts that become parts of names of files, processes and metrics."""


def _not_tiny(value: float) -> float:
    if 0 < abs(value) < SMALLEST_NUMBER:
        raise PydanticCustomError("greater_than_equal", "too near to 0", {"ge": f"{SMALLEST_NUMBER:g}"})
    return value


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def variable_text(value: Any) -> Any:
    """Return a number as the text of an environment variable, and everything else unchanged."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


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
Large = Annotated[int, Field(ge=0, le=LARGEST_SIZE), BeforeValidator(_whole)]
"""A whole number that may be written as YAML's `1e8`, which is a float."""
Ranks = Annotated[int, Field(gt=0, le=MOST_RANKS)]
"""Processes, or devices of one process."""
Seconds = Annotated[float, Field(ge=0.1, le=1e7)]
"""A deadline."""
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""Seed in NumPy's range."""
Name = Annotated[str, Field(pattern=NAME, max_length=LONGEST_NAME)]
PathText = Annotated[str, AfterValidator(_path)]
"""A path, or a name that may be one."""


VariableText = Annotated[str, BeforeValidator(variable_text)]
"""Value of an environment variable. A number is taken as YAML reads it: 0x10 is 16."""


class StrictConfig(BaseModel):
    """A block of the configuration: strict types, no unknown keys, frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
