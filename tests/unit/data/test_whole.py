"""Truncated or altered files, rows with repeated keys, and overlong texts: nothing is lost or changed silently."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from roll.config.schema.model import DataConfig
from roll.data import tables
from roll.data.json_text import RepeatedKey, items, parsed
from roll.data.prompts import prepare_prompts
from roll.data.rows import RowFault, read_row
from roll.data.sources import RawRow, find_sources
from roll.data.tables import PREPARED, Preparation, Texts, cut_of
from roll.errors import DataError
from tests.faults import coded

COLUMNS = DataConfig.model_validate({"file_name": "rows.jsonl", "template": "raw", "prompt": "prompt"})


def rows_of(path: Path) -> list[RawRow]:
    return list(find_sources(str(path), "train")[0].rows())


def stream(path: Path, batches: int = 4) -> list[int]:
    """Write an Arrow stream of `batches` batches of 10 rows. Return the offset in bytes at which each batch ends."""
    table = pyarrow.table({"prompt": [str(number) for number in range(10 * batches)]})
    ends = []
    with path.open("wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=10):
            writer.write_batch(batch)
            ends.append(file.tell())
    return ends


@pytest.mark.parametrize("left", [0, 1, 2, 4])
def test_arrow_stream_cut_between_batches_is_refused(tmp_path: Path, left: int) -> None:
    ends = stream(path := tmp_path / "rows.arrow")
    assert len(rows_of(path)) == 40
    whole = path.read_bytes()
    path.write_bytes(whole[: ends[left - 1] if left else ends[0] - (ends[1] - ends[0])])
    with pytest.raises(DataError, match=r"arrow file: .*\n.* complete file") as caught:
        rows_of(path)
    assert coded(caught.value.faults) == [("unreadable", str(path))]


def test_two_arrow_streams_in_one_file_are_refused(tmp_path: Path) -> None:
    stream(path := tmp_path / "rows.arrow")
    path.write_bytes(2 * path.read_bytes())
    with pytest.raises(DataError, match="[0-9]+ bytes after its end-of-stream") as caught:
        rows_of(path)
    assert coded(caught.value.faults) == [("unreadable", str(path))]


def test_saved_set_with_cut_file_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    datasets.Dataset.from_list([{"prompt": str(number)} for number in range(40)]).save_to_disk(folder)
    (file,) = folder.glob("*.arrow")
    ends = stream(file)
    assert len(rows_of(folder)) == 40
    file.write_bytes(file.read_bytes()[: ends[1]])
    with pytest.raises(DataError, match="between two batches") as caught:
        rows_of(folder)
    assert coded(caught.value.faults) == [("unreadable", str(folder))]


def test_a_parquet_page_that_was_altered_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"prompt": [f"prompt {number}" for number in range(1000)]})
    pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    whole = bytearray(path.read_bytes())
    whole[whole.index(b"prompt 500")] ^= 1
    path.write_bytes(bytes(whole))
    with pytest.raises(DataError, match="parquet file: .*CRC") as caught:
        rows_of(path)
    assert coded(caught.value.faults) == [("unreadable", str(path))]


@pytest.mark.parametrize("in_array", [False, True])
def test_duplicate_key_is_fault_of_its_row(tmp_path: Path, in_array: bool) -> None:
    lines = ['{"a": 1}', '{"a": 1, "b": 2, "a": 3}', '{"a": {"b": [{"c": 1, "c": 1}]}}', '{"a": "b", "b": "a"}']
    path = tmp_path / "rows.jsonl"
    path.write_text(f" [{', '.join(lines)}]\n" if in_array else "\n".join(lines))
    found = rows_of(path)
    assert [row.number for row in found] == [1, 2, 3, 4]
    assert [re.findall(r"key '(\w)' more than once", row.problem) for row in found] == [[], ["a"], ["c"], []]
    assert not found[0].problem and not found[3].problem
    assert json.loads(found[3].text) == {"a": "b", "b": "a"}


def test_duplicate_key_in_json_text_is_fault() -> None:
    with pytest.raises(RowFault, match="'assert_code' more than once"):
        read_row({"test_cases": '[{"assert_code": "a", "assert_code": "b"}]'}, COLUMNS)


@pytest.mark.parametrize(
    "text", ["[]", " [ ] ", "[1]", '[[], {}, null,\n\t"]", -1.5e3 ]', '[{"a": [1, 2]}, {"b": {}}]']
)
def test_array_items_equal_those_of_json(text: str) -> None:
    assert list(items(text)) == json.loads(text)
    assert parsed(text) == json.loads(text)


@pytest.mark.parametrize(
    "text", ["", "[", "[1", "[1,", "[1,]", "[1 2]", "[1],", "[1]]", "[,1]", "{}", "[{]", '["a]', "[" * 100000]
)
def test_an_array_that_is_not_whole_is_refused(text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        list(items(text))


def test_a_repeated_key_hides_nothing_behind_it() -> None:
    first, second = items('[{"a": {"b": 1, "b": 2}}, 7]')
    assert isinstance(first, RepeatedKey) and second == 7


class Counting:
    """Tokenizer with one token for every four characters. It records the lengths of the texts that it receives."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, texts: Sequence[str], **options: Any) -> dict[str, list[list[int]]]:
        self.lengths += [len(text) for text in texts]
        return {"input_ids": [[0] * (len(text) // 4) for text in texts]}


def prepared(text: str, cut: int | None) -> tuple[int, int]:
    """Return the number of tokens of a prompt, and the length of the longest text that was tokenised for it."""
    counting = Counting()
    preparation = Preparation(lambda row: Texts(row["prompt"]), counting, False, COLUMNS, cut)  # type: ignore[arg-type]
    batch = {"file": [0], "number": [1], "row": [json.dumps({"prompt": text})], "problem": [""]}
    record = preparation(batch)
    assert set(record) == set(PREPARED)
    return record["prompt_tokens"][0], max(counting.lengths)


def test_a_text_without_end_is_not_tokenised_whole() -> None:
    cut = cut_of(1024)
    assert prepared("a" * 10 * cut, cut) == (cut // 4, cut)
    assert prepared("a" * cut, cut) == (cut // 4, cut)
    assert prepared("a" * 10 * cut, None) == (10 * cut // 4, 10 * cut)


def test_long_text_of_few_tokens_is_tokenised_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "CHARACTERS_OF_TOKEN", 2)
    assert prepared("a" * 100, 40) == (25, 100)


@pytest.mark.parametrize(
    ("limit", "cut"), [(1, 1 << 20), (16384, 1 << 20), (16385, 1 << 21), (32768, 1 << 21), (1 << 20, 1 << 26)]
)
def test_a_cut_leaves_more_tokens_than_the_limit(limit: int, cut: int) -> None:
    assert cut_of(limit) == cut
    assert cut // tables.CHARACTERS_OF_TOKEN >= limit


def test_endless_prompt_is_dropped_and_counted(
    write_jsonl: Callable[..., str],
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    one_domain: dict,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables, "SHORTEST_CUT", 1 << 12)
    file = write_jsonl([{"prompt": "ab " * (1 << 20)}, {"prompt": "What is one?"}])
    prompts = prepare_prompts(
        COLUMNS.model_copy(update={"file_name": file}), tokenizer, 64, one_domain, tmp_path / "cache"
    )
    assert (len(prompts), prompts.too_long) == (1, {file: 1})
