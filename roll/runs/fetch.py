"""`python -m roll.runs.fetch ADDRESS FOLDER [--step N]` downloads a run from a store: records, export and a checkpoint.

The folder is a run folder like any other: to evaluate, export, compare or continue. Nothing in the store changes, so
the run may still be writing there.

Exit status: 0 done; 2 the address or the folder cannot be used; 3 the store failed, or the checkpoint is damaged; 130
interrupted.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from roll.errors import CheckpointError, ConfigError, Fault
from roll.runs.checkpoint.manifest import verify_checkpoint
from roll.runs.checkpoint.store import CHECKPOINTS
from roll.runs.checkpoint.stored import Stored, StoredCheckpoints
from roll.runs.stored.records import Records
from roll.stores.address import address_fault, is_address, missing_package
from roll.stores.store import Store, StoreError
from roll.system.command import run_command
from roll.system.own_folder import new_folder

PLACE = "address"


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch the run of the command line. Return the exit status."""
    parser = argparse.ArgumentParser("python -m roll.runs.fetch", description="Download a run from a store.")
    parser.add_argument("address", help="the run's address, as in output_dir or output_store: s3://bucket/prefix")
    parser.add_argument("folder", type=Path, help="folder to write, which must not exist yet")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest complete one)")
    given = parser.parse_args(argv)

    def work() -> None:
        checkpoint = fetch_run(given.address, given.folder, given.step)
        print(f"{given.folder}: {checkpoint.name if checkpoint else 'without a checkpoint'} of {given.address}")

    return run_command(work)


def fetch_run(address: str, folder: Path, step: int | None = None) -> Stored | None:
    """Download a run into a new folder, completely or not at all. Return its checkpoint, None if the store has none.

    Args:
        step: of the checkpoint. None is the newest complete one.

    Raises:
        ConfigError: the address names no run, the store refuses access, it has no such checkpoint, or the folder exists
            or has too little space.
        StoreError: the store fails while files are downloaded.
        CheckpointError: the checkpoint is not as it was written, or the folder cannot be written.
    """
    if folder.exists():
        remedy = "give a folder that does not exist, or remove it"
        raise ConfigError(Fault("folder", f"'{folder}' already exists", remedy, "already_exists"))
    store = _opened(address)
    try:
        sizes, stored = store.sizes(), StoredCheckpoints(store, keep=0)
        checkpoint = _chosen(store, stored.complete(), step)
    except StoreError as error:
        raise ConfigError(error.fault(PLACE)) from error
    if not sizes:
        raise ConfigError(Fault(PLACE, f"'{address}': there are no files", "give the address of a run", "not_found"))
    try:
        with new_folder(folder) as partial:
            partial.mkdir()
            _check_space(partial, store, sizes, checkpoint)
            Records(store, partial).bring()
            if checkpoint is not None:
                target = partial / CHECKPOINTS / f"step_{checkpoint.manifest.step}"
                target.mkdir(parents=True)
                stored.fetch(checkpoint, target)
                verify_checkpoint(target)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error}; free space or give another folder") from error
    return checkpoint


def _opened(address: str) -> Store:
    """Return the store of an address. Raises ConfigError if the address is none."""
    if not is_address(address):
        problem, remedy = f"'{address}' is no address of a store", "give s3://, gs:// or file:// with bucket and prefix"
        raise ConfigError(Fault(PLACE, problem, remedy, "malformed"))
    if fault := address_fault(PLACE, address) or missing_package(PLACE, address):
        raise ConfigError(fault)
    return Store(address)


def _chosen(store: Store, complete: Sequence[Stored], step: int | None) -> Stored | None:
    """Return the checkpoint of a step, or the newest. Raises ConfigError if there is no complete one of that step."""
    if step is None:
        return complete[0] if complete else None
    steps = [str(one.manifest.step) for one in complete]
    if str(step) not in steps:
        problem = f"{step}, but {store.address} has complete checkpoints of step(s) {', '.join(steps) or 'none'}"
        raise ConfigError(Fault("--step", problem, "give one of these", "not_found"))
    return complete[steps.index(str(step))]


def _check_space(folder: Path, store: Store, sizes: dict[str, int], checkpoint: Stored | None) -> None:
    """Raise ConfigError if the disk has less space than the run needs."""
    records = sum(size for name, size in sizes.items() if name.partition("/")[0] != CHECKPOINTS)
    needed = records + sum(entry.bytes for entry in checkpoint.manifest.files.values()) if checkpoint else records
    if needed > (free := shutil.disk_usage(folder).free):
        problem = f"{store.address} needs {needed >> 20} MiB, but there are {free >> 20} MiB"
        raise ConfigError(Fault("folder", problem, "free space, or give a folder on another disk", "too_large"))


if __name__ == "__main__":
    sys.exit(main())
