"""The checkpoint store: atomic saves, rotation, damaged checkpoints, cleaning up, and locks."""

import fcntl
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

from roll.errors import CheckpointError, ConfigError, WorkerFailed
from roll.runs.checkpoint.manifest import MANIFEST, read_manifest
from roll.runs.checkpoint.store import CheckpointStore


def save(store: CheckpointStore, step: int, text: str = "weights") -> Path:
    with store.writing(step, required=["model.pt"]) as folder:
        (folder / "model.pt").write_text(text)
        (folder / "optimizer").mkdir()
        (folder / "optimizer" / "rank_0.pt").write_text(text * 100)
    return store.folder / f"step_{step}"


def names(store: CheckpointStore) -> set[str]:
    return {path.name for path in store.folder.iterdir()} - {".lock"}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints", keep=2)


def test_checkpoint_appears_only_when_complete(store: CheckpointStore) -> None:
    assert store.latest() is None
    with store.writing(4) as folder:
        (folder / "model.pt").write_text("weights")
        assert store.latest() is None
        assert folder.name.startswith(".step_4.partial-")
    assert names(store) == {"step_4"}
    assert store.latest() == store.folder / "step_4"
    assert read_manifest(store.folder / "step_4").step == 4


def test_an_exception_removes_the_partial_folder_and_passes(store: CheckpointStore) -> None:
    save(store, 1)
    with pytest.raises(KeyboardInterrupt), store.writing(2) as folder:
        (folder / "model.pt").write_text("half")
        raise KeyboardInterrupt
    assert names(store) == {"step_1"}


def test_a_missing_required_file_leaves_no_checkpoint(store: CheckpointStore) -> None:
    save(store, 1)
    with (
        pytest.raises(CheckpointError, match=r"'loop\.json' is missing"),
        store.writing(2, required=["loop.json"]) as folder,
    ):
        (folder / "model.pt").write_text("weights")
    assert names(store) == {"step_1"}


