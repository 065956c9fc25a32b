"""The container of the rows changes nothing: each kind of file gives the rows that JSON Lines gives."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from datasets.table import InMemoryTable
from transformers import PreTrainedTokenizerFast

from roll.config.schema.model import DataConfig
from roll.data.examples import LengthLimits, prepare_examples
from roll.data.prompts import prepare_prompts
from roll.data.sources import RawRow, find_sources
from roll.errors import DataError
from tests.unit.data.formats import FORMATS, make_tokenizer


def raw(path: Path, split: str = "train") -> list[RawRow]:
    return [row for source in find_sources(str(path), split) for row in source.rows()]


def read(path: Path) -> list[Any]:
    return [json.loads(row.text) if not row.problem else row.problem for row in raw(path)]


def parquet_of(path: Path, table: pyarrow.Table) -> Path:
    pyarrow.parquet.write_table(table, path)
    return path


def write_jsonl(folder: Path, rows: Sequence[dict]) -> Path:
    (path := folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


def write_parquet(folder: Path, rows: Sequence[dict]) -> Path:
    return parquet_of(folder / "rows.parquet", pyarrow.Table.from_pylist(list(map(dict, rows)), _schema(rows)))


def write_arrow(folder: Path, rows: Sequence[dict]) -> Path:
    table = pyarrow.Table.from_pylist(list(rows), _schema(rows))
    with pyarrow.ipc.new_stream(str(path := folder / "rows.arrow"), table.schema) as file:
        file.write_table(table)
    return path


def write_saved(folder: Path, rows: Sequence[dict]) -> Path:
    table = InMemoryTable(pyarrow.Table.from_pylist(list(rows), _schema(rows)))
    datasets.Dataset(table).save_to_disk(path := folder / "saved")
    return path


def _schema(rows: Sequence[dict]) -> pyarrow.Schema:
    columns = {key: None for row in rows for key in row}
    arrays = {key: pyarrow.array([row.get(key) for row in rows]) for key in columns}
    return pyarrow.schema([(key, array.type) for key, array in arrays.items()])


COLUMNAR: list[Callable[[Path, Sequence[dict]], Path]] = [write_parquet, write_arrow, write_saved]


def tool(name: str, **properties: dict) -> dict:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"{name}.", "parameters": parameters}}


def call(name: str, **arguments: Any) -> dict:
    return {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [
    {
        "messages": [
            {"role": "user", "content": "Look"},
            {"role": "assistant", "content": "", "tool_calls": [call("search", query="x")]},
        ],
        "tools": [tool("search", query={"type": "string"})],
        "ground_truth": {"func_name": "validate_no_commas"},
    },
    {
        "messages": [
            {"role": "system", "content": "Be brief.", "name": "host"},
            {"role": "user", "content": "Add"},
            {"role": "assistant", "content": "", "tool_calls": [call("add", a=1, b=2), call("now")]},
        ],
        "tools": [tool("add", a={"type": "integer", "minimum": 0}, b={"type": "integer"}), tool("now")],
        "ground_truth": {"func_name": "verify_keyword_frequency", "word": "a", "N": 1},
        "chat_template_kwargs": {"enable_thinking": False},
    },
]
NESTED = [
    {"ground_truth": {"a": [{"x": 1}, {"y": [None, 2]}]}, "test_cases": [{"stdin": "1"}, {"assert_code": "assert 1"}]},
    {"ground_truth": {"b": {"c": "", "d": []}}, "extra": [[{"k": "v"}], []]},
    {"ground_truth": {}, "test_cases": []},
]


@pytest.mark.parametrize("write", COLUMNAR)
@pytest.mark.parametrize("rows", [TOOLS, NESTED])
def test_columnar_rows_are_the_rows_of_json_lines(tmp_path: Path, write: Any, rows: list[dict]) -> None:
    assert read(write(tmp_path, rows)) == rows == read(write_jsonl(tmp_path, rows))


@pytest.mark.parametrize("write", COLUMNAR)
def test_tools_are_learnt_alike_from_every_container(tmp_path: Path, write: Any) -> None:
    tokenizer = make_tokenizer(FORMATS["qwen2.5"])
    found = []
    rows = [{key: value for key, value in row.items() if key != "chat_template_kwargs"} for row in TOOLS]
    for path in (write_jsonl(tmp_path, rows), write(tmp_path, rows)):
        data_args = DataConfig.model_validate({"file_name": str(path), "messages": "messages"})
        examples = prepare_examples(data_args, tokenizer, LengthLimits(999, 999), cache_folder=tmp_path / "cache")
        found.append([examples.example(index).sequences[0] for index in range(2)])
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.response_mask, other.response_mask)
    assert "null" not in str(tokenizer.decode(found[1][0].token_ids))


def test_written_nulls_of_json_lines_stay(tmp_path: Path) -> None:
    rows = [{"a": None, "b": {"c": None, "d": [None, {"e": None}]}}]
    assert read(write_jsonl(tmp_path, rows)) == rows


def test_null_elements_of_lists_stay_in_columnar_files(tmp_path: Path) -> None:
    rows = [{"a": [None, 1], "b": [{"c": 1}, None]}]
    assert read(write_parquet(tmp_path, rows)) == rows


def test_maps_are_objects_with_their_written_nulls(tmp_path: Path) -> None:
    kind = pyarrow.map_(
        pyarrow.string(), pyarrow.list_(pyarrow.struct([("x", pyarrow.int64()), ("y", pyarrow.int64())]))
    )
    array = pyarrow.array([[("a", [{"x": 1}]), ("b", None)], [], None], kind)
    assert read(parquet_of(tmp_path / "m.parquet", pyarrow.table({"m": array}))) == [
        {"m": {"a": [{"x": 1}], "b": None}},
        {"m": {}},
        {},
    ]


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (
            pyarrow.array([[(1, "a")]], pyarrow.map_(pyarrow.int64(), pyarrow.string())),
            "key 1 is not text",
        ),
        (
            pyarrow.array([[("a", 1), ("a", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
            "'a' more than once",
        ),
        (pyarrow.array([b"\xff"]), ": a bytes"),
        (pyarrow.array([[{"x": b"a"}]]), ": a bytes"),
        (pyarrow.array([1], pyarrow.duration("s")), ": a timedelta"),
        (pyarrow.array(["{"], pyarrow.json_()), "Expecting property name"),
        (pyarrow.array(['{"a": 1, "a": 2}'], pyarrow.json_()), "'a' more than once"),
    ],
)
def test_non_json_values_are_problems_of_their_row(tmp_path: Path, array: pyarrow.Array, problem: str) -> None:
    with pyarrow.ipc.new_stream(str(path := tmp_path / "rows.arrow"), pyarrow.schema([("v", array.type)])) as file:
        file.write_table(pyarrow.table({"v": array}))
    (row,) = raw(path)
    assert problem in row.problem and not row.text


@pytest.mark.parametrize(
    ("array", "value"),
    [
        (pyarrow.array(["007"]).dictionary_encode(), "007"),
        (pyarrow.array(["é" * 9], pyarrow.large_string()), "é" * 9),
        (pyarrow.array(["a"], pyarrow.string_view()), "a"),
        (pyarrow.array([0.1], pyarrow.float32()), 0.1),
        (pyarrow.array([0.1], pyarrow.float16()), 0.1),
        (pyarrow.array([0.1]), 0.1),
        (pyarrow.array([2**63], pyarrow.uint64()), 2**63),
        (pyarrow.array([True]), True),
        (pyarrow.array([[1.5]], pyarrow.list_(pyarrow.float32(), 1)), [1.5]),
        (pyarrow.array(['{"a": null, "b": [1]}'], pyarrow.json_()), {"a": None, "b": [1]}),
        (pyarrow.array([datetime(2026, 1, 2, 3, tzinfo=UTC)]), "2026-01-02T03:00:00+00:00"),
        (pyarrow.array(["0.10"]), "0.10"),
    ],
)
def test_a_value_of_arrow_is_the_same_value(tmp_path: Path, array: pyarrow.Array, value: Any) -> None:
    with pyarrow.ipc.new_stream(str(path := tmp_path / "rows.arrow"), pyarrow.schema([("v", array.type)])) as file:
        file.write_table(pyarrow.table({"v": array}))
    assert read(path) == [{"v": value}]


def test_json_features_of_saved_set_keep_nulls(tmp_path: Path) -> None:
    features = datasets.Features({"tools": datasets.List(datasets.Json())})
    rows = [{"tools": [{"a": None, "b": 1}]}]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "saved")
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    assert read(tmp_path / "saved") == read(tmp_path / "rows.parquet") == rows


def test_filtered_saved_set_keeps_order_of_rows(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list([{"n": number} for number in range(2500)])
    table.select(range(2400, 0, -2)).save_to_disk(tmp_path / "saved")
    assert [row["n"] for row in read(tmp_path / "saved")] == list(range(2400, 0, -2))
    assert [row.number for row in raw(tmp_path / "saved")] == list(range(1, 1201))


TEXTS = [
    "007",
    "1e3",
    "NaN",
    "None",
    "null",
    "",
    "0.10",
    "true",
    " 1 ",
    "1,234",
    'say "hi"',
    "two\nlines",
    "é",
    "#",
    "2026-01-02",
    "\\frac",
]


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t")])
def test_csv_values_stay_the_text_that_is_written(tmp_path: Path, suffix: str, delimiter: str) -> None:
    with (path := tmp_path / f"rows{suffix}").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([["ground_truth", "prompt"], *([text, "q"] for text in TEXTS)])
    assert read(path) == [{"ground_truth": text, "prompt": "q"} for text in TEXTS]


def test_csv_rows_are_numbered_by_their_first_line(tmp_path: Path) -> None:
    (path := tmp_path / "rows.csv").write_text('\ufeffa,b\r\n1,2\r\n"x\ny",3\r\n\r\n4,5\r\n6\r\n7,8,9\r\n', newline="")
    rows = raw(path)
    assert [(row.number, row.text) for row in rows[:3]] == [
        (2, '{"a": "1", "b": "2"}'),
        (3, '{"a": "x\\ny", "b": "3"}'),
        (6, '{"a": "4", "b": "5"}'),
    ]
    assert [row.number for row in rows[3:]] == [7, 8] and not any(row.text for row in rows[3:])
    assert ["has 1 values" in rows[3].problem, "has 3 values" in rows[4].problem] == [True, True]


def test_a_long_value_of_csv_is_read(tmp_path: Path) -> None:
    (path := tmp_path / "rows.csv").write_text("a\n" + "x" * 300_000)
    assert read(path) == [{"a": "x" * 300_000}]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a,a\n1,2", "each column once: 'a, a'"),
        (b"a,,b\n1,2,3", "each column once: 'a, , b'"),
        (b",a\n0,1", "index=False"),
        (b"", "each column once"),
        (b'a,b\n1,"2', "line 2: unexpected end"),
        (b'a,b\n1,"2"3\n', "line 2:"),
        (b"a\n\xff\n", "utf-8"),
    ],
)
def test_file_that_is_not_csv_is_fault(tmp_path: Path, content: bytes, problem: str) -> None:
    (path := tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(DataError) as caught:
        raw(path)
    (fault,) = caught.value.faults
    assert (fault.code, fault.place) == ("unreadable", str(path)) and problem in fault.problem


def test_prompts_are_equal_from_jsonl_parquet_and_csv(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, one_domain: dict
) -> None:
    rows = [{"prompt": f"What is {number}?", "answer": f"{number}.10", "tag": ""} for number in range(9)]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([list(rows[0]), *(row.values() for row in rows)])
    found = []
    for path in (write_jsonl(tmp_path, rows), write_parquet(tmp_path, rows), tmp_path / "rows.csv"):
        data_args = DataConfig.model_validate({"file_name": str(path), "template": "chatml", "prompt": "prompt"})
        prompts = prepare_prompts(data_args, tokenizer, 100, one_domain, tmp_path / "cache")
        found.append(
            [(prompts.prompt(index, 0).token_ids.tolist(), prompts.prompt(index, 0).row) for index in range(9)]
        )
    assert found[0] == found[1] == found[2]
