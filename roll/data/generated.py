"""Tasks that the package reasoning-gym generates (arXiv 2505.24760), as rows."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from roll.data.public_rows import AnotherLayout, PreparedRow, text_at
from roll.errors import DataError, Fault

PACKAGE = "reasoning_gym"


def task(row: Mapping[str, Any], family: str) -> PreparedRow:
    """Convert a task of reasoning-gym. `metadata` is the JSON text of what the package's own verifier compares with; it
    names the family. Families that only a verifier can judge have no answer, and `ground_truth` is null.

    Raises:
        AnotherLayout: `question` is not a text, or there is neither `answer` nor `metadata`.
    """
    question, answer, told = text_at(row, "question"), row.get("answer"), row.get("metadata")
    if answer is None and not told:
        raise AnotherLayout("there is neither 'answer' nor 'metadata'")
    metadata = json.dumps({"source_dataset": family, **(told or {})}, default=str)
    reference = None if answer is None else str(answer)
    columns = {"prompt": question, "ground_truth": reference, "metadata": metadata, "tag": family}
    return PreparedRow(question, columns)


def generated(family: str, settings: Mapping[str, Any], seed: int, most: int) -> Iterator[Mapping[str, Any]]:
    """Yield `most` tasks of a family one by one, with the columns question, answer and metadata. The same seed and
    settings give the same tasks.

    Raises:
        DataError: the package is not installed, or does not know the family or a setting.
    """
    try:
        package = import_module(PACKAGE)
        families = import_module(f"{PACKAGE}.factory").DATASETS
    except ImportError as error:
        remedy = "python -m pip install 'reasoning-gym~=0.1.25'; or give --source a file of its tasks"
        raise DataError(Fault(PACKAGE, f"the package cannot be imported: {error}", remedy, "not_installed")) from error
    if family not in families:
        near = difflib.get_close_matches(family, families, 1)
        remedy = f"did you mean '{near[0]}'?" if near else f"give one of: {', '.join(sorted(families))}"
        raise DataError(Fault(f"{PACKAGE}:{family}", "there is no such family", remedy, "unknown_name"))
    try:
        tasks = package.create_dataset(family, seed=seed, size=most, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        remedy = f"give settings of {families[family][1].__name__}"
        problem = f"{dict(settings)}: {' '.join(str(error).split()) or 'not allowed'}"
        raise DataError(Fault("--settings", problem, remedy, "not_allowed")) from error
    return (tasks[number] for number in range(most))
