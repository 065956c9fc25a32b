"""Sources of rows: JSON, JSONL, CSV, Parquet and Arrow files, folders of them, and data sets of the Hub.

A source yields its rows one by one as JSON text, each with its number. Reports can therefore name `file:row`, and a
reward sees the row exactly as its author wrote it. Arrow would unify types over rows and turn dates into timestamps;
`columnar` undoes that for Arrow's own files.

Rows of Arrow tables as JSON text. They are the rows that the same data has as JSON Lines. Pure functions.

A columnar file stores every column and every key of a struct for all rows. A row that did not have a key gets a null,
which is the padding of the file and not a part of the row, so a null column and a null key of a struct are left out. A
null that was written cannot be told from padding, and the keys of a struct are in the order of the schema. Null
elements of lists, null values of Arrow's maps and nulls in columns of JSON (`arrow.json`) are kept.
"""

from __future__ import annotations

import base64
import csv
import glob
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow
from pyarrow import ipc, parquet, types

from roll.data.json_text import NotText, RepeatedKey, items, parsed
from roll.errors import DataError, Fault

if TYPE_CHECKING:  # the import takes a second, and files are read without it
    import datasets

ListType = (
    pyarrow.ListType
    | pyarrow.LargeListType
    | pyarrow.FixedSizeListType
    | pyarrow.ListViewType
    | pyarrow.LargeListViewType
)


def json_rows(batch: pyarrow.RecordBatch | pyarrow.Table, encodes_bytes: bool = False) -> Iterator[str | ValueError]:
    """Yield the JSON text of each row, an object; in place of a row that JSON cannot express, yield the error. With
    `encodes_bytes`, bytes become text in base64.
    """
    kinds = dict(zip(batch.schema.names, batch.schema.types, strict=True))
    for row in batch.to_pylist():
        try:
            known = {name: plain(value, kinds[name]) for name, value in row.items() if value is not None}
            yield json_text(known, encodes_bytes)
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


def json_text(row: dict[str, Any], encodes_bytes: bool = False) -> str:
    """Return the JSON text of a row; `encodes_bytes`: see `json_rows`. Raises ValueError if it holds a value that JSON
    cannot express.
    """
    try:
        text = json.dumps(row, ensure_ascii=False, default=_as_text_or_base64 if encodes_bytes else _as_text)
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


def _as_text_or_base64(value: Any) -> str | float:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else _as_text(value)


LOG = logging.getLogger(__name__)

SUFFIXES = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""Kinds of files by their suffix in lower case."""
MOST_LISTED = 12
"""Largest number of files that a message names."""
ROWS_AT_ONCE = 1000
FIRST_BYTES = 1 << 20
"""Number of bytes of an array of JSON that are read for its first rows."""
LARGEST_FIELD = 1 << 30
"""Largest number of characters of a value in a CSV file."""
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w./-]+)?")


@dataclass(frozen=True)
class RawRow:
    """One row of a source, as it was read."""

    number: int
    """Number of the row, counted from 1; in JSONL the line number."""
    text: str
    """JSON text of the row, an object. Empty if there is a problem."""
    problem: str = ""
    """Why the row is not a JSON object. Empty if it is one."""


@dataclass(frozen=True)
class Source:
    """One file, one saved data set or one data set of the Hub."""

    name: str
    """Name in reports: the file's path, or the Hub name."""
    kind: Literal["json", "csv", "parquet", "arrow", "table"]
    stamp: str
    """Text that changes when the rows do: path, size and modification time of the source's files."""
    table: datasets.Dataset | None = None
    """Rows of a source of kind `table`, memory-mapped."""
    encodes_bytes: bool = False
    """Whether bytes, of pictures for example, become text in base64. Otherwise a row with bytes cannot be read."""

    def rows(self) -> Iterator[RawRow]:
        """Yield every row in order. Raises DataError if the file as a whole cannot be read."""
        yield from self._rows()

    def first(self, count: int) -> list[RawRow]:
        """Return the first rows without reading the whole file. Of an array of JSON, only the first MiB is read.

        Raises:
            DataError: the beginning of the file cannot be read.
        """
        return list(islice(self._rows(FIRST_BYTES), count))

    def _rows(self, most: int = -1) -> Iterator[RawRow]:
        """Yield the rows, of an array of JSON only those in the first `most` bytes."""
        try:
            if self.kind in ("json", "csv"):
                yield from _json_rows(Path(self.name), most) if self.kind == "json" else _csv_rows(Path(self.name))
                return
            batches = _arrow_batches(Path(self.name)) if self.table is None else _table_batches(self.table)
            read = partial(json_rows, encodes_bytes=self.encodes_bytes)
            for number, text in enumerate(chain.from_iterable(map(read, batches)), start=1):
                yield RawRow(number, text) if isinstance(text, str) else RawRow(number, "", str(text))
        except (OSError, ValueError, OverflowError, MemoryError, pyarrow.ArrowException) as error:
            raise DataError(_unreadable(self.name, f"is not a readable {self.kind} file: {error}")) from error


