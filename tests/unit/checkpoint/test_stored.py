"""Checkpoints in a store whose requests fail at any moment: a reader finds complete checkpoints alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll.errors import CheckpointError
from roll.runs.checkpoint.manifest import MANIFEST, verify_checkpoint
from roll.runs.checkpoint.store import CHECKPOINTS, CheckpointStore
from roll.runs.checkpoint.stored import StoredCheckpoints
from roll.stores.store import Store, StoreError

WRITES = ("put", "write", "remove")


def save(local: CheckpointStore, step: int) -> Path:
    with local.writing(step) as folder:
        for rank in range(2):
            (folder / "deepspeed").mkdir(exist_ok=True)
            (folder / "deepspeed" / f"rank_{rank}.pt").write_text(f"{step} " * 100)
    return local.folder / f"step_{step}"


def read(stored: StoredCheckpoints, folder: Path) -> list[int]:
    """Fetch every complete checkpoint and compare its digests. Return the steps, newest first."""
    found = stored.complete()
    for one in found:
        target = folder / one.name / f"step_{one.manifest.step}"
        stored.fetch(one, target)
        assert verify_checkpoint(target) == one.manifest
    return [one.manifest.step for one in found]


def fail_at(patch: pytest.MonkeyPatch, last: int) -> None:
    """Make all changes of a store but the first `last` ones fail."""
    left = [last]

    def failing(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: Store, *values: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise StoreError(store.address, "cut off", "wait", "failed")
            return method(store, *values)

        return call

    for name in WRITES:
        patch.setattr(Store, name, failing(getattr(Store, name)))


@pytest.mark.parametrize("last", range(8))
def test_store_that_fails_keeps_whole_checkpoints(tmp_path: Path, last: int) -> None:
    local = CheckpointStore(tmp_path / "run" / CHECKPOINTS, keep=3)
    stored = StoredCheckpoints(Store((tmp_path / "store").as_uri()), keep=1)
    stored.upload(save(local, 2))
    newer = save(local, 4)
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, last)
        try:
            stored.upload(newer)
        except StoreError:
            assert last < 6, "two files and the manifest are written, and three files of the older one removed"
    assert read(stored, tmp_path / "read")[0] == (2 if last < 3 else 4)

    stored.clean()
    stored.upload(newer)
    assert read(stored, tmp_path / "again") == [4]
    assert len(stored._listed()) == 1


def test_best_checkpoint_stays_in_the_store(tmp_path: Path) -> None:
    local = CheckpointStore(tmp_path / "run" / CHECKPOINTS, keep=9)
    stored = StoredCheckpoints(Store((tmp_path / "store").as_uri()), keep=1)
    for step in (2, 4, 6):
        stored.upload(save(local, step), best=2)
    assert read(stored, tmp_path / "read") == [6, 2]


def test_damaged_checkpoint_of_store_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    local = CheckpointStore(tmp_path / "run" / CHECKPOINTS, keep=9)
    store = Store((tmp_path / "store").as_uri())
    stored = StoredCheckpoints(store, keep=9)
    for step in (2, 4, 6):
        stored.upload(save(local, step))
    store.write(f"{CHECKPOINTS}/step_6.3/{MANIFEST}", b"{")
    store.remove([f"{CHECKPOINTS}/step_4.2/deepspeed/rank_0.pt", "no/such/file"])
    assert read(stored, tmp_path / "read") == [2]
    assert caplog.text.count("skipping a checkpoint") == 2


def test_another_writer_stops_the_upload(tmp_path: Path) -> None:
    def replaced() -> None:
        raise CheckpointError("another run writes its checkpoints here")

    local = CheckpointStore(tmp_path / "run" / CHECKPOINTS, keep=9)
    stored = StoredCheckpoints(Store((tmp_path / "store").as_uri()), keep=9, check=replaced)
    with pytest.raises(CheckpointError):
        stored.upload(save(local, 2))
    assert stored.complete() == []


def test_received_checkpoint_with_wrong_contents_is_refused(tmp_path: Path) -> None:
    written = CheckpointStore(tmp_path / "run" / CHECKPOINTS, keep=9)
    store = Store((tmp_path / "store").as_uri())
    stored = StoredCheckpoints(store, keep=9)
    one = stored.upload(save(written, 2))
    here = CheckpointStore(tmp_path / "other" / CHECKPOINTS, keep=9)
    with here.receiving(2) as folder:
        stored.fetch(one, folder)
    assert here.latest() == here.folder / "step_2"
    store.write(f"{CHECKPOINTS}/{one.name}/deepspeed/rank_0.pt", b"x" * 200)
    with pytest.raises(CheckpointError, match="rank_0.pt"), here.receiving(4) as folder:
        stored.fetch(one, folder)
    assert [path.name for path, _ in here.complete()] == ["step_2"]
