from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from roll.errors import WeightSyncError
from roll.types import TensorSpec
from roll.weight_sync.bucket import Adapter, Bucket, read_bucket, spec, write_adapter, write_bucket
from roll.weight_sync.device import DeviceBucket
from roll.weight_sync.sync import WeightSync


class FakeSender:
    """A trainer of five fp32 tensors of 16 bytes and an adapter of one."""

    def __init__(self, log: list[str], receiver: FakeReceiver, folder: Path) -> None:
        self.log, self.receiver, self.folder = log, receiver, folder
        self.weights = {f"w{number}": torch.full((4,), float(number)) for number in range(5)}
        self.lora = {"lora": torch.ones(2)}

    async def tensors(self) -> list[TensorSpec]:
        return [spec(name, tensor) for name, tensor in self.weights.items()]

    async def send_bucket(self, names: Sequence[str], slot: int) -> Bucket:
        path = self.folder / f"bucket{slot}.safetensors"
        assert str(path) not in self.receiver.loading, "a bucket was overwritten while the engine loads it"
        self.log.append(f"write {path.name} {' '.join(names)}")
        await asyncio.sleep(0)
        if "w4" in names and self.receiver.fails_late:
            raise WeightSyncError("the trainer died")
        return write_bucket(path, {name: self.weights[name] for name in names})

    async def empty_buckets(self) -> None:
        self.log.append("empty")

    async def send_adapter(self) -> Adapter:
        self.log.append("adapter")
        return write_adapter(self.folder, '{"r": 8}', self.lora)


class FakeReceiver:
    """Two engines that take their time to load."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.loading: set[str] = set()
        self.most_loading = 0
        self.loaded: dict[str, torch.Tensor] = {}
        self.versions = [0, 0]
        self.stuck_engine = False
        self.fails_late = False
        self.fails_on = ""
        self.cancelled = False

    async def pause(self) -> None:
        self.log.append("pause")

    async def load_bucket(self, bucket: Bucket | DeviceBucket) -> None:
        assert isinstance(bucket, Bucket)
        self.loading.add(bucket.path)
        self.most_loading = max(self.most_loading, len(self.loading))
        try:
            for _ in range(10):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        finally:
            self.loading.remove(bucket.path)
        if any(tensor.name == self.fails_on for tensor in bucket.tensors):
            raise WeightSyncError(f"{self.fails_on} is broken")
        self.loaded |= {name: tensor.clone() for name, tensor in read_bucket(bucket).items()}
        self.log.append(f"loaded {Path(bucket.path).name}")

    async def load_adapter(self, adapter: Adapter) -> None:
        with adapter.folder() as folder:
            assert (folder / "adapter_config.json").read_text() == '{"r": 8}'
            self.loaded |= read_bucket(adapter.weights)
        self.log.append("loaded adapter")

    async def resume(self, policy_version: int) -> None:
        self.log.append(f"resume {policy_version}")
        self.versions = [policy_version, self.versions[1] if self.stuck_engine else policy_version]

    async def policy_versions(self) -> list[int]:
        return self.versions


def sync(folder: Path, adapter: bool = False) -> tuple[WeightSync, FakeSender, FakeReceiver, list[str]]:
    log: list[str] = []
    receiver = FakeReceiver(log)
    sender = FakeSender(log, receiver, folder)
    return WeightSync(sender, receiver, adapter, bucket_bytes=32), sender, receiver, log


def test_the_engine_is_paused_loaded_bucket_by_bucket_and_resumed(tmp_path: Path) -> None:
    weight_sync, sender, receiver, log = sync(tmp_path)
    asyncio.run(weight_sync.push(3))
    assert log == [
        "pause",
        "write bucket0.safetensors w0 w1",
        "write bucket1.safetensors w2 w3",
        "loaded bucket0.safetensors",
        "write bucket0.safetensors w4",
        "loaded bucket1.safetensors",
        "loaded bucket0.safetensors",
        "empty",
        "resume 3",
    ]
    assert receiver.loaded.keys() == sender.weights.keys()
    assert all(torch.equal(receiver.loaded[name], tensor) for name, tensor in sender.weights.items())
    assert receiver.most_loading == 1


def test_two_files_serve_any_number_of_buckets(tmp_path: Path) -> None:
    weight_sync, sender, receiver, _ = sync(tmp_path)
    sender.weights = {f"w{number}": torch.full((8,), float(number)) for number in range(9)}
    asyncio.run(weight_sync.push(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bucket0.safetensors", "bucket1.safetensors"]
    assert all(torch.equal(receiver.loaded[name], tensor) for name, tensor in sender.weights.items())


def test_an_adapter_travels_as_a_peft_folder(tmp_path: Path) -> None:
    weight_sync, sender, receiver, log = sync(tmp_path, adapter=True)
    asyncio.run(weight_sync.push(1))
    assert log == ["pause", "adapter", "loaded adapter", "resume 1"]
    assert torch.equal(receiver.loaded["lora"], sender.lora["lora"])


def test_an_engine_at_another_version_is_an_error(tmp_path: Path) -> None:
    weight_sync, _, receiver, _ = sync(tmp_path)
    receiver.stuck_engine = True
    with pytest.raises(WeightSyncError, match="an engine is at policy version 0 after a sync to 4"):
        asyncio.run(weight_sync.push(4))


@pytest.mark.parametrize("broken", ["w0", "w2", "w4"], ids=["first bucket", "middle", "last"])
def test_a_bucket_that_does_not_load_ends_the_sync_before_the_engine_resumes(tmp_path: Path, broken: str) -> None:
    weight_sync, _, receiver, log = sync(tmp_path)
    receiver.fails_on = broken
    with pytest.raises(WeightSyncError, match=f"{broken} is broken"):
        asyncio.run(weight_sync.push(1))
    assert not any(line.startswith("resume") for line in log)


def test_a_trainer_that_fails_leaves_no_load_behind(tmp_path: Path) -> None:
    weight_sync, _, receiver, log = sync(tmp_path)
    receiver.fails_late = True

    async def push() -> None:
        with pytest.raises(WeightSyncError, match="the trainer died"):
            await weight_sync.push(1)
        assert not receiver.loading
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(push())
    assert not any(line.startswith("resume") for line in log)
