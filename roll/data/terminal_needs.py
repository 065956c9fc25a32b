"""What the tasks of terminal benchmarks need: limits, as keys of an environment, and what roll does not give them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from roll.errors import Fault

NOT_GIVEN = {
    "steps": "has several steps",
    "environment.mcp_servers": "needs MCP servers",
    "environment.gpus": "needs GPUs",
    "environment.env": "sets variables of its container",
    "verifier.env": "sets variables of its tests",
    "verifier.environment": "judges in a container of its own",
}
"""Keys of `task.toml` without which a task means something else, and what the task does with them."""
SIZE = {"k": 2**-20, "m": 2**-10, "g": 1.0, "t": 2.0**10}
"""GiB of the units of sizes: `512M`, `4G`, `4GB`, `4GiB`."""
LIMITS = {
    "verifier.timeout_sec": "environment_args.verify_seconds",
    "max_test_timeout_sec": "environment_args.verify_seconds",
    "environment.cpus": "container.cpus",
    "environment.memory": "container.memory_gib",
    "environment.memory_mb": "container.memory_gib",
    "environment.storage": "container.disk_gib",
    "environment.storage_mb": "container.disk_gib",
}
"""Keys of `task.toml` and `task.yaml`, and the keys of `environments.<domain>` that mean the same."""


def unmet(task: Mapping[str, Any], place: str) -> Iterator[Fault]:
    """Yield what roll does not give to a task."""
    for key, needs in NOT_GIVEN.items():
        if _at(task, key):
            yield Fault(f"{place}: {key}", f"the task {needs}", "leave the task out", "not_supported")


def limits_of(task: Mapping[str, Any]) -> dict[str, float]:
    """Return the limits of a task, by the keys of `environments.<domain>`: seconds, cores and GiB.

    Raises:
        ValueError: a limit is no number above 0, or no size.
    """
    found: dict[str, float] = {}
    for key, own in LIMITS.items():
        if (value := _at(task, key)) is None:
            continue
        number = _gib(value) if own.endswith("_gib") and not key.endswith("_mb") else _number(value)
        if number is None or number <= 0:
            raise ValueError(f"{key} is {value!r}, and must be above 0")
        found[own] = number / 2**10 if key.endswith("_mb") else number
    return found


def largest(limits: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest of each limit: one environment plays all tasks."""
    found: dict[str, float] = {}
    for one in limits:
        found |= {key: max(value, found.get(key, value)) for key, value in one.items()}
    return found


def _at(task: Mapping[str, Any], key: str) -> Any:
    value: Any = task
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _gib(value: Any) -> float | None:
    read = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt])i?b?\s*", str(value).lower())
    return float(read[1]) * SIZE[read[2]] if read else None