def test_full_disk_raises_and_leaves_no_checkpoint(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step_2: .*No space left"), store.writing(2) as folder:
        (folder / "model.pt").write_text("weights")
        monkeypatch.setattr(os, "fsync", full)
    assert names(store) == {"step_1"}


def test_full_disk_hidden_by_torch_is_reported(store: CheckpointStore) -> None:
    save(store, 1)
    with pytest.raises(RuntimeError) as failed:
        torch.save(torch.zeros(1 << 20), "/dev/full")
    with pytest.raises(CheckpointError, match=r"step_2: .*\(\d+ MiB of .*: actor_train rank 1: "), store.writing(2):
        raise WorkerFailed("actor_train", 1, str(failed.value))
    assert names(store) == {"step_1"}


def test_full_disk_at_loop_file_is_reported(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match=r"step_1: .*No space left"), store.writing(1):
        Path("/dev/full").write_text("state")
    assert names(store) == set()


def test_oldest_checkpoint_goes_after_newest_is_named(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 9)
    save(store, 10)
    seen: list[tuple[str, str]] = []
    rename = os.rename

    def record(source: Path, target: Path) -> None:
        seen.append((source.name.split("-")[0], target.name.split("-")[0]))
        rename(source, target)

    monkeypatch.setattr(os, "rename", record)
    save(store, 11)
    assert seen == [(".step_11.partial", "step_11"), ("step_9", ".step_9.removed")]
    assert names(store) == {"step_10", "step_11"}


def test_checkpoint_is_synced_to_disk_before_rename(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()
    at_rename: list[set[str]] = []
    fsync, rename = os.fsync, os.rename

    def record_sync(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        at_rename.append({os.path.relpath(path, source) for path in synced})
        synced.clear()
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    save(store, 1)
    assert at_rename[0] >= {"model.pt", "optimizer/rank_0.pt", "optimizer", MANIFEST, "."}
    assert synced == {str(store.folder)}, "the rename itself was not synced to the disk"


def test_existing_checkpoint_of_same_step_is_replaced(store: CheckpointStore) -> None:
    save(store, 5, "old")
    (store.folder / "step_5" / "stray").write_text("of the old run")
    path = save(store, 5, "new")
    assert (path / "model.pt").read_text() == "new"
    assert not (path / "stray").exists()
    assert names(store) == {"step_5"}


def test_newest_means_last_written_also_after_going_back(store: CheckpointStore) -> None:
    save(store, 90)
    save(store, 100)
    save(store, 10)
    assert store.latest() == store.folder / "step_10"
    assert names(store) == {"step_100", "step_10"}
    save(store, 20)
    assert store.latest() == store.folder / "step_20"
    assert names(store) == {"step_10", "step_20"}


def test_a_broken_checkpoint_is_passed_over_and_reported(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    good, broken = save(store, 1), save(store, 2)
    (broken / "model.pt").write_text("short")
    with caplog.at_level(logging.WARNING):
        assert store.latest() == good
    assert f"{broken}/model.pt: it has 5 bytes, but 7 " in caplog.text
    save(store, 3)
    assert names(store) == {"step_1", "step_2", "step_3"}, (
        "rotation must count only whole checkpoints, and never delete a broken one"
    )


def test_a_renamed_checkpoint_is_refused(store: CheckpointStore) -> None:
    renamed = save(store, 28).rename(store.folder / "step_40")
    with pytest.raises(CheckpointError, match="step_28"):
        store.resolve(str(renamed))
    assert store.latest() is None


def test_deleted_checkpoints_are_reported_once(store: CheckpointStore, caplog: pytest.LogCaptureFixture) -> None:
    path = save(store, 1)
    shutil.rmtree(path)
    save(store, 2)
    save(store, 3)
    assert [str(path) in message for message in caplog.messages] == [True]


def test_auto_resume_skips_checkpoints_with_wrong_contents(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    good, broken = save(store, 1), save(store, 2)
    (broken / "model.pt").write_text("WEIGHTS")
    assert store.latest() == broken, "latest() compares only sizes"
    assert store.resolve("auto") == good
    assert "model.pt differ" in caplog.text
    (good / "model.pt").unlink()
    with pytest.raises(CheckpointError, match="set resume_from_checkpoint=never to start over"):
        store.resolve("auto")


def test_resolve_without_checkpoints(store: CheckpointStore, tmp_path: Path) -> None:
    assert store.resolve("auto") is None
    assert store.resolve("never") is None
    path = save(store, 1)
    assert store.resolve("never") is None
    assert store.resolve("auto") == path
    assert store.resolve(str(path)) == path


def test_resolve_explains_a_path_that_is_no_checkpoint(store: CheckpointStore, tmp_path: Path) -> None:
    path = save(store, 1)
    with pytest.raises(ConfigError, match="no such folder") as raised:
        store.resolve(str(tmp_path / "step_7"))
    fault = raised.value.faults[0]
    assert fault.place == "resume_from_checkpoint" and str(path) in fault.remedy
    with pytest.raises(ConfigError, match=f"has no {MANIFEST}"):
        store.resolve(str(tmp_path))
    (path / "model.pt").write_text("WEIGHTS")
    with pytest.raises(CheckpointError, match="model.pt differ"):
        store.resolve(str(path))
    (path / "model.pt").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        store.resolve(str(path))


def test_cleaning_removes_partial_and_restores_removed_checkpoints(store: CheckpointStore) -> None:
    save(store, 1, "old")
    token = "0" * 32
    for name in (f".step_2.partial-{token}", f".step_0.removed-{token}", "notes"):
        (store.folder / name).mkdir()
        (store.folder / name / "file").touch()
    (store.folder / "step_1").rename(store.folder / f".step_1.replaced-{token}")
    store.clean()
    assert names(store) == {"step_1", "notes"}
    assert store.latest() == store.folder / "step_1"


def test_second_writer_of_a_folder_is_refused(store: CheckpointStore) -> None:
    other = CheckpointStore(store.folder, keep=1)
    with store.writing(1) as folder:
        (folder / "model.pt").write_text("weights")
        with pytest.raises(CheckpointError, match="another run"), other.writing(2):
            pass
        with pytest.raises(CheckpointError, match="another run"):
            other.clean()
    assert names(store) == {"step_1"}


def test_store_holder_excludes_other_writers_but_not_readers(store: CheckpointStore) -> None:
    other = CheckpointStore(store.folder, keep=1)
    with store.held():
        save(store, 1)
        store.clean()
        for intrude in (other.held(), other.writing(2)):
            with pytest.raises(CheckpointError, match="another run"), intrude:
                pass
        with pytest.raises(CheckpointError, match="own output_dir"):
            other.resolve("auto")
        assert CheckpointStore(store.folder, keep=1).latest() == store.folder / "step_1", "readers need no lock"
    save(other, 2)
    assert names(store) == {"step_2"}


def test_file_system_without_locks_is_reported_and_used(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(file: object, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert store.latest() is None
    assert save(store, 1) == store.latest()
    assert "has no locks" in caplog.text
