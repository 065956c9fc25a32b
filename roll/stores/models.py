"""Models in stores: each is downloaded once to a host, into a folder for each version, with digests.

A version is a digest of the names, sizes and marks (such as ETags) of the files in the store. Processes of a run name a
model as `s3://bucket/prefix#VERSION`, so that all hosts load the same weights, however late they start.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from hashlib import file_digest, sha256
from pathlib import Path
from urllib.parse import urlsplit

import xxhash
from pydantic import TypeAdapter, ValidationError

from roll.stores.address import is_address
from roll.stores.store import Store, StoreError
from roll.system.own_folder import holding_lock

LOG = logging.getLogger(__name__)
CACHE = "ROLL_MODEL_CACHE"
"""Environment variable with the folder of the cache; `~/.cache/roll/models` if not set."""
RECORD = ".roll_model.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx")
LOCK_SECONDS = 24 * 3600.0
"""Seconds to wait for another process of this host that downloads the same model."""


@dataclass(frozen=True)
class Fetched:
    """A file on this host."""

    xxh3: str
    changed: int
    """Time of its last change, in nanoseconds."""


@dataclass
class ModelRecord:
    """What a version consists of, and which of its files are on this host."""

    address: str
    files: dict[str, tuple[int, str]]
    """Size in bytes and mark of each file in the store, by name."""
    fetched: dict[str, Fetched] = field(default_factory=dict)

    @property
    def version(self) -> str:
        return sha256(json.dumps(sorted(self.files.items())).encode()).hexdigest()[:12]


_RECORD = TypeAdapter(ModelRecord)


@cache
def pinned_model(name: str) -> str:
    """Return the address of a model with its version now, `s3://bucket/prefix#VERSION`. Other names are returned as
    they are. A process that asks again gets the same answer.

    Raises:
        StoreError: the store has no such model, or fails and this host has no version of it.
    """
    if not is_address(name) or "#" in name:
        return name
    try:
        return f"{name}#{_listed(name).version}"
    except StoreError as error:
        if (known := _newest(name)) is None or error.code == "not_found":
            raise
        LOG.warning("%s; the copy on this machine is used: %s", error, known)
        return f"{name}#{known.name}"


def local_model(name: str) -> str:
    """Return the folder on this host of a model in a store, complete and as it was written. Other names are returned
    as they are.

    Raises:
        StoreError: the model cannot be fetched, or is no longer the version that the name says.
    """
    if not is_address(name):
        return name
    address, _, version = pinned_model(name).partition("#")
    return str(_fetched(address, version, weights=True))


def described_model(name: str) -> Path:
    """Return the folder on this host with all files of a model but its weights, for a plan. Raises StoreError."""
    address, _, version = pinned_model(name).partition("#")
    return _fetched(address, version, weights=False)


def known_model(name: str) -> Path | None:
    """Return the folder of a model that this host has, without asking the store; None if it has none."""
    return _newest(name.partition("#")[0])


def _fetched(address: str, version: str, weights: bool) -> Path:
    folder = _versions(address) / version
    folder.mkdir(parents=True, exist_ok=True)
    with holding_lock(folder.with_suffix(".lock"), LOCK_SECONDS):
        record = _read(folder)
        if record is None:
            record = _listed(address)
            if record.version != version:
                remedy = "start the run again, or keep each version of a model below a prefix of its own"
                raise StoreError(
                    address, f"the model was changed: {version} is now {record.version}", remedy, "changed"
                )
        wanted = [name for name in record.files if weights or not name.endswith(WEIGHTS)]
        missing = [name for name in wanted if not _is_intact(folder / name, record.fetched.get(name))]
        if missing:
            _fetch(record, folder, missing)
    return folder


def _fetch(record: ModelRecord, folder: Path, names: Iterable[str]) -> None:
    """Download files one after the other: a client downloads each in several parts. Raises StoreError."""
    names = list(names)
    needed, free = sum(record.files[name][0] for name in names), shutil.disk_usage(folder).free
    if needed > free:
        problem = f"the model needs {needed >> 20} MiB more, but {folder} has {free >> 20} MiB"
        raise StoreError(record.address, problem, f"free space, or set {CACHE} to a folder with more", "too_large")
    store = Store(record.address)
    if _listed(record.address).version != record.version:
        remedy = "start the run again, or keep each version of a model below a prefix of its own"
        raise StoreError(record.address, "the model was changed while it was downloaded", remedy, "changed")
    LOG.info("downloading %s: %d files, %.1f MB, to %s", record.address, len(names), needed / 1e6, folder)
    for name in names:
        file, partial = folder / name, folder / f"{name}.partial"
        file.parent.mkdir(parents=True, exist_ok=True)
        store.get(name, partial)
        if (size := partial.stat().st_size) != record.files[name][0]:
            problem = f"{size} bytes of {record.files[name][0]} arrived of {name}"
            raise StoreError(record.address, problem, "start again", "failed")
        digest = _digest(partial)
        partial.replace(file)
        record.fetched[name] = Fetched(digest, file.stat().st_mtime_ns)
        _write(record, folder)


def _is_intact(file: Path, fetched: Fetched | None) -> bool:
    """Whether a file is as it was downloaded. Reads it only if its time says that it was written again."""
    if fetched is None or not file.is_file():
        return False
    if file.stat().st_mtime_ns == fetched.changed:
        return True
    if _digest(file) == fetched.xxh3:
        return True
    LOG.warning("%s differs from what was downloaded (XXH3 digest); it is downloaded again", file)
    return False


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return file_digest(opened, xxhash.xxh3_128).hexdigest()  # xxhash follows hashlib's interface


def _listed(address: str) -> ModelRecord:
    """Return what the store has now. Raises StoreError."""
    files = Store(address).marks()
    if not files:
        raise StoreError(address, "there are no files", "set it to the prefix of a saved model", "not_found")
    return ModelRecord(address, files)


def _newest(address: str) -> Path | None:
    """Return the newest version on this host that has a config.json."""
    records = [path.parent for path in _versions(address).glob(f"*/{RECORD}")]
    usable = [folder for folder in records if (folder / "config.json").is_file()]
    return max(usable, key=lambda folder: (folder / RECORD).stat().st_mtime_ns, default=None)


def _versions(address: str) -> Path:
    parts = urlsplit(address)
    cache = Path(os.environ.get(CACHE) or Path.home() / ".cache" / "roll" / "models").expanduser().absolute()
    return cache / parts.scheme / parts.netloc / parts.path.strip("/")


def _read(folder: Path) -> ModelRecord | None:
    try:
        return _RECORD.validate_json((folder / RECORD).read_bytes())
    except (OSError, ValidationError):
        return None


def _write(record: ModelRecord, folder: Path) -> None:
    partial = folder / f"{RECORD}.partial"
    partial.write_text(json.dumps(asdict(record)), encoding="utf-8")
    partial.replace(folder / RECORD)
