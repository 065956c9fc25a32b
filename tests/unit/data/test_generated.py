"""Generated tasks as rows, read from a file of them; and generated, where the package is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.data.prepare import GeneratedRequest, main, write_generated
from roll.errors import DataError


def tasks(file: Path, count: int, different: int) -> Path:
    """Write tasks, of which later ones repeat earlier ones."""
    rows = [
        {"question": f"{n % different} + 1 =", "answer": n % different + 1, "metadata": {"n": n}} for n in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def request(source: Path | None, output: Path, rows: int = 20, repeats: bool = False) -> GeneratedRequest:
    return GeneratedRequest("chain_sum", {}, str(source) if source else None, output, rows, 8, 42, repeats)


def test_no_task_is_in_two_files(tmp_path: Path) -> None:
    written = write_generated(request(tasks(tmp_path / "tasks.jsonl", 2000, 600), tmp_path / "out"))
    assert written == {"train.jsonl": 20, "validation.jsonl": 8, "test.jsonl": 512}
    rows = [json.loads(line) for name in written for line in (tmp_path / "out" / name).read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) == 540
    assert all(int(row["ground_truth"]) == int(row["prompt"].split()[0]) + 1 for row in rows)
    assert {row["tag"] for row in rows} == {"chain_sum"} and json.loads(rows[0]["metadata"])["n"] == 520


def test_too_few_different_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="530 different tasks were found"):
        write_generated(request(tasks(tmp_path / "tasks.jsonl", 2000, 530), tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_tasks_may_repeat_as_they_are_drawn(tmp_path: Path) -> None:
    source = tasks(tmp_path / "tasks.jsonl", 540, 100)
    written = write_generated(request(source, tmp_path / "out", repeats=True))
    rows = [
        json.loads(line) for name in reversed(written) for line in (tmp_path / "out" / name).read_text().splitlines()
    ]
    assert [json.loads(row["metadata"])["n"] for row in rows] == list(range(540))
    with pytest.raises(DataError, match="540 tasks were found"):
        write_generated(request(source, tmp_path / "more", rows=21, repeats=True))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(DataError, match="reasoning-gym~=0"):
        write_generated(request(None, tmp_path / "out"))


@pytest.mark.parametrize(
    "words",
    [
        ["humaneval", "--validation", "5"],
        ["humaneval", "--validation", "0"],
        ["gsm8k", "--rows", "5"],
        ["gsm8k", "--settings", "max_digits=2"],
        ["roll", "--validation", "5"],
        ["gsm8k", "--repeats"],
    ],
)
def test_an_option_of_another_set_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert words[1] in capsys.readouterr().err


def test_the_package_generates_the_same_tasks_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("reasoning_gym")
    words = ["reasoning_gym:chain_sum", "--settings", "max_digits=2", "--rows", "20", "--validation", "8", "--output"]
    for name in ("one", "two"):
        assert main([*words, str(tmp_path / name)]) == 0
    assert (tmp_path / "one" / "train.jsonl").read_bytes() == (tmp_path / "two" / "train.jsonl").read_bytes()
    assert main(["reasoning_gym:chain_sam", "--output", str(tmp_path / "three")]) == 2
    assert "did you mean 'chain_sum'?" in capsys.readouterr().err