def find_sources(file_name: str | Sequence[str], split: str) -> list[Source]:
    """Return the sources of the names in `data_args.file_name`, in order. The files of a folder are sorted by path.

    A name that is neither a file nor a folder is looked up on the Hub, as `owner/name`, as `owner/name:config`, or as
    `owner/name:path` for one file of the set, whatever its split.

    Raises:
        DataError: some names lead to no rows; there is one fault for each.
    """
    names = [file_name] if isinstance(file_name, str) else list(file_name)
    sources: list[Source] = []
    faults: list[Fault] = []
    for name in names:
        try:
            sources += _resolve(name, split)
        except DataError as error:
            faults += error.faults
    if not names:
        faults.append(
            Fault("data_args.file_name", "names no file", "give at least one file, folder or Hub name", "empty")
        )
    if faults:
        raise DataError(*faults)
    if unchecked := [one.name for one in sources if one.kind == "parquet" and not _has_checksums(Path(one.name))]:
        LOG.warning(
            "%s: no page checksums, so damage to %s values cannot be noticed; write_page_checksum=True adds them",
            unchecked[0] if len(unchecked) == 1 else f"{unchecked[0]} and {len(unchecked) - 1} more Parquet file(s)",
            "its" if len(unchecked) == 1 else "their",
        )
    return sources


def rowless(sources: Sequence[Source]) -> list[Fault]:
    """Return the faults of the sources of a set that has no rows."""
    return [Fault(source.name, "has no rows", "give a source with at least one row", "empty") for source in sources]


def folder_of(source: Source) -> Path:
    """Return the folder where relative paths in a source's rows start: that of its file, a saved set's own, or for a
    set of the Hub the working directory.
    """
    path = Path(source.name)
    return (path.parent if path.is_file() else path if path.is_dir() else Path()).absolute()


def _has_checksums(path: Path) -> bool:
    """Whether the first page of a Parquet file has a checksum. A file that cannot be read is reported with its rows.

    The header of a page is a struct in Thrift's compact protocol: three integers (type, size, compressed size), then
    the optional integer `crc`. https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
    """
    try:
        with parquet.ParquetFile(path) as file:
            if not file.metadata.num_row_groups or not file.metadata.num_columns:
                return True
            chunk = file.metadata.row_group(0).column(0)
    except (OSError, ValueError, pyarrow.ArrowException):
        return True
    with path.open("rb") as opened:
        opened.seek(chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset)
        header = opened.read(64)
    place = 0
    for _ in range(3):
        place += 1
        while place < len(header) and header[place] & 0x80:
            place += 1
        place += 1
    return header[place : place + 1] == b"\x15"


def _resolve(name: str, split: str) -> list[Source]:
    path = Path(name)
    if path.is_file():
        return [_file(path)]
    if path.is_dir():
        saved = any((path / marker).exists() for marker in ("state.json", "dataset_dict.json"))
        return [_saved(path, split)] if saved else _folder(path, split)
    if (_is_read(name) and ":" not in name) or not HUB_NAME.fullmatch(name):
        raise DataError(
            Fault(
                name,
                "there is no such file or folder",
                f"give an existing path; relative paths start at {Path.cwd()}",
                "not_found",
            )
        )
    return [_hub(name, split)]


def _file(path: Path) -> Source:
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(_unreadable(str(path), f"has the suffix '{path.suffix}'"))
    status = path.stat()
    return Source(str(path), SUFFIXES[path.suffix.lower()], f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}")  # type: ignore[arg-type]


