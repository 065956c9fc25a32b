"""Buckets of weights in files: planning, writing and reading, and the detection of damaged files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll.errors import WeightSyncError
from roll.types import TensorSpec
from roll.weight_sync.bucket import Bucket, plan_buckets, read_bucket, spec, verify_file, write_bucket


def specs(*sizes: int) -> list[TensorSpec]:
    return [TensorSpec(f"w{number}", "torch.uint8", (size,), size) for number, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([4, 4, 4], [("w0", "w1"), ("w2",)]),
        ([9, 1], [("w0",), ("w1",)]),
        ([10, 1], [("w0",), ("w1",)]),
        ([1, 20, 1], [("w0",), ("w1",), ("w2",)]),
        ([0, 8, 0, 0], [("w0", "w1", "w2", "w3")]),
    ],
)
def test_buckets_are_cut_in_order(sizes: list[int], expected: list[tuple[str, ...]]) -> None:
    assert plan_buckets(specs(*sizes), max_bytes=8) == expected


@given(sizes=st.lists(st.integers(0, 30), max_size=30), room=st.integers(1, 40))
def test_every_tensor_travels_once_and_in_order(sizes: list[int], room: int) -> None:
    buckets = plan_buckets(specs(*sizes), room)
    assert [name for names in buckets for name in names] == [f"w{number}" for number in range(len(sizes))]
    for names in buckets:
        nbytes = sum(sizes[int(name[1:])] for name in names)
        assert nbytes <= room or sum(sizes[int(name[1:])] > 0 for name in names) == 1


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.b": torch.randn(3, 4, generator=generator),
        "model.a": torch.randn(5, generator=generator).bfloat16(),
        "model.turned": torch.randn(2, 6, generator=generator).t(),
    }


@pytest.fixture
def bucket(tmp_path: Path, tensors: dict[str, Tensor]) -> Bucket:
    return write_bucket(tmp_path / "bucket.safetensors", tensors)


def test_what_is_written_is_read(bucket: Bucket, tensors: dict[str, Tensor]) -> None:
    read = read_bucket(bucket)
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    assert bucket.tensors[0] == TensorSpec("model.b", "torch.float32", (3, 4), 48)
    assert [path.name for path in Path(bucket.path).parent.iterdir()] == ["bucket.safetensors"]


def test_rewritten_bucket_keeps_tensors_read_before(bucket: Bucket, tensors: dict[str, Tensor]) -> None:
    read = read_bucket(bucket)
    write_bucket(Path(bucket.path), {name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    assert torch.equal(read["model.b"], tensors["model.b"])


@pytest.mark.parametrize("where", [0, 40, -1], ids=["length of the header", "header", "last tensor"])
def test_a_flipped_byte_is_noticed(bucket: Bucket, where: int) -> None:
    path = Path(bucket.path)
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightSyncError, match=f"checksum .* {bucket.checksum} was sent"):
        read_bucket(bucket)


def test_a_cut_file_is_noticed(bucket: Bucket) -> None:
    os.truncate(bucket.path, os.path.getsize(bucket.path) - 1)
    with pytest.raises(WeightSyncError, match="checksum"):
        read_bucket(bucket)


def test_missing_bucket_file_raises_with_requirement(bucket: Bucket) -> None:
    os.remove(bucket.path)
    with pytest.raises(WeightSyncError, match="share a host"):
        verify_file(bucket)


def test_unwritable_bucket_is_named(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    (tmp_path / "full.partial").mkdir()
    for path in (tmp_path / "full.safetensors", tmp_path / "missing" / "bucket.safetensors"):
        with pytest.raises(WeightSyncError) as raised:
            write_bucket(path, tensors)
        assert str(path) in str(raised.value) and "MiB are free" in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [{"name": "model.c"}, {"shape": (4, 3)}, {"dtype": "torch.float16"}, {"nbytes": 47}],
    ids=lambda change: next(iter(change)),
)
def test_tensor_differing_from_sent_is_named(bucket: Bucket, change: dict[str, object]) -> None:
    sent = replace(bucket.tensors[0], **change)
    with pytest.raises(WeightSyncError, match=f"{sent.name} was sent as"):
        read_bucket(replace(bucket, tensors=(sent, *bucket.tensors[1:])))


def test_a_tensor_that_was_not_announced_is_named(bucket: Bucket) -> None:
    with pytest.raises(WeightSyncError, match="were not sent: model.b"):
        read_bucket(replace(bucket, tensors=bucket.tensors[1:]))


def test_a_spec_describes_a_tensor() -> None:
    assert spec("w", torch.zeros(2, 3, dtype=torch.bfloat16)) == TensorSpec("w", "torch.bfloat16", (2, 3), 12)
