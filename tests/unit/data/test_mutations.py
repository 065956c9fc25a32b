"""Rows and files with seeded random alterations are either read exactly or reported as faulty. No row is lost; nothing
hangs or crashes.
"""

from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from roll.config.schema.model import DataConfig
from roll.data.chat import ChatTemplate, renderer
from roll.data.prompts import _prompt_text
from roll.data.sources import find_sources
from roll.data.tables import Preparation
from roll.data.unwritten import Unwritten
from roll.errors import DataError
from tests import limits

pytestmark = pytest.mark.full
ROWS, FILES, ROWS_OF_FILE, LINES_OF_FILE = 10_000, 200, 300, 500
COLUMNS = DataConfig.model_validate({"file_name": "rows.jsonl", "template": "chatml", "messages": "messages"})
PIECES = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"null",
    b"NaN",
    b"1e999",
    b"9" * 5000,
    b"\\ud800",
    b"\xff",
    b"\x00",
    b"\\u0000",
    b"\xef\xbb\xbf",
]
PIECES += [b"\r", b"\n", b" ", b'"messages": [], ', b'"role": "user", ', b"-", b"true", b"[" * 2000, b"\xe2\x80\xa8"]


def row(number: int) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": f"Count to {number}."},
        {"role": "user", "content": f"What is {number}? ä \U0001f600"},
    ]
    return {"messages": messages, "ground_truth": str(number), "tag": None, "more": {"a": [number, 1.5, True, {}]}}


def mutated(line: bytes, chance: random.Random) -> bytes:
    """Return the line with up to three random alterations: bytes are removed, duplicated, inserted or flipped."""
    out = bytearray(line)
    for _ in range(chance.randrange(4)):
        at = chance.randrange(len(out) + 1)
        span = slice(at, at + chance.randrange(1, 20))
        match chance.randrange(5):
            case 0:
                del out[span]
            case 1:
                out[at:at] = out[span]
            case 2:
                out[at:at] = chance.choice(PIECES)
            case 3 if out:
                out[at % len(out)] ^= 1 << chance.randrange(8)
            case _:
                other = chance.randrange(len(out) + 1)
                out[at:at] = out[other : other + 30]
    return bytes(out)


class Repeated(Exception):
    """Raised for an object that has a key twice."""


def expected(line: bytes) -> Any:
    """Return the object that Python's own JSON reader finds in a line, or None if the line must be refused."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) < len(pairs):
            raise Repeated
        return dict(pairs)

    try:
        found = json.loads(line.decode("utf-8-sig").strip(), object_pairs_hook=once)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError, Repeated):
        return None
    return found if isinstance(found, dict) else None


def characters(texts: list[str], **options: Any) -> dict[str, list[list[int]]]:
    """Tokenise texts into one token per character."""
    return {"input_ids": [[ord(one) for one in text] for text in texts]}


def test_randomly_altered_rows_are_read_or_reported(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    chance, seen, refused = random.Random(17), 0, 0
    texts = partial(_texts, render=renderer("chatml", tokenizer))
    preparation = Preparation(texts, characters, False, COLUMNS, None)  # type: ignore[arg-type]
    while seen < ROWS:
        lines = [mutated(json.dumps(row(number)).encode(), chance) for number in range(LINES_OF_FILE)]
        path = tmp_path / "rows.jsonl"
        # If the first line began with a bracket, the file would be read as one JSON array.
        path.write_bytes(b"\n".join([json.dumps(row(0)).encode(), *lines]))
        written = {number: line for number, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()}
        found = {one.number: one for one in find_sources(str(path), "train")[0].rows()}
        assert found.keys() == written.keys(), "each line that is not blank is a row"
        for number, line in written.items():
            said = expected(line)
            assert bool(found[number].problem) == (said is None), line
            assert said is None or repr(json.loads(found[number].text)) == repr(said), line
        columns = ("file", "number", "row", "problem")
        batch = {
            name: [{"file": 0, "number": n, "row": one.text, "problem": one.problem}[name] for n, one in found.items()]
            for name in columns
        }
        prepared = preparation(batch)
        for one, reason, text, token_ids in zip(
            found.values(), *(prepared[name] for name in ("reason", "text", "token_ids")), strict=True
        ):
            assert bool(reason) or text.endswith("<|im_start|>assistant\n"), one
            assert reason or token_ids == [ord(character) for character in text]
            assert reason or all(message["content"] in text for message in json.loads(one.text)["messages"])
            refused += bool(reason)
        seen += len(written)
    assert ROWS / 4 < refused < ROWS * 3 / 4, "many are refused, and many are not"


def _texts(row: Any, render: ChatTemplate) -> Any:
    return _prompt_text(row, COLUMNS, render, Unwritten(), False)


def write_array(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows))


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, path, row_group_size=100, write_page_checksum=True)


def write_stream(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=50)


def write_file(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=50)


KINDS: list[tuple[str, Callable[[Path, list[dict[str, Any]]], None]]] = [
    ("json", write_array),
    ("parquet", write_parquet),
    ("arrow", write_stream),
    ("arrow", write_file),
]


def read(names: list[str]) -> list[tuple[list[tuple[int, str]], list[str]]]:
    """Return, for each file, its sound rows (number and JSON text) and the problems that were found."""
    found: list[tuple[list[tuple[int, str]], list[str]]] = []
    for name in names:
        try:
            rows = list(find_sources(name, "train")[0].rows())
            found.append(
                (
                    [(one.number, one.text) for one in rows if not one.problem],
                    [one.problem for one in rows if one.problem],
                )
            )
        except DataError as error:
            assert all(fault.place == name and fault.remedy for fault in error.faults)
            found.append(([], [fault.problem for fault in error.faults]))
    return found


def test_randomly_altered_files_are_complete_or_refused(tmp_path: Path) -> None:
    """Truncated files are refused, and so are Parquet and Arrow files with bytes inserted or removed.

    A changed byte in a value of an Arrow file may go unnoticed. Altered JSON that is still valid is read as it is.
    """
    chance = random.Random(23)
    rows = [
        {"prompt": f"What is {number}?", "answer": number, "list": [number] * (number % 3)}
        for number in range(ROWS_OF_FILE)
    ]
    whole = [(number, json.dumps(one, ensure_ascii=False)) for number, one in enumerate(rows, 1)]
    names: list[str] = []
    for number in range(FILES):
        suffix, write = KINDS[number % len(KINDS)]
        write(path := tmp_path / f"rows-{number}.{suffix}", rows)
        bytes_of = bytearray(path.read_bytes())
        at = chance.randrange(len(bytes_of))
        match number // len(KINDS) % 4:
            case 0:
                del bytes_of[at:]
            case 1:
                bytes_of[at] ^= 1 << chance.randrange(8)
            case 2:
                del bytes_of[at : at + chance.randrange(1, 500)]
            case _:
                bytes_of[at:at] = bytes_of[at : at + chance.randrange(1, 500)]
        path.write_bytes(bytes_of)
        names.append(str(path))
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # so that a reader that crashes or hangs fails the test
        found = pool.apply_async(read, (names,)).get(limits.CALL)
    for number, (name, (good, problems)) in enumerate(zip(names, found, strict=True)):
        if problems:
            continue
        assert [place for place, _ in good] == list(range(1, len(good) + 1)), name
        if name.endswith(".json"):
            assert [json.loads(text) for _, text in good] == json.loads(Path(name).read_bytes()), name
        elif number // len(KINDS) % 4 != 1 or name.endswith(".parquet"):
            assert good == whole, name
        else:
            assert len(good) == len(whole), name
    assert sum(bool(problems) for _, problems in found) > FILES / 2
