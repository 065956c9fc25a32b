"""The manifest of a checkpoint: a file, written last, that lists every other file with its size and digest.

The training loop's part of a checkpoint. Strategies write models and optimizers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import TypeAdapter, ValidationError

from roll.errors import CheckpointError

LOOP_FILE = "loop.json"
"""Name of the file in the checkpoint's folder."""


@dataclass(frozen=True)
class LoopState:
    """State of the loop at the end of a step."""

    step: int
    """Number of completed steps."""
    policy_version: int
    """Number of optimizer updates behind the policy's weights."""
    sampler: Mapping[str, Any]
    """The sampler's state, JSON-serialisable."""
    basis: Mapping[str, str]
    """The resume fingerprint: the values, by configuration key, that determine which rows come next and how large a
    step is. A run that resumes from this checkpoint must have the same values.
    """
    seconds: float
    """Wall-clock seconds so far, over all processes that ran this experiment."""
    credit: Mapping[str, Any] = field(default_factory=dict)
    """State that credit assignment passes from step to step, JSON-serialisable. Empty if there is none."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The configuration without secrets. Empty in checkpoints of earlier versions."""
    improvement: Mapping[str, Any] = field(default_factory=dict)
    """State of `Improvement`: the best values of held-out metrics. Empty if none is followed."""

    def write(self, folder: Path) -> None:
        (folder / LOOP_FILE).write_bytes(_LOOP_STATE.dump_json(self, indent=1))

    @staticmethod
    def read(folder: Path) -> LoopState:
        """Read the file that `write` wrote. Raises CheckpointError if it is missing or invalid."""
        path = folder / LOOP_FILE
        try:
            return _LOOP_STATE.validate_json(path.read_bytes(), strict=True)
        except (FileNotFoundError, ValidationError) as error:
            raise CheckpointError(
                f"{path}: cannot read the state of the training loop: {error}; use another checkpoint"
            ) from error


_LOOP_STATE = TypeAdapter(LoopState)


MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    bytes: int
    xxh3: str
    """128-bit XXH3 of the contents, in hexadecimal."""


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a checkpoint."""

    format: Literal[1]
    step: int
    sequence: int
    """Number of the checkpoint among all that were written into its folder. It orders checkpoints by age even if a run
    returned to an earlier step.
    """
    files: Mapping[str, FileEntry]
    """Files by their path relative to the checkpoint's folder, with forward slashes."""


_MANIFEST = TypeAdapter(Manifest)


def seal(folder: Path, step: int, sequence: int, required: Iterable[str]) -> Manifest:
    """Flush every file below `folder` to the disk, then write the manifest.

    Other machines must have closed their files before this call, because a network file system shows a file only once
    it is closed.

    Args:
        step: number of completed steps.
        sequence: see `Manifest`.
        required: paths of files that the folder must contain, relative to it.

    Raises:
        CheckpointError: a required file is missing or empty, or the folder contains something that is neither a file
            nor a folder.
    """
    names = _files_below(folder)
    for name in required:
        if name not in names or (folder / name).stat().st_size == 0:
            state = "empty" if name in names else "missing"
            raise CheckpointError(f"{folder}: required file '{name}' is {state}; the checkpoint was discarded")
    with ThreadPoolExecutor() as pool:
        entries = list(pool.map(lambda name: _measure(folder / name, sync=True), names))
    manifest = Manifest(1, step, sequence, dict(zip(names, entries, strict=True)))
    with (folder / MANIFEST).open("wb") as file:
        file.write(_MANIFEST.dump_json(manifest, indent=1))
        file.flush()
        os.fsync(file.fileno())
    for inner in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync_folder(inner)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raises CheckpointError if it is missing or invalid."""
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: it has no {MANIFEST}, so it is not complete; use another checkpoint"
        ) from None
    return parse_manifest(text, str(path))


def parse_manifest(text: bytes, where: str) -> Manifest:
    """Return the manifest that a file contains. Raises CheckpointError, which names `where`, if it is invalid."""
    try:
        return _MANIFEST.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise CheckpointError(f"{where}: {place}: {first['msg']}; use another checkpoint") from None


def check_sizes(folder: Path) -> Manifest:
    """Check, without reading contents, that every file exists with the size in the manifest. Return the manifest.

    Raises:
        CheckpointError: the manifest is missing or invalid, or has another step than the folder's name; or a file is
            missing or has another size. The error names the first such file.
    """
    manifest = read_manifest(folder)
    if folder.name.startswith("step_") and folder.name != f"step_{manifest.step}":
        raise CheckpointError(
            f"{folder}: it was written as step_{manifest.step} and renamed; rename it back, or use another checkpoint"
        )
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: the manifest lists this file, but it is missing; use another checkpoint")
        if (found := path.stat().st_size) != entry.bytes:
            raise CheckpointError(
                f"{path}: it has {found} bytes, but {entry.bytes} were written; use another checkpoint"
            )
    return manifest


def verify_checkpoint(folder: Path) -> Manifest:
    """Check the size and the digest of every file. Return the manifest.

    Raises:
        CheckpointError: see `check_sizes`; or the digest of a file differs. The error then names all files with another
            digest.
    """
    manifest = check_sizes(folder)
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda name: _measure(folder / name, sync=False), manifest.files))
    changed = [name for (name, entry), now in zip(manifest.files.items(), found, strict=True) if now != entry]
    if changed:
        names = ", ".join(changed)
        raise CheckpointError(
            f"{folder}: the contents of {names} differ from the written ones (XXH3 digest); use another checkpoint"
        )
    return manifest


def sync_folder(folder: Path) -> None:
    """Flush the folder's own entries (creations, renames, removals) to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files_below(folder: Path) -> list[str]:
    names = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(
                f"{path}: it is neither a file nor a folder, so a checkpoint cannot contain it; write its contents "
                f"instead"
            )
        if path.is_file():
            names.append(path.relative_to(folder).as_posix())
    if not names:
        raise CheckpointError(f"{folder}: nothing was written into this checkpoint")
    return names


def _measure(path: Path, sync: bool) -> FileEntry:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)  # xxhash follows hashlib's interface
        if sync:
            os.fsync(file.fileno())
        return FileEntry(bytes=file.tell(), xxh3=digest.hexdigest())
