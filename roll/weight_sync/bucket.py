"""Buckets, the unit in which weights are sent: a few whole tensors of limited total size, with a checksum.

On one host, a bucket is a safetensors file in shared memory. The header of the file contains names, dtypes and shapes.
A separately sent `Bucket` repeats them, together with a checksum of all bytes, and the reader compares the two.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from roll.errors import WeightSyncError
from roll.types import TensorSpec

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""Names of the files in a PEFT folder."""


@dataclass(frozen=True)
class Bucket:
    """Description of a file in shared memory that holds some tensors."""

    path: str
    tensors: tuple[TensorSpec, ...]
    checksum: str
    """xxh3-128 of the file's bytes, in hex."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: a PEFT folder in shared memory, or the content of a PEFT folder, for other hosts."""

    config: str
    """Content of PEFT's `adapter_config.json`."""
    weights: Bucket
    content: bytes | None = None
    """Content of the file that `weights` describes, for hosts that cannot read it. None if all can."""

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Yield the PEFT folder here, a temporary one if carried. Raises WeightSyncError if it is not what was sent."""
        if self.content is None:
            verify_file(self.weights)
            yield Path(self.weights.path).parent
            return
        with tempfile.TemporaryDirectory() as made:
            file = Path(made) / ADAPTER_WEIGHTS
            file.write_bytes(self.content)
            (file.parent / ADAPTER_CONFIG).write_text(self.config)
            verify_file(replace(self.weights, path=str(file)))
            yield file.parent


def plan_buckets(tensors: Sequence[TensorSpec], max_bytes: int) -> list[tuple[str, ...]]:
    """Split the tensors' names, in order, into buckets of at most `max_bytes`. A larger tensor gets its own."""
    buckets: list[list[str]] = []
    room = 0
    for tensor in tensors:
        if not buckets or tensor.nbytes > room:
            buckets.append([])
            room = max_bytes
        buckets[-1].append(tensor.name)
        room -= tensor.nbytes
    return [tuple(names) for names in buckets]


def spec(name: str, tensor: Tensor) -> TensorSpec:
    """Return the specification of a tensor."""
    return TensorSpec(name, str(tensor.dtype), tuple(tensor.shape), tensor.nbytes)


def write_bucket(path: Path, tensors: Mapping[str, Tensor]) -> Bucket:
    """Write tensors to `path`, atomically, and return a description of the written file.

    Raises WeightSyncError if it cannot be written.
    """
    aside = path.with_suffix(".partial")
    with _failures_named(path):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, aside)
        os.replace(aside, path)
    return Bucket(str(path), tuple(spec(name, tensor) for name, tensor in tensors.items()), _checksum(path))


@contextmanager
def _failures_named(path: Path) -> Iterator[None]:
    """Convert the exception of a failed write to a WeightSyncError with the file, the free space and the remedy."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        existing = next(folder for folder in path.parents if folder.is_dir())
        free = f"{shutil.disk_usage(existing).free >> 20} MiB are free"
        raise WeightSyncError(
            f"{path}: weights cannot be written ({free}): {error}; enlarge shared memory (`mount -o remount,size=16G "
            f"/dev/shm`, or in a container `docker run --shm-size=16g`), or remove files from it"
        ) from error


def write_adapter(folder: Path | None, config: str, tensors: Mapping[str, Tensor]) -> Adapter:
    """Write an adapter as a PEFT folder. With `folder` None, keep no files: the result carries their content.

    Raises WeightSyncError if it cannot be written.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as made:
            adapter = write_adapter(Path(made), config, tensors)
            return replace(adapter, content=Path(adapter.weights.path).read_bytes())
    with _failures_named(folder / ADAPTER_CONFIG):
        (folder / ADAPTER_CONFIG).write_text(config)
    return Adapter(config, write_bucket(folder / ADAPTER_WEIGHTS, tensors))


def read_bucket(bucket: Bucket) -> dict[str, Tensor]:
    """Return a bucket's tensors, mapped from shared memory. Raises WeightSyncError if they are not what was sent."""
    verify_file(bucket)
    tensors = load_file(bucket.path)
    found = {name: spec(name, tensor) for name, tensor in tensors.items()}
    for sent in bucket.tensors:
        if found.get(sent.name) != sent:
            raise WeightSyncError(
                f"{sent.name} was sent as {sent.dtype}{list(sent.shape)} and arrived as {found.get(sent.name)}"
            )
    if extra := found.keys() - {sent.name for sent in bucket.tensors}:
        raise WeightSyncError(f"tensors arrived that were not sent: {', '.join(sorted(extra))}")
    return {sent.name: tensors[sent.name] for sent in bucket.tensors}


def verify_file(bucket: Bucket) -> None:
    """Compare the file's checksum with the bucket's. Raises WeightSyncError if it differs or there is no file."""
    if not os.path.exists(bucket.path):
        raise WeightSyncError(
            f"the bucket {bucket.path} is gone; trainer and engine must share a host to sync through files"
        )
    if (found := _checksum(Path(bucket.path))) != bucket.checksum:
        raise WeightSyncError(f"the checksum of {bucket.path} is {found}, but {bucket.checksum} was sent")


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
