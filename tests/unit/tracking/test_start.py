"""The record of how a run was started, in its output folder."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from roll.tracking.history import STARTS_FILE, commit_of, read_starts, write_start
from tests import limits


def test_a_secret_of_the_command_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["python", "-m", "roll.pipeline", "--config-name", "two words", "tracker_kwargs.wandb.api_key=hunter2"]
    monkeypatch.setattr("sys.orig_argv", command)
    write_start(tmp_path, lambda text: text.replace("hunter2", "***"))
    [start] = read_starts(tmp_path)
    assert start.command == "python -m roll.pipeline --config-name 'two words' 'tracker_kwargs.wandb.api_key=***'"
    assert "hunter2" not in (tmp_path / STARTS_FILE).read_text()


def test_lines_that_hold_no_start_are_left_out(tmp_path: Path) -> None:
    assert read_starts(tmp_path) == []
    write_start(tmp_path, str)
    [start] = read_starts(tmp_path)
    with (tmp_path / STARTS_FILE).open("a") as file:
        file.write(json.dumps({"time": "of another version"}) + '\n{"time": "torn')
    assert read_starts(tmp_path) == [start]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_commit_is_that_of_tracking_repository(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        named = [
            "git",
            "-C",
            str(tmp_path),
            "-c",
            "user.name=somebody",
            "-c",
            "user.email=somebody@example.com",
            "-c",
            "commit.gpgsign=false",
            *words,
        ]
        return subprocess.run(named, capture_output=True, text=True, timeout=limits.PROCESS, check=True).stdout.strip()

    git("init")
    assert commit_of(tmp_path, ".") == ""
    (tmp_path / "mine.py").write_text("1\n")
    git("add", "mine.py")
    git("commit", "-m", "one")
    commit = git("rev-parse", "HEAD")[:12]
    assert commit_of(tmp_path, "mine.py") == commit
    (tmp_path / "mine.py").write_text("2\n")
    assert commit_of(tmp_path, ".") == f"{commit}-dirty"
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / "theirs.py").touch()
    assert commit_of(tmp_path / "environment", "theirs.py") == "", (
        "a file that the repository does not track has no commit"
    )
