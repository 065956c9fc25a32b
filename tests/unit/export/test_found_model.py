"""Where an export looks for the model from which a run started."""

import json
from pathlib import Path

import pytest

from roll.export.source import model_source


def started(run: Path, folder: Path) -> None:
    run.mkdir(exist_ok=True)
    start = {"time": "", "command": "", "folder": str(folder), "host": "", "versions": {}, "commits": {}}
    with (run / "starts.jsonl").open("a") as file:
        file.write(json.dumps(start) + "\n")


def test_relative_model_is_found_where_the_run_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("first/base", "second/base", "base"):
        (tmp_path / name).mkdir(parents=True)
    assert model_source("base", tmp_path / "copy") == str(tmp_path / "base"), (
        "a run of an earlier version records no start"
    )
    started(tmp_path / "copy", tmp_path / "first")
    started(tmp_path / "copy", tmp_path / "second")
    assert model_source("base", tmp_path / "copy") == str(tmp_path / "second" / "base")
    assert model_source(str(tmp_path / "first/base"), tmp_path / "copy") == str(tmp_path / "first" / "base")
    assert model_source("Qwen/Qwen2.5-0.5B", tmp_path / "copy") == "Qwen/Qwen2.5-0.5B"