def _folder(path: Path, split: str) -> list[Source]:
    """Return the folder's files of `split`, named as on the Hub (`train-0.parquet`, `test/a.jsonl`).

    Files that are left out, such as those of other splits, hidden ones and other kinds, are named in a warning.

    Raises:
        DataError: there are no files of rows, or none of the split; or the names of some files tell a split, but those
            of others do not.
    """
    from datasets.data_files import DataFilesDict, get_data_patterns

    plain = glob.escape(str(path))
    try:
        by_split = DataFilesDict.from_patterns(get_data_patterns(plain), base_path=plain)
    except FileNotFoundError:
        by_split = {}
    usable = {str(key): sorted(map(Path, filter(_is_read, files))) for key, files in by_split.items()}
    usable = {key: files for key, files in usable.items() if files}
    present = [file for file in sorted(path.absolute().rglob("*")) if file.is_file() and not _describes(file)]
    named = {file for files in usable.values() for file in files}
    visible = [file for file in present if not any(part.startswith((".", "__")) for part in _below(file, path).parts)]
    if unnamed := [file for file in visible if _is_read(file) and file not in named]:
        problem = f"has files whose names tell no split, beside files of a split: {_listed(unnamed, path)}"
        remedy = "list the files to read in data_args.file_name, or put these into a folder named as their split"
        raise DataError(Fault(str(path), problem, remedy, "contradiction"))
    if not usable:
        raise DataError(_unreadable(str(path), "is a folder without data files"))
    if split not in usable:
        remedy = f"set data_args.split to one of: {', '.join(sorted(usable))}"
        raise DataError(Fault(str(path), f"has no files of the split '{split}'", remedy, "not_found"))
    if others := [file for file in present if file not in usable[split]]:
        LOG.warning("%s: only files of the split '%s' are read; left out: %s", path, split, _listed(others, path))
    return [_file(file if path.is_absolute() else Path(os.path.relpath(file))) for file in usable[split]]


def _is_read(file: str | Path) -> bool:
    return Path(file).suffix.lower() in SUFFIXES


def _describes(file: Path) -> bool:
    """Whether a file describes a data set and holds no rows."""
    from datasets.data_files import FILES_TO_IGNORE

    return file.name in FILES_TO_IGNORE or file.suffix == ".md" or file.name == ".gitattributes"


def _below(file: Path, folder: Path) -> Path:
    return file.relative_to(folder.absolute())


def _listed(files: Sequence[Path], folder: Path) -> str:
    more = f" and {len(files) - MOST_LISTED} more" if len(files) > MOST_LISTED else ""
    return ", ".join(str(_below(file, folder)) for file in files[:MOST_LISTED]) + more


def _saved(path: Path, split: str) -> Source:
    """Return the source of a folder that `save_to_disk` wrote. The folder holds one data set, or several splits."""
    import datasets

    folder = path
    if (path / "dataset_dict.json").exists():
        folder, splits = path / split, sorted(state.parent.name for state in path.glob("*/state.json"))
        if split not in splits:
            raise DataError(
                Fault(
                    str(path),
                    f"has no split '{split}'",
                    f"set data_args.split to one of: {', '.join(splits)}",
                    "not_found",
                )
            )
    try:
        table = datasets.Dataset.load_from_disk(str(folder))
        for entry in table.cache_files:
            _check_stream(Path(entry["filename"]))
        return _table(str(path), table)
    except IndexError as error:  # from `datasets`, for a set without rows
        raise DataError(Fault(str(folder), "has no rows", "give a source with at least one row", "empty")) from error
    except (OSError, ValueError) as error:
        raise DataError(_unreadable(str(folder), f"is not a complete saved data set: {error}")) from error


def _check_stream(path: Path) -> None:
    """Check a file of a saved data set without reading its rows. Raises ValueError if the file is incomplete."""
    with pyarrow.memory_map(str(path)) as mapped:
        for _ in _stream_batches(ipc.open_stream(mapped), mapped):
            pass


def _hub(name: str, split: str) -> Source:
    import datasets

    hub_name, _, part = name.partition(":")
    try:
        if _is_read(part):
            loaded = datasets.load_dataset(hub_name, data_files=part, split="train")
        else:
            loaded = datasets.load_dataset(hub_name, part or None, split=split)
    except Exception as error:  # The client raises a dozen types of errors: network, name, format.
        problem = f"is not a local path, and cannot be loaded from the Hub: {type(error).__name__}: {error}"
        remedy = f"check the name (`owner/name` or `owner/name:config`), split ('{split}') and network, or give a path"
        raise DataError(Fault(name, problem, remedy, "unreadable")) from error
    return _table(name, loaded)


def _table(name: str, table: datasets.Dataset) -> Source:
    files = [Path(entry["filename"]) for entry in table.cache_files]
    stamp = "|".join(f"{file.resolve()}|{file.stat().st_size}|{file.stat().st_mtime_ns}" for file in files)
    return Source(name, "table", f"{name}|{len(table)}|{stamp}", table)


