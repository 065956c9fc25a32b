"""The unit in which weights travel: a few whole tensors, at most so many bytes, with what proves that they arrived.

On one host a bucket is a safetensors file in shared memory. The file's header carries names, dtypes and shapes;
the `Bucket` that travels beside it carries them again with a checksum of all bytes, and the reader compares.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from roll.errors import WeightSyncError
from roll.types import TensorSpec

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""Files of a PEFT folder."""


@dataclass(frozen=True)
class Bucket:
    """Some tensors in a shared-memory file."""

    path: str
    tensors: tuple[TensorSpec, ...]
    checksum: str
    """xxh3-128 of the file's bytes, in hex."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: a PEFT folder in shared memory, or the content of one for another host."""

    config: str
    """PEFT's `adapter_config.json`."""
    weights: Bucket
    content: bytes | None = None
    """The file of `weights`, for a host that does not see it."""

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """The PEFT folder on this host.

        Raises:
            WeightSyncError: its weights are not what was sent.
        """
        if self.content is None:
            verify(self.weights)
            yield Path(self.weights.path).parent
            return
        with tempfile.TemporaryDirectory() as made:
            file = Path(made) / ADAPTER_WEIGHTS
            file.write_bytes(self.content)
            (file.parent / ADAPTER_CONFIG).write_text(self.config)
            verify(replace(self.weights, path=str(file)))
            yield file.parent


def plan_buckets(tensors: Sequence[TensorSpec], max_bytes: int) -> list[tuple[str, ...]]:
    """Split the names, in order, into buckets of at most `max_bytes`. A larger tensor is a bucket of its own."""
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
    """Describe a tensor."""
    return TensorSpec(name, str(tensor.dtype), tuple(tensor.shape), tensor.nbytes)


def write_bucket(path: Path, tensors: Mapping[str, Tensor]) -> Bucket:
    """Write tensors to `path` (replaced whole) and describe what was written."""
    aside = path.with_suffix(".partial")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, aside)
    os.replace(aside, path)
    return Bucket(str(path), tuple(spec(name, tensor) for name, tensor in tensors.items()), _checksum(path))


def write_adapter(folder: Path | None, config: str, tensors: Mapping[str, Tensor]) -> Adapter:
    """Write an adapter as a PEFT folder. Without a folder the returned adapter carries its content."""
    if folder is None:
        with tempfile.TemporaryDirectory() as made:
            adapter = write_adapter(Path(made), config, tensors)
            return replace(adapter, content=Path(adapter.weights.path).read_bytes())
    (folder / ADAPTER_CONFIG).write_text(config)
    return Adapter(config, write_bucket(folder / ADAPTER_WEIGHTS, tensors))


def read_bucket(bucket: Bucket) -> dict[str, Tensor]:
    """Map the tensors of a bucket from shared memory.

    Raises:
        WeightSyncError: bytes, names, dtypes or shapes are not those that were sent.
    """
    verify(bucket)
    tensors = load_file(bucket.path)
    found = {name: spec(name, tensor) for name, tensor in tensors.items()}
    for sent in bucket.tensors:
        if found.get(sent.name) != sent:
            raise WeightSyncError(f"{sent.name} was sent as {sent.dtype}{list(sent.shape)} and arrived as {found.get(sent.name)}")
    if extra := found.keys() - {sent.name for sent in bucket.tensors}:
        raise WeightSyncError(f"tensors arrived that were not sent: {', '.join(sorted(extra))}")
    return {sent.name: tensors[sent.name] for sent in bucket.tensors}


def verify(bucket: Bucket) -> None:
    """Compare the file's bytes with the checksum.

    Raises:
        WeightSyncError: they differ, or the file is not there.
    """
    if not os.path.exists(bucket.path):
        raise WeightSyncError(f"the bucket {bucket.path} is gone; trainer and engine must share a host to sync through files")
    if (found := _checksum(Path(bucket.path))) != bucket.checksum:
        raise WeightSyncError(f"the checksum of {bucket.path} is {found}, but {bucket.checksum} was sent")


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
