"""The checkpoints of a run in a store. `checkpoints/step_N.S/` is step N's, the S-th checkpoint that the run wrote; it
is complete once its manifest is there.

    upload:  every file but the manifest  -->  sizes compared  -->  manifest.json  -->  older checkpoints are removed
    remove:  manifest.json  -->  the other files

The names are never used twice, so that no reader finds a mixture of two checkpoints.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path

from roll.errors import CheckpointError
from roll.runs.checkpoint.manifest import MANIFEST, Manifest, parse_manifest, read_manifest
from roll.runs.checkpoint.store import CHECKPOINTS
from roll.stores.store import Store

LOG = logging.getLogger(__name__)
_NAME = re.compile(r"step_\d+\.\d+")
AT_ONCE = 8
"""Number of files that are uploaded or downloaded at the same time."""


@dataclass(frozen=True)
class Stored:
    """A complete checkpoint in a store."""

    name: str
    text: bytes
    """Contents of the manifest's file."""
    manifest: Manifest


def stored_name(manifest: Manifest) -> str:
    """Return the name of a checkpoint in a store."""
    return f"step_{manifest.step}.{manifest.sequence}"


def at_once(transfer: Callable[[str], None], names: Iterable[str]) -> None:
    """Call `transfer` for each name, several at the same time. Raises the first error.

    The threads are daemons: a transfer that waits for a slow store does not keep the process from ending.
    """
    with ThreadPool(AT_ONCE) as pool:
        for _ in pool.imap_unordered(transfer, names):
            pass


class StoredCheckpoints:
    """Uploads checkpoints so that only complete ones are seen, finds and fetches them, and removes old ones.

    All methods raise StoreError if the store fails.
    """

    def __init__(self, store: Store, keep: int, check: Callable[[], None] = lambda: None) -> None:
        """`keep`: number of newest checkpoints to keep. `check` raises if another run has become the writer."""
        self._store, self._keep, self.check = store.below(CHECKPOINTS), keep, check
        self.address = self._store.address

    def complete(self) -> list[Stored]:
        """Return the complete checkpoints, newest first. The others are reported and left in place."""
        found = []
        for name, sizes in self._listed().items():
            if MANIFEST in sizes and (whole := self._complete(name, sizes)):
                found.append(whole)
        return sorted(found, key=lambda one: one.manifest.sequence, reverse=True)

    def upload(self, folder: Path, best: int | None = None) -> Stored:
        """Upload a complete local checkpoint, then remove older ones.

        Args:
            best: step of a checkpoint that is kept although newer ones fill the store.

        Raises:
            CheckpointError: the store does not have the written sizes, or another run has become the writer.
            OSError: a local file cannot be read.
        """
        manifest, text = read_manifest(folder), (folder / MANIFEST).read_bytes()
        name = stored_name(manifest)
        part = self._store.below(name)
        at_once(lambda file: part.put(folder / file, file), manifest.files)
        there = part.sizes()
        if wrong := [file for file, entry in manifest.files.items() if there.get(file) != entry.bytes]:
            raise CheckpointError(f"{part.address}: the store has another size than was written of {', '.join(wrong)}")
        self.check()
        part.write(MANIFEST, text)
        stored = Stored(name, text, manifest)
        self._rotate(best)
        return stored

    def fetch(self, stored: Stored, folder: Path) -> None:
        """Download a checkpoint into an empty folder. Its digests are not compared; see `verify_checkpoint`."""
        part = self._store.below(stored.name)
        for file in stored.manifest.files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
        at_once(lambda file: part.get(file, folder / file), stored.manifest.files)
        (folder / MANIFEST).write_bytes(stored.text)

    def clean(self) -> None:
        """Remove checkpoints that were never completed. Only the holder of the lease may call this."""
        for name, sizes in self._listed().items():
            if MANIFEST not in sizes:
                LOG.info("removing an upload that was never completed: %s/%s", self.address, name)
                self._remove(name, sizes)

    def _rotate(self, best: int | None) -> None:
        """Remove the complete checkpoints that `keep` leaves no room for, and uploads that were never completed."""
        old = [one for one in self.complete()[self._keep :] if one.manifest.step != best]
        listed = self._listed()
        for one in old:
            self._remove(one.name, listed.get(one.name, {}))
        self.clean()

    def _remove(self, name: str, sizes: Mapping[str, int]) -> None:
        """Remove the manifest first, so that what is left at any time is no checkpoint."""
        self.check()
        part = self._store.below(name)
        if MANIFEST in sizes:
            part.remove([MANIFEST])
        at_once(lambda file: part.remove([file]), [file for file in sizes if file != MANIFEST])

    def _listed(self) -> dict[str, dict[str, int]]:
        """Return the sizes of the files of everything that is named like a checkpoint, by its name."""
        found: dict[str, dict[str, int]] = {}
        for path, size in self._store.sizes().items():
            name, _, file = path.partition("/")
            if file and _NAME.fullmatch(name):
                found.setdefault(name, {})[file] = size
        return found

    def _complete(self, name: str, sizes: Mapping[str, int]) -> Stored | None:
        where = f"{self.address}/{name}"
        text = self._store.below(name).read(MANIFEST)
        try:
            if text is None:
                raise CheckpointError(f"{where}: its {MANIFEST} was removed meanwhile")
            manifest = parse_manifest(text, f"{where}/{MANIFEST}")
            if wrong := [file for file, entry in manifest.files.items() if sizes.get(file) != entry.bytes]:
                raise CheckpointError(f"{where}: {', '.join(wrong)} is missing or has another size than was written")
        except CheckpointError as error:
            LOG.warning("skipping a checkpoint: %s", error)
            return None
        return Stored(name, text, manifest)