def _json_rows(path: Path, most: int) -> Iterator[RawRow]:
    """Yield the rows of a JSON array, or of a file with an object per line, by its first character, not its suffix.

    Of an array, yield the rows in its first `most` bytes, or all for -1.
    """
    with path.open("rb") as file:
        first = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        file.seek(0)
        if first != b"[":
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parsed(number, line)
            return
        whole = file.read(most)
    is_cut = len(whole) == most
    try:
        text = whole.decode(json.detect_encoding(whole), "ignore" if is_cut else "strict")
        for number, row in enumerate(items(text), start=1):
            yield _as_json(number, row)
    except (ValueError, RecursionError) as error:
        if not is_cut:  # else the cut may be the error
            raise DataError(_unreadable(str(path), f"is not JSON: {error}")) from error


def _arrow_batches(path: Path) -> Iterator[pyarrow.RecordBatch]:
    """Yield the batches of a Parquet file, or of an Arrow file in the stream or the file format."""
    if path.suffix.lower() == ".parquet":
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            yield from file.iter_batches(ROWS_AT_ONCE)
        return
    with pyarrow.memory_map(str(path)) as mapped:
        try:
            reader = ipc.open_stream(mapped)
        except pyarrow.ArrowInvalid:
            opened = ipc.open_file(mapped)
            batches = (opened.get_batch(index) for index in range(opened.num_record_batches))
        else:
            batches = _stream_batches(reader, mapped)
        for batch in batches:
            batch.validate(full=True)  # otherwise corrupt offsets could lead to a read from anywhere in memory
            yield batch


def _table_batches(table: datasets.Dataset) -> Iterator[pyarrow.Table]:
    yield from table.with_format("arrow").iter(ROWS_AT_ONCE)  # pyright: ignore[reportReturnType]  # tables, in this format


def _csv_rows(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a CSV or TSV file. The first line names the columns; every value is text, exactly as it is
    written.

    Raises:
        ValueError: there is no first line, or it names a column twice or not at all; or the file is not CSV in UTF-8.
    """
    csv.field_size_limit(LARGEST_FIELD)  # Python's own limit of 128 KiB is shorter than some conversations
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            names = next(reader, [])
            if not names or "" in names or len(set(names)) < len(names):
                hint = " (pandas writes a column without a name unless index=False)" if names[:1] == [""] else ""
                raise ValueError(f"its first line does not name each column once: {', '.join(names)[:200]!r}{hint}")
            begun = reader.line_num + 1
            for values in reader:
                if len(values) == len(names):
                    yield _as_json(begun, dict(zip(names, values, strict=True)))
                elif values:
                    yield RawRow(begun, "", f"has {len(values)} values, and the first line names {len(names)} columns")
                begun = reader.line_num + 1
        except csv.Error as error:
            raise ValueError(f"line {reader.line_num}: {error}") from error


def _stream_batches(
    reader: ipc.RecordBatchStreamReader, mapped: pyarrow.MemoryMappedFile
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the batches of an Arrow stream, and check that it is complete. pyarrow itself accepts a file cut off
    between two batches.

    Raises:
        ValueError: the end-of-stream marker is missing, or is not at the end of the file.
    """
    while True:
        before = mapped.tell()
        try:
            yield reader.read_next_batch()
        except StopIteration:
            break
    if mapped.tell() == before:
        raise ValueError("it ends between two batches, without the end-of-stream marker: the file is truncated")
    if mapped.tell() < mapped.size():
        raise ValueError(f"it has {mapped.size() - mapped.tell()} bytes after its end-of-stream marker")


def _parsed(number: int, line: bytes) -> RawRow:
    try:
        text = line.decode("utf-8-sig").strip()
        row = parsed(text)
    except (RepeatedKey, NotText) as error:
        return RawRow(number, "", str(error))
    except (ValueError, RecursionError) as error:
        return RawRow(number, "", f"is not JSON: {error}")
    if not isinstance(row, dict):
        return RawRow(number, "", f"is not an object but a {type(row).__name__}")
    return RawRow(number, text)


def _as_json(number: int, row: Any) -> RawRow:
    if isinstance(row, RepeatedKey):
        return RawRow(number, "", str(row))
    if not isinstance(row, dict):
        return RawRow(number, "", f"is not an object but a {type(row).__name__}")
    try:
        return RawRow(number, json_text(row))
    except ValueError as error:
        return RawRow(number, "", str(error))


def _unreadable(place: str, problem: str) -> Fault:
    return Fault(
        place,
        problem,
        f"give a complete file of a supported kind ({', '.join(SUFFIXES)}), a folder of such files or a Hub name",
        "unreadable",
    )
