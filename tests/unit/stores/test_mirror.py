"""The thread that uploads, with a store in a folder."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from roll.errors import CheckpointError, RollError
from roll.runs.checkpoint.store import CHECKPOINTS, CheckpointStore
from roll.runs.checkpoint.stored import StoredCheckpoints
from roll.runs.checkpointer import EXPORT, EXPORT_MARK
from roll.runs.stored import mirror
from roll.runs.stored.mirror import Mirror
from roll.runs.stored.records import UPLOADS, Records
from roll.stores.store import Store
from tests import limits


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store((tmp_path / "store").as_uri())


def write(folder: Path, names: tuple[str, ...], text: str = "text") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_checkpoint_is_uploaded_as_submitted(tmp_path: Path, store: Store) -> None:
    folder, stored = tmp_path / "run", StoredCheckpoints(store, keep=1)
    local = CheckpointStore(folder / CHECKPOINTS, keep=1)
    with local.writing(2) as partial:
        write(partial, ("weights",), "first")
    uploader = Mirror(folder, stored, Records(store, folder), None, limits.END)
    uploader.submit(folder / CHECKPOINTS / "step_2")
    with local.writing(2) as partial:
        write(partial, ("weights",), "other")
    with uploader:
        uploader.settle()
    assert store.read(f"{CHECKPOINTS}/step_2.1/weights") == b"first", "the links keep what was submitted"
    assert not any((folder / UPLOADS).iterdir())


def test_records_follow_the_local_folder(tmp_path: Path, store: Store) -> None:
    folder = tmp_path / "run"
    mark = f"{EXPORT}/{EXPORT_MARK}"
    write(folder, ("metrics.jsonl", "end.json", f"{EXPORT}/weights", mark, "logs/ray/raylet.out", "roll-1-x/partial"))
    records = Records(store, folder)
    records.push()
    assert store.sizes().keys() == {"metrics.jsonl", "end.json", f"{EXPORT}/weights", mark}
    (folder / "end.json").unlink()
    write(folder, ("metrics.jsonl",), "longer text")
    store.write("of_the_user", b"")
    records.push()
    assert store.read("metrics.jsonl") == b"longer text" and store.read("end.json") is None
    assert store.read("of_the_user") == b"", "what came from elsewhere is left alone"


def test_export_without_mark_is_not_brought(tmp_path: Path, store: Store) -> None:
    store.write("metrics.jsonl", b"text")
    store.write(f"{EXPORT}/weights", b"half")
    (tmp_path / "here").mkdir()
    Records(store, tmp_path / "here").bring()
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["metrics.jsonl"]


def test_run_that_was_replaced_uploads_nothing(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced() -> None:
        raise CheckpointError("held by another")

    monkeypatch.setattr(mirror, "PATIENCE", limits.NONE)
    write(tmp_path / "run", ("metrics.jsonl",))
    stored = StoredCheckpoints(store, keep=1, check=replaced)
    with Mirror(tmp_path / "run", stored, Records(store, tmp_path / "run"), None, limits.END) as uploader:
        with pytest.raises(RollError, match="held by another"):
            uploader.settle()
        assert uploader.has_given_up
    assert store.sizes() == {}


def test_end_waits_only_so_long_for_slow_store(tmp_path: Path, store: Store) -> None:
    answers = threading.Event()

    def slow() -> None:
        answers.wait(limits.CALL)

    write(tmp_path / "run", ("metrics.jsonl",))
    stored = StoredCheckpoints(store, keep=1, check=slow)
    with Mirror(tmp_path / "run", stored, Records(store, tmp_path / "run"), None, limits.NONE) as uploader:
        with pytest.raises(RollError, match="deadlines.upload: 0"):
            uploader.settle()
        answers.set()
    assert uploader.has_given_up
