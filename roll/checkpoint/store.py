"""The folder of a run's checkpoints. Whoever looks finds whole checkpoints only, also after a crash at any point.

    writing(step):   .step_N.partial-x  --seal-->  manifest on disk  --rename-->  step_N  -->  older ones go
    a swap:          step_N --rename--> .step_N.replaced-x, the new one takes its place, the old one goes
    a removal:       step_N --rename--> .step_N.removed-x, and only then files are deleted

`clean` undoes or completes what a dead writer left: a checkpoint set aside whose successor never arrived comes back.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from roll.checkpoint.manifest import MANIFEST, Manifest, check_sizes, seal, sync_folder, verify
from roll.errors import CheckpointError, ConfigError, Fault
from roll.system.locks import LockHeld, locked

LOG = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"step_\d+")
_LEFTOVER = re.compile(r"\.(?P<name>step_\d+)\.(?P<state>partial|replaced|removed)-[0-9a-f]{32}")
TORCH_WRITER = "inline_container.cc"
"""Part of torch.save's message if a file cannot grow, because the disk is full or a quota or limit is reached. It names
no cause.
"""


class CheckpointStore:
    """Writes checkpoints that are complete or absent, finds the newest and removes old ones."""

    def __init__(self, folder: Path, keep: int) -> None:
        """`keep` is the number of newest checkpoints to keep, at least 1."""
        assert keep > 0, "a store that keeps nothing"
        self.folder = folder
        self.keep = keep
        self._holds_lock = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep every other process from writing into this store, between checkpoints too.

        Raises:
            CheckpointError: another process writes here, or holds the store.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._sole_writer():
            self._holds_lock = True
            try:
                yield
            finally:
                self._holds_lock = False

    @contextmanager
    def writing(self, step: int, required: Sequence[str] = ()) -> Iterator[Path]:
        """Give a folder to write into, below which other processes may write too; it becomes `step_N` on a clean exit.

        An exception inside the block removes the folder and passes; the earlier checkpoints stay as they were.
        `required` names files, relative to the folder, without which there is no checkpoint.

        Raises:
            CheckpointError: the folder is empty, lacks a required file or cannot be brought to the disk,
                or another process writes into this store.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        sync_folder(self.folder.parent)
        with self._sole_writer():
            self._settle()
            final = self.folder / f"step_{step}"
            partial = self._hidden(final.name, "partial")
            partial.mkdir()
            try:
                with _failures_named(final):
                    yield partial
                    whole = self._whole()
                    sequence = 1 + max((manifest.sequence for _, manifest in whole), default=0)
                    seal(partial, step, sequence, required)
                    check_sizes(partial)
                    self._publish(partial, final)
            except BaseException:
                self._settle()
                raise
            for path in [path for path, _ in whole if path != final][self.keep - 1 :]:
                self._remove(self._set_aside(path, "removed"))

    def latest(self) -> Path | None:
        """Return the newest checkpoint whose files all exist in full size. `verify` checks their contents, too."""
        whole = self._whole()
        return whole[0][0] if whole else None

    def clean(self) -> None:
        """Remove the unfinished work of dead writers, and restore a checkpoint whose replacement was never completed.

        Raises:
            CheckpointError: another process writes into this store.
        """
        if self.folder.is_dir():
            with self._sole_writer():
                self._settle()

    def resolve(self, resume: str) -> Path | None:
        """Return the verified checkpoint to start from, or None for a fresh start.

        `resume` is `auto` (the newest whole checkpoint of this store, if it has any), `never`, or a checkpoint's folder.

        Raises:
            ConfigError: the path given is no checkpoint.
            CheckpointError: the checkpoint at that path is not whole, or under `auto` none of the store's is.
        """
        self.clean()
        if resume == "never":
            return None
        if resume == "auto":
            return self.newest_verified("resume_from_checkpoint=never starts over")
        path = Path(resume)
        if not (path / MANIFEST).is_file():
            raise ConfigError([_no_checkpoint(path, self.latest())])
        verify(path)
        return path

    def newest_verified(self, remedy: str) -> Path | None:
        """Return the newest checkpoint that matches its digests, None if there is no checkpoint.

        `remedy` is for the error if none is whole.

        Raises:
            CheckpointError: there are checkpoints, and none is whole.
        """
        for path, _ in self._whole():
            try:
                verify(path)
            except CheckpointError as error:
                LOG.warning("checkpoint passed over: %s", error)
            else:
                return path
        if broken := self._named():
            names = ", ".join(path.name for path in broken)
            raise CheckpointError(f"{self.folder}: none of its checkpoints ({names}) is whole; {remedy}")
        return None

    def _named(self) -> list[Path]:
        """Return folders with a checkpoint's name."""
        if not self.folder.is_dir():
            return []
        return [path for path in self.folder.iterdir() if _CHECKPOINT.fullmatch(path.name) and path.is_dir()]

    def _whole(self) -> list[tuple[Path, Manifest]]:
        """Yield checkpoints, newest first. Broken ones are reported and left in place."""
        whole = []
        for path in self._named():
            try:
                whole.append((path, check_sizes(path)))
            except CheckpointError as error:
                LOG.warning("checkpoint passed over: %s", error)
        return sorted(whole, key=lambda found: found[1].sequence, reverse=True)

    def _publish(self, partial: Path, final: Path) -> None:
        """Rename a sealed folder to its name. A previous checkpoint of that name is removed afterwards."""
        replaced = self._set_aside(final, "replaced") if final.exists() else None
        os.rename(partial, final)
        sync_folder(self.folder)
        if replaced is not None:
            self._remove(replaced)

    def _settle(self) -> None:
        """Complete interrupted swaps and removals. Only the sole writer may call this."""
        for leftover in sorted(self.folder.iterdir()):
            match = _LEFTOVER.fullmatch(leftover.name)
            if match is None:
                continue
            final = self.folder / match["name"]
            if match["state"] == "replaced" and not final.exists():
                os.rename(leftover, final)
                sync_folder(self.folder)
                LOG.warning("checkpoint brought back, its replacement was never completed: %s", final)
            elif match["state"] == "removed":
                self._remove(leftover)
            else:
                aside = self._hidden(match["name"], "removed")
                os.rename(leftover, aside)
                self._remove(aside)

    def _set_aside(self, path: Path, state: Literal["replaced", "removed"]) -> Path:
        aside = self._hidden(path.name, state)
        os.rename(path, aside)
        sync_folder(self.folder)
        return aside

    def _hidden(self, name: str, state: Literal["partial", "replaced", "removed"]) -> Path:
        return self.folder / f".{name}.{state}-{uuid.uuid4().hex}"

    def _remove(self, aside: Path) -> None:
        shutil.rmtree(aside, ignore_errors=True)
        if aside.exists():
            LOG.warning("%s could not be removed; the next start tries again, or remove it by hand", aside)

    @contextmanager
    def _sole_writer(self) -> Iterator[None]:
        """Hold the store's lock. The kernel releases it when its holder dies."""
        if self._holds_lock:
            yield
            return
        with ExitStack() as held:
            try:
                held.enter_context(locked(self.folder / ".lock"))
            except LockHeld:
                raise CheckpointError(
                    f"{self.folder}: another run writes its checkpoints here; give each run its own output_dir, or wait for that run"
                ) from None
            yield


@contextmanager
def _failures_named(final: Path) -> Iterator[None]:
    """Turn a failed write into an error with the free space, measured before anything is removed."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and TORCH_WRITER not in str(error):
            raise
        free = f"{shutil.disk_usage(final.parent).free >> 20} MiB of the disk are free"
        raise CheckpointError(f"{final}: cannot be written ({free}): {error}; free space or mend the folder, then start again") from error


def _no_checkpoint(path: Path, newest: Path | None) -> Fault:
    problem = f"'{path}' is not a checkpoint:  " + (f"it holds no {MANIFEST}" if path.is_dir() else "there is no such folder")
    remedy = f"name a checkpoint's folder{f', such as {newest}' if newest else ' (step_N)'}, or `auto`, or `never`"
    return Fault("resume_from_checkpoint", problem, remedy)
