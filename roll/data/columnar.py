"""Rows of Arrow tables as JSON text. They are the rows that the same data has as JSON Lines. Pure functions.

A columnar file stores every column and every key of a struct for all rows. A row that did not have a key gets a null, which is the padding
of the file and not a part of the row, so a null column and a null key of a struct are left out. A null that was written cannot be told from
padding, and the keys of a struct are in the order of the schema. Null elements of lists, null values of Arrow's maps and nulls in columns
of JSON (`arrow.json`) are kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow
from pyarrow import types

from roll.data.json_text import RepeatedKey, parsed

ListType = pyarrow.ListType | pyarrow.LargeListType | pyarrow.FixedSizeListType | pyarrow.ListViewType | pyarrow.LargeListViewType


def json_rows(batch: pyarrow.RecordBatch | pyarrow.Table) -> Iterator[str | ValueError]:
    """Yield the JSON text of each row, an object; in place of a row that JSON cannot express, yield the error."""
    kinds = dict(zip(batch.schema.names, batch.schema.types, strict=True))
    for row in batch.to_pylist():
        try:
            yield json_text({name: plain(value, kinds[name]) for name, value in row.items() if value is not None})
        except (ValueError, RecursionError) as error:
            yield ValueError(str(error))


def plain(value: Any, kind: pyarrow.DataType) -> Any:
    """Return a value of Arrow as the value of JSON that it stands for.

    Raises:
        ValueError: a map has keys that are not text, or a key twice; or a text of the type `arrow.json` is not JSON.
    """
    if value is None:
        return None
    if isinstance(kind, pyarrow.JsonType):
        return parsed(value)
    if isinstance(kind, pyarrow.BaseExtensionType):
        return plain(value, kind.storage_type)
    if isinstance(kind, pyarrow.DictionaryType):
        return plain(value, kind.value_type)
    if isinstance(kind, pyarrow.StructType):
        return {field.name: plain(value[field.name], field.type) for field in kind if value[field.name] is not None}
    if isinstance(kind, pyarrow.MapType):
        return _object(value, kind.item_type)
    if isinstance(kind, ListType):
        return [plain(one, kind.value_type) for one in value]
    # The shortest text that gives the same fp32 number: 0.1, which Python would show as 0.10000000149011612.
    if types.is_float32(kind):
        return float(str(np.float32(value)))
    return float(str(np.float16(value))) if types.is_float16(kind) else value


def json_text(row: dict[str, Any]) -> str:
    """Return the JSON text of a row. Raises ValueError if it holds a value that JSON cannot express."""
    try:
        text = json.dumps(row, ensure_ascii=False, default=_as_text)
        text.encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"holds a value that JSON cannot express: {error}") from error
    return text


def _object(pairs: list[tuple[Any, Any]], kind: pyarrow.DataType) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if not isinstance(key, str):
            raise ValueError(f"holds a map whose key {key!r:.60} is not text")
        if key in found:
            raise RepeatedKey(f"has the key {key!r} more than once in one object")
        found[key] = plain(value, kind)
    return found


def _as_text(value: Any) -> str | float:
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value) if Decimal(repr(float(value))) == value else str(value)
    raise TypeError(f"a {type(value).__name__}")
