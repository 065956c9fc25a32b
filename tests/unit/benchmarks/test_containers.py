"""The comparison of containers and formats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import containers
from tests.unit.data.formats import FORMATS, make_tokenizer

ROWS = [{"q": 'How many, "x, y"?\nOne?', "a": "2\t3"}, {"q": "é?", "a": "#### 4"}]


def test_every_container_and_format_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert containers.compare(ROWS, "q", "a", make_tokenizer(FORMATS["qwen2.5"]), tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 * (3 + 3 * 2) + 1
    assert lines[-1].count(": identical") == 3


def test_a_container_that_changes_rows_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_less(rows: containers.Rows, path: Path) -> None:
        containers.write_json_lines([*rows][:1], path)

    fewer: dict[str, containers.Writer] = {".json": containers.write_json, ".jsonl": write_less}
    monkeypatch.setattr(containers, "WRITERS", fewer)
    assert not containers.compare(ROWS, "q", "a", make_tokenizer(FORMATS["qwen2.5"]), tmp_path)


def test_the_formats_hold_the_same_texts() -> None:
    def texts(value: object) -> list[str]:
        if isinstance(value, dict):
            return [text for key, one in value.items() if key not in ("role", "from", "type") for text in texts(one)]
        return (
            [value]
            if isinstance(value, str)
            else [text for one in value for text in texts(one)]
            if isinstance(value, Sequence)
            else []
        )

    for variant in containers.variants(ROWS, "q", "a"):
        assert [set(texts(row)) for row in variant.rows] == [set(row.values()) for row in ROWS]
