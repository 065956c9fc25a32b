"""Files for rows that are given as Python objects: a Dataset becomes Parquet, a list of dicts JSON Lines.

The file is `FOLDER/DIGEST/NAME.parquet` or `.jsonl`. The digest is that of its bytes, so that the same rows have the
same name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from pyarrow.parquet import ParquetWriter

from roll.errors import ConfigError, Fault
from roll.given.digest import LENGTH
from roll.given.functions import write_text

ROWS = 1000
"""Number of rows that are written together."""
REMEDY = "give a datasets.Dataset, or a list of dicts"


def are_rows(value: object) -> bool:
    """Whether a value is a Dataset, or a list of dicts."""
    return _is_dataset(value) or isinstance(value, list | tuple) and any(isinstance(one, Mapping) for one in value)


def file_of(rows: Any, folder: Path, place: str, name: str = "rows") -> str:
    """Write rows into a file below `folder`, and return its path.

    Args:
        place: the key or argument that errors report.
        name: stem of the file.

    Raises:
        ConfigError: these are no rows, a value is not JSON, or the folder cannot be written.
    """
    if isinstance(rows, Mapping):
        problem = f"it is a {type(rows).__name__} with {', '.join(map(str, rows))}"
        raise ConfigError(Fault(place, problem, f"{REMEDY}: one of its values", "wrong_type"))
    if not _is_dataset(rows) and not isinstance(rows, list | tuple):
        hint = ": datasets.Dataset.from_pandas(frame)" if hasattr(rows, "iloc") else ""
        raise ConfigError(Fault(place, f"it is a {type(rows).__name__}", f"{REMEDY}{hint}", "wrong_type"))
    if not len(rows):
        raise ConfigError(Fault(place, "it has no rows", REMEDY, "empty"))
    return str(_parquet(rows, folder, place, name) if _is_dataset(rows) else _json_lines(rows, folder, place, name))


def _is_dataset(value: object) -> bool:
    """Whether a value is a Dataset. `datasets` takes a second to import, and whoever has a Dataset has imported it."""
    kind = type(value)
    return kind.__module__.startswith("datasets.") and kind.__name__ == "Dataset"


def _parquet(rows: Any, folder: Path, place: str, name: str) -> Path:
    partial = folder / f".{name}.{os.getpid()}.parquet"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        schema = rows.features.arrow_schema
        # Dataset.to_parquet would show a progress bar, and write no checksums.
        with ParquetWriter(partial, schema, write_page_checksum=True) as writer:
            for table in rows.with_format("arrow").iter(ROWS):
                writer.write_table(table.cast(schema))
        with partial.open("rb") as stream:
            digest = file_digest(stream, "sha256").hexdigest()[:LENGTH]
        file = folder / digest / f"{name}.parquet"
        file.parent.mkdir(exist_ok=True)
        os.replace(partial, file)
    except OSError as error:
        problem = f"rows cannot be written into '{folder}': {error.strerror}"
        raise ConfigError(Fault(place, problem, "choose another output_dir", "not_writable")) from None
    finally:
        partial.unlink(missing_ok=True)
    return file


def _json_lines(rows: Sequence[Any], folder: Path, place: str, name: str) -> Path:
    lines = [_line(row, f"{place}[{number}]") for number, row in enumerate(rows)]
    text = "".join(f"{line}\n" for line in lines)
    file = folder / sha256(text.encode()).hexdigest()[:LENGTH] / f"{name}.jsonl"
    if not file.is_file():
        write_text(file, text, place)
    return file


def _line(row: object, place: str) -> str:
    if not isinstance(row, Mapping):
        raise ConfigError(Fault(place, f"it is a {type(row).__name__}", "make each row a dict", "wrong_type"))
    try:
        return json.dumps(dict(row), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        remedy = "use texts, numbers, lists and dicts, or a datasets.Dataset"
        raise ConfigError(Fault(place, f"it has a value that is not JSON: {error}", remedy, "wrong_type")) from None
