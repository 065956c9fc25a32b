"""Decides at a run's start whether its local folder or its store has the run, and keeps the two equal until its end."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path

from roll.config.schema.pipelines import Config
from roll.errors import ConfigError
from roll.runs.checkpoint.manifest import MANIFEST
from roll.runs.checkpoint.store import CHECKPOINTS, CheckpointStore
from roll.runs.checkpoint.stored import Stored, StoredCheckpoints
from roll.runs.stored.mirror import Mirror, read_record, write_record
from roll.runs.stored.records import UPLOADS, Records
from roll.stores.address import local_folder
from roll.stores.lease import Lease
from roll.stores.store import Store, StoreError
from roll.tracking.history import STARTS_FILE
from roll.tracking.jsonl import METRICS_FILE


def store_key(config: Config) -> str:
    """Return the key that named the store: `output_dir`, which stands for both, or `output_store`."""
    address = config.output_store
    return "output_dir" if address and str(local_folder(address)) == config.output_dir else "output_store"


@contextmanager
def in_store(
    config: Config,
    folder: Path,
    local: CheckpointStore,
    interruptible: Callable[[], AbstractContextManager[None]],
    say: Callable[[str], None],
) -> Iterator[Mirror | None]:
    """A context that spans a run: it begins with the run that the store has, and ends when the store has everything.

    Yields None for a run without a store.

    Args:
        folder: the run folder, whose checkpoints are in `local`. The caller holds both.
        interruptible: a context in which a signal raises KeyboardInterrupt; see `Interrupt`.
        say: shows what the run waits for.

    Raises:
        ConfigError: the store cannot be used.
        CheckpointError: another run writes into the store, or what it has cannot be brought to this machine.
        RollError: at the end, the store lacks something.
    """
    if config.output_store is None:
        yield None
        return
    store, key = Store(config.output_store), store_key(config)
    lease = Lease(store)
    say(f"opening {store.address}")
    try:
        lease.__enter__()
    except StoreError as error:
        raise ConfigError(error.fault(key)) from error
    try:
        checkpoints, records = StoredCheckpoints(store, config.keep_checkpoints, lease.check), Records(store, folder)
        try:
            newest = _agree(config, folder, local, checkpoints, records, say)
        except StoreError as error:
            raise ConfigError(error.fault(key)) from error
        with Mirror(folder, checkpoints, records, newest, config.deadlines.upload) as mirror:
            if (behind := _ahead(local, newest)) is not None:
                mirror.submit(behind)
            yield from _until_end(mirror, interruptible, say)
    finally:
        lease.__exit__()


def _until_end(
    mirror: Mirror, interruptible: Callable[[], AbstractContextManager[None]], say: Callable[[str], None]
) -> Iterator[Mirror]:
    try:
        yield mirror
    except BaseException:
        if mirror.has_given_up:
            raise
        # What ended the run is reported; here only what the store lacks is said.
        try:
            settle(mirror, interruptible, say)
        except BaseException as lacking:
            print(mirror.state if isinstance(lacking, KeyboardInterrupt) else lacking, file=sys.stderr, flush=True)
        raise
    settle(mirror, interruptible, say)


def finish_upload(
    mirror: Mirror | None, interruptible: Callable[[], AbstractContextManager[None]], say: Callable[[str], None]
) -> None:
    """Wait until the store has the last checkpoint and the export, and say so, while the run can still fail by it.

    Raises:
        RollError: the store fails.
        KeyboardInterrupt: a signal came.
    """
    if mirror is not None:
        settle(mirror, interruptible, say)
        print(f"stored: {mirror.state}", flush=True)


def settle(
    mirror: Mirror, interruptible: Callable[[], AbstractContextManager[None]], say: Callable[[str], None]
) -> None:
    """Wait until the store has everything. Raises RollError if it fails, KeyboardInterrupt for a signal."""
    say("uploading to the store")
    with interruptible():
        mirror.settle()


def _agree(
    config: Config,
    folder: Path,
    local: CheckpointStore,
    checkpoints: StoredCheckpoints,
    records: Records,
    say: Callable[[str], None],
) -> Stored | None:
    """Bring what the store has, unless this folder was the last to write there. Return the store's newest checkpoint.

    A folder with another run's state, or with steps that the store's run has left behind, is kept under another name.
    """
    shutil.rmtree(folder / UPLOADS, ignore_errors=True)
    checkpoints.clean()
    stored = checkpoints.complete()
    newest = stored[0] if stored else None
    local.after = max((one.manifest.sequence for one in stored), default=0)
    resumes = config.resume_from_checkpoint == "auto"
    if _has_run(folder) and (newest is None or not resumes or _was_last(folder, local, newest)):
        records.know()
    else:
        if _has_run(folder):
            print(f"{checkpoints.address} was written by another host; this folder is kept: {_set_aside(folder)}")
        say(f"fetching the run from {checkpoints.address}")
        records.bring()
    here = local.complete()
    if newest is not None and resumes and (not here or here[0][1].sequence < newest.manifest.sequence):
        say(f"fetching {checkpoints.address}/{newest.name}")
        with local.receiving(newest.manifest.step) as partial:
            checkpoints.fetch(newest, partial)
        print(f"fetched: {checkpoints.address}/{newest.name}", flush=True)
        write_record(folder, newest)
    return newest


def _ahead(local: CheckpointStore, newest: Stored | None) -> Path | None:
    """Return the newest local checkpoint if the store lacks it."""
    here = local.complete()
    is_ahead = here and (newest is None or here[0][1].sequence > newest.manifest.sequence)
    return here[0][0] if is_ahead else None


def _was_last(folder: Path, local: CheckpointStore, newest: Stored) -> bool:
    """Whether the store's newest checkpoint came from this folder."""
    known = [read_record(folder), *((path / MANIFEST).read_bytes() for path, _ in local.complete())]
    return newest.text in known


def _has_run(folder: Path) -> bool:
    checkpoints = folder / CHECKPOINTS
    has_checkpoints = checkpoints.is_dir() and any(path.name.startswith("step_") for path in checkpoints.iterdir())
    return has_checkpoints or any((folder / name).exists() for name in (STARTS_FILE, METRICS_FILE))


def _set_aside(folder: Path) -> Path:
    """Move everything but the lock of the checkpoints into a folder beside this one, and return it."""
    kept = next(path for n in count(1) if not os.path.lexists(path := folder.with_name(f"{folder.name}.kept_{n}")))
    (kept / CHECKPOINTS).mkdir(parents=True)
    for path in list((folder / CHECKPOINTS).iterdir()):
        if path.name != ".lock":
            path.rename(kept / CHECKPOINTS / path.name)
    for path in list(folder.iterdir()):
        if path.name != CHECKPOINTS:
            path.rename(kept / path.name)
    return kept
