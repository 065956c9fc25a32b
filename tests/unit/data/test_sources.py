"""Sources of rows: files of every kind, folders, saved data sets and the Hub, and the faults of each."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from pathlib import Path

import datasets
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from datasets.arrow_writer import ArrowWriter

from roll.config.load.on_disk import DATA_ENDINGS
from roll.data.sources import SUFFIXES, find_sources
from roll.errors import DataError
from tests.faults import coded

ROWS = [{"prompt": "one", "answer": 1}, {"prompt": "two", "answer": 2}]


def read(*names: str, split: str = "train") -> list[tuple[str, int, dict]]:
    return [
        (source.name, row.number, json.loads(row.text))
        for source in find_sources(names, split)
        for row in source.rows()
    ]


def write_all_kinds(folder: Path) -> list[str]:
    (folder / "a.json").write_text(json.dumps(ROWS, indent=2))
    (folder / "b.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    datasets.Dataset.from_list(ROWS).to_parquet(folder / "c.parquet")
    with ArrowWriter(path=str(folder / "d.arrow")) as writer:
        for row in ROWS:
            writer.write(row)
        writer.finalize()
    return [str(folder / name) for name in ("a.json", "b.jsonl", "c.parquet", "d.arrow")]


@pytest.mark.parametrize("kind", range(4))
def test_every_file_kind_yields_rows_with_numbers(tmp_path: Path, kind: int) -> None:
    name = write_all_kinds(tmp_path)[kind]
    assert read(name) == [(name, 1, ROWS[0]), (name, 2, ROWS[1])]


def test_a_folder_gives_its_files_sorted(tmp_path: Path) -> None:
    names = write_all_kinds(tmp_path)
    (tmp_path / "README.md").write_text("not rows")
    assert [name for name, number, _ in read(str(tmp_path)) if number == 1] == names


def test_unsupported_files_of_folder_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.jsonl", "b.jsonl.gz", "c.csv.zst", "README.md"):
        (tmp_path / name).write_text(json.dumps(ROWS[0]))
    assert [Path(name).name for name, *_ in read(str(tmp_path))] == ["a.jsonl"]
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path}: ") and line.endswith(": b.jsonl.gz, c.csv.zst")


@pytest.mark.parametrize("names", [("math_train", "code"), ("training_a", "b", "dev_c"), ("math", "evaluation_set")])
def test_names_of_which_some_tell_a_split(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(ROWS[0]))
    with pytest.raises(DataError) as caught:
        find_sources(str(tmp_path), "train")
    assert coded(caught.value.faults) == [("contradiction", str(tmp_path))]


def test_suffixes_in_capitals_and_hidden_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.JSONL", "b.ndjson", ".c.jsonl", "d.txt", "e/.f/g.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(ROWS[0]))
    assert [Path(name).name for name, *_ in read(str(tmp_path))] == ["a.JSONL", "b.ndjson"]
    (line,) = caplog.messages
    assert line.endswith(": .c.jsonl, d.txt, e/.f/g.jsonl")


def test_files_of_other_splits_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("train_a", "test_a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(ROWS[0]))
    assert len(read(str(tmp_path))) == 1
    assert caplog.messages[0].endswith(": test_a.jsonl")


@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("checksums", [True, False])
def test_parquet_without_checksums_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, checksums: bool, dictionary: bool
) -> None:
    table = pyarrow.Table.from_pylist(ROWS * 300)
    for name in "ab":
        path = tmp_path / f"{name}.parquet"
        pyarrow.parquet.write_table(table, path, write_page_checksum=checksums, use_dictionary=dictionary)
    find_sources(str(tmp_path), "train")
    assert len(caplog.messages) == (0 if checksums else 1)


def test_a_relative_folder_names_relative_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text(json.dumps(ROWS[0]))
    monkeypatch.chdir(tmp_path)
    assert read("rows") == [("rows/a.jsonl", 1, ROWS[0])]


def test_split_picks_among_the_files_of_a_folder(tmp_path: Path) -> None:
    for number, split in enumerate(("train", "test")):
        (tmp_path / f"{split}-0.jsonl").write_text(json.dumps(ROWS[number]))
    assert [row for *_, row in read(str(tmp_path), split="test")] == [ROWS[1]]
    with pytest.raises(DataError, match="'dev'.*\n.*: test, train") as caught:
        find_sources(str(tmp_path), "dev")
    assert coded(caught.value.faults) == [("not_found", str(tmp_path))]


def test_a_saved_data_set_and_a_saved_dict(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "single")
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(tmp_path / "several")
    assert [row for *_, row in read(str(tmp_path / "single"))] == ROWS
    assert [row for *_, row in read(str(tmp_path / "several"), split="test")] == ROWS[1:]
    with pytest.raises(DataError, match="'dev'.*\n.*: test, train") as caught:
        find_sources(str(tmp_path / "several"), "dev")
    assert coded(caught.value.faults) == [("not_found", str(tmp_path / "several"))]


def test_empty_split_is_reported_and_others_are_read(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": table, "test": table.select([])}).save_to_disk(tmp_path)
    assert [row for *_, row in read(str(tmp_path))] == ROWS
    with pytest.raises(DataError) as caught:
        find_sources(str(tmp_path), "test")
    assert coded(caught.value.faults) == [("empty", str(tmp_path / "test"))]


def test_a_parquet_file_without_rows_among_others(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(tmp_path / "part-0.parquet")
    table.select([]).to_parquet(tmp_path / "part-1.parquet")
    assert [row for *_, row in read(str(tmp_path))] == ROWS


@pytest.mark.parametrize("kind", range(4))
def test_names_with_the_signs_of_patterns_are_names(tmp_path: Path, kind: int) -> None:
    folder = tmp_path / "run[1]*"
    folder.mkdir()
    name = Path(write_all_kinds(folder)[kind])
    odd = name.rename(name.with_stem("rows[0]?"))
    assert [row for *_, row in read(str(odd))] == ROWS
    assert str(odd) in {found for found, *_ in read(str(folder))}


def test_both_formats_of_arrow_are_read(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    for number, write in enumerate((pyarrow.ipc.new_stream, pyarrow.ipc.new_file)):
        with write(str(tmp_path / f"{number}.arrow"), table.schema) as file:
            file.write_table(table, max_chunksize=1)
        assert [row for *_, row in read(str(tmp_path / f"{number}.arrow"))] == ROWS


def test_hub_name_loads_with_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*names: str | None, **options: str) -> datasets.Dataset:
        asked.append((names, options))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read("owner/set:main", split="test") == [("owner/set:main", 1, ROWS[0]), ("owner/set:main", 2, ROWS[1])]
    assert asked == [(("owner/set", "main"), {"split": "test"})]
    assert len(read("owner/set:Data/rows.jsonl", split="test")) == 2
    assert asked[1:] == [(("owner/set",), {"data_files": "Data/rows.jsonl", "split": "train"})]


def test_hub_failure_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*names: str | None, **options: str) -> datasets.Dataset:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match="ConnectionError: no route") as caught:
        find_sources("owner/set", "train")
    assert coded(caught.value.faults) == [("unreadable", "owner/set")]


def test_all_missing_sources_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "rows.xlsx").write_text("a,b")
    (tmp_path / "empty").mkdir()
    absent, other, empty = (str(tmp_path / name) for name in ("absent.jsonl", "rows.xlsx", "empty"))
    with pytest.raises(DataError, match="'.xlsx'") as caught:
        find_sources([absent, other, empty], "train")
    assert coded(caught.value.faults) == [("not_found", absent), ("unreadable", other), ("unreadable", empty)]


def test_invalid_lines_carry_problem_and_line_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"a": \n[1]\n{"a": "\xff"}\n"x"\n')
    rows = list(find_sources(str(path), "train")[0].rows())
    assert [row.number for row in rows] == [1, 3, 4, 5, 6]
    assert rows[0].problem == "" and json.loads(rows[0].text) == {"a": 1}
    assert rows[1].problem.startswith("is not JSON")
    assert rows[2].problem.endswith(" a list")
    assert "utf-8" in rows[3].problem
    assert rows[4].problem.endswith(" a str")


def test_json_array_keeps_differing_rows_and_bad_items(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"answer": 1}, {"answer": "2026-01-02", "more": {"x": [1]}}, 7]')
    rows = list(find_sources(str(path), "train")[0].rows())
    assert [json.loads(row.text) for row in rows[:2]] == [{"answer": 1}, {"answer": "2026-01-02", "more": {"x": [1]}}]
    assert rows[2].problem.endswith(" a int")


@pytest.mark.parametrize("name", ["broken.json", "broken.parquet", "broken.arrow"])
def test_a_broken_file_is_a_fault(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"[{]" if name.endswith("json") else b"PAR1 nothing of the sort")
    with pytest.raises(DataError) as caught:
        list(find_sources(str(path), "train")[0].rows())
    assert coded(caught.value.faults) == [("unreadable", str(path))]


def test_unreadable_file_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("{}")
    (source,) = find_sources(str(path), "train")

    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match="json file: .*Permission denied") as caught:
        list(source.rows())
    assert coded(caught.value.faults) == [("unreadable", str(path))]


def test_dates_become_text_and_bytes_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([{"when": date(2026, 1, 2)}]).to_parquet(path)
    assert read(str(path)) == [(str(path), 1, {"when": "2026-01-02"})]
    datasets.Dataset.from_list([{"image": b"\x00"}]).to_parquet(path)
    (row,) = find_sources(str(path), "train")[0].rows()
    assert "JSON" in row.problem and row.problem.endswith(": a bytes")


def test_decimals_are_numbers_as_far_as_numbers_go(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    values = [Decimal("1.50"), Decimal("0.10"), Decimal("12345678901234567890.12")]
    pyarrow.parquet.write_table(pyarrow.table({"answer": pyarrow.array(values, pyarrow.decimal128(30, 2))}), path)
    assert [row["answer"] for *_, row in read(str(path))] == [1.5, 0.1, "12345678901234567890.12"]


def test_the_stamp_changes_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}')
    before = find_sources(str(path), "train")[0].stamp
    assert find_sources(str(path), "train")[0].stamp == before
    path.write_text('{"a": 12}')
    assert find_sources(str(path), "train")[0].stamp != before


def test_a_plan_accepts_every_kind_of_data_file() -> None:
    assert set(DATA_ENDINGS) == set(SUFFIXES)
