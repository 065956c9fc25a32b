"""Kill a save before every single one of its file system calls, and check that a reader finds a whole checkpoint each
time.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from roll.runs.checkpoint.manifest import verify_checkpoint
from roll.runs.checkpoint.store import CheckpointStore

CALLS = {
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.scandir",
    "os.listdir",
    "shutil.rmtree",
    "fcntl.flock",
}


def save(store: CheckpointStore, step: int, text: str) -> None:
    with store.writing(step, required=["model.pt"]) as folder:
        (folder / "model.pt").write_text(text)
        (folder / "optimizer").mkdir()
        for rank in range(2):
            (folder / "optimizer" / f"rank_{rank}.pt").write_text(text * 1000)


def run_and_die(folder: Path, work: Callable[[], None], calls_before_death: int) -> bool:
    """Run `work` in a forked child that kills itself before file system call `calls_before_death` + 1. Return whether
    `work` finished.
    """
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert (
            os.WIFEXITED(status)
            and os.WEXITSTATUS(status) == 0
            or os.WIFSIGNALED(status)
            and os.WTERMSIG(status) == signal.SIGKILL
        )
        return os.WIFEXITED(status)
    left = calls_before_death

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in CALLS:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    status = 1
    try:
        sys.addaudithook(count)
        work()
        status = 0
    finally:
        os._exit(status)


def read(path: Path) -> tuple[str, str]:
    verify_checkpoint(path)
    model = (path / "model.pt").read_text()
    assert all((path / "optimizer" / f"rank_{rank}.pt").read_text() == model * 1000 for rank in range(2)), (
        "a mix of two checkpoints"
    )
    return path.name, model


@pytest.mark.parametrize(
    ("step", "found"),
    [(3, {("step_2", "old"), ("step_3", "new")}), (2, {("step_2", "old"), ("step_2", "new"), ("step_1", "old")})],
    ids=["rotation", "swap"],
)
def test_kill_at_any_call_leaves_whole_checkpoint(tmp_path: Path, step: int, found: set[tuple[str, str]]) -> None:
    before = CheckpointStore(tmp_path / "before", keep=2)
    save(before, 1, "old")
    save(before, 2, "old")
    seen: list[tuple[str, str]] = []
    calls, ended = 0, False
    while not ended:
        store = CheckpointStore(shutil.copytree(before.folder, tmp_path / str(calls)), keep=2)
        ended = run_and_die(store.folder, lambda store=store: save(store, step, "new"), calls)

        valid = [path for path in store.folder.iterdir() if path.name.startswith("step_")]
        for path in valid:
            read(path)
        latest = store.latest()
        assert latest is not None
        seen.append(read(latest))

        store.clean()
        assert {path.name for path in store.folder.iterdir()} <= {".lock", "step_1", "step_2", "step_3"}, (
            "a leftover survived clean()"
        )
        after = store.resolve("auto")
        assert after is not None and read(after) in found - {("step_1", "old")}, "clean() lost the newest checkpoint"
        save(store, step + 1, "next")
        assert store.latest() == store.folder / f"step_{step + 1}"
        calls += 1
    assert seen[-1] == (f"step_{step}", "new")
    assert calls > 40, "too few kills to mean anything"
    assert set(seen) == found


def test_kill_in_first_save_leaves_nothing_or_all(tmp_path: Path) -> None:
    outcomes = set()
    calls, ended = 0, False
    while not ended:
        store = CheckpointStore(tmp_path / str(calls), keep=1)
        ended = run_and_die(store.folder, lambda store=store: save(store, 1, "new"), calls)
        store.clean()
        latest = store.resolve("auto")
        outcomes.add(None if latest is None else read(latest))
        assert not store.folder.exists() or {path.name for path in store.folder.iterdir()} <= {".lock", "step_1"}
        calls += 1
    assert outcomes == {None, ("step_1", "new")}


def test_kill_during_cleaning_is_cleaned_later(tmp_path: Path) -> None:
    calls, ended = 0, False
    while not ended:
        store = CheckpointStore(tmp_path / str(calls), keep=1)
        save(store, 1, "old")
        (store.folder / "step_1").rename(store.folder / f".step_1.replaced-{'a' * 32}")
        (store.folder / f".step_2.partial-{'b' * 32}" / "optimizer").mkdir(parents=True)
        (store.folder / f".step_2.partial-{'b' * 32}" / "optimizer" / "rank_0.pt").touch()
        ended = run_and_die(store.folder, store.clean, calls)
        store.clean()
        assert {path.name for path in store.folder.iterdir()} == {".lock", "step_1"}
        assert store.resolve("auto") == store.folder / "step_1"
        calls += 1
    assert calls > 5
