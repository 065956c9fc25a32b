"""Reads the records in a run folder, and knows the better direction of metrics.

Most metrics have none: a low entropy, for example, is neither good nor bad in itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from roll.errors import DataError, Fault
from roll.tracking.base import Notice, notice_of
from roll.tracking.history import RunEnd, RunStart, read_end, read_starts
from roll.tracking.jsonl import METRICS_FILE, NOTICES_FILE, read_lines

Row = dict[str, Any]
"""A row of `metrics.jsonl`."""
Direction = Literal["higher", "lower"]
HIGHER = re.compile(
    r"reward/([^/]+/)?mean|reward/scored_fraction|val/.+/((pass|maj|avg)@\w+|accuracy|reward_margin|margin)"
    r"|(dpo|reward_model)/(accuracy|reward_margin|margin)|critic/explained_variance|throughput/.+"
)
LOWER = re.compile(
    r"(sft|dpo|reward_model|distill)/loss|distill/divergence|val/.+/(loss|perplexity|divergence)|time/step"
)
FINISHED_A_STEP = "give the run folder (`output_dir`) of a run that finished at least one step"


@dataclass(frozen=True)
class RunRecord:
    """The records of a run."""

    folder: Path
    rows: Sequence[Row]
    """Rows of `metrics.jsonl`; at least one."""
    unreadable: int
    """Number of unreadable lines of `metrics.jsonl` and `notices.jsonl`."""
    config: str
    """Text of `config.yaml`; empty without such a file."""
    keys: Mapping[str, Any]
    """Parsed `config.yaml`; empty without such a file."""
    end: RunEnd | None
    """How the run ended; None if unknown."""
    starts: Sequence[RunStart]
    """Starts of the run, in order."""
    notices: Sequence[Notice] = ()
    """Notices about steps, in order."""

    @property
    def name(self) -> str:
        return str(self.keys.get("exp_name") or self.folder.resolve().name)

    @property
    def last_step(self) -> int:
        return max(row["step"] for row in self.rows)

    @property
    def seconds(self) -> float:
        """Return the total time of all steps, including step 0: the validation before the first step."""
        return sum(row.get("time/step") or 0.0 for row in self.rows)


def read_records(folder: Path) -> RunRecord:
    """Return the records of the run in `folder`. Raises DataError without metrics or a readable configuration."""
    path = folder / METRICS_FILE
    if not path.is_file():
        raise DataError(Fault(str(path), "there is no such file", FINISHED_A_STEP, "not_found"))
    rows, unreadable = read_lines(path)
    if not rows:
        raise DataError(Fault(str(path), "it holds no metrics", FINISHED_A_STEP, "empty"))
    text, keys = _configuration(folder / "config.yaml")
    notices, lost = _notices(folder / NOTICES_FILE)
    return RunRecord(folder, rows, unreadable + lost, text, keys, read_end(folder), read_starts(folder), notices)


def _notices(path: Path) -> tuple[list[Notice], int]:
    """Return the notices of a run, and the number of unreadable lines. A run of an earlier release has no such file."""
    if not path.is_file():
        return [], 0
    records, unreadable = read_lines(path)
    return [notice_of(record) for record in records], unreadable


def _configuration(path: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the text and the keys of the configuration. Both are empty if the file does not exist."""
    if not path.is_file():
        return "", {}
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        keys = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        keys = str(error).replace("\n", " ")
    if not isinstance(keys, dict):
        raise DataError(
            Fault(
                str(path),
                f"it is not a block of keys: {keys}",
                "remove the file; the page is then written without the configuration",
                "wrong_type",
            )
        )
    return text, keys


def series(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """Return the steps and the values of a metric. Steps without a finite value are left out."""
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def names_like(rows: Sequence[Row], prefix: str, suffix: str) -> list[str]:
    """Return the names of all metrics with this prefix and suffix, sorted."""
    return sorted({name for row in rows for name in row if name.startswith(prefix) and name.endswith(suffix)})


def is_idle(rows: Sequence[Row], name: str) -> bool:
    """Return whether a curve of a metric would show nothing: it never changes, or only numbers the policies. A metric
    with a better direction is never idle, because it may be stuck.
    """
    _, values = series(rows, name)
    return name.endswith("/policy_version") or (len(values) > 1 and len(set(values)) == 1 and direction(name) is None)


def constants(rows: Sequence[Row], names: Iterable[str]) -> list[tuple[str, float]]:
    """Return the names and values of the metrics that are idle because they never change."""
    idle = [(name, series(rows, name)[1]) for name in names if is_idle(rows, name)]
    return [(name, values[0]) for name, values in idle if len(set(values)) == 1]


def number_text(value: float) -> str:
    """Return the text of a number for pages and tables."""
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.2e}"


def direction(name: str) -> Direction | None:
    """Return the better direction of a metric; None if it has none.

    The policy loss has none, because it does not measure the quality of the policy.
    """
    if HIGHER.fullmatch(name):
        return "higher"
    return "lower" if LOWER.fullmatch(name) else None


def best_of(name: str) -> Callable[[Iterable[float]], float] | None:
    """Return the function that picks a metric's best value, `max` or `min`; None without a better direction."""
    ways: dict[Direction | None, Callable[[Iterable[float]], float] | None] = {"higher": max, "lower": min, None: None}
    return ways[direction(name)]
