"""Trainer to engine: pause, move, verify, resume.

    trainer   gather 0 | write 0 | gather 1 | write 1 | gather 2 | write 2 |
    engine                       | verify 0, load 0   | verify 1, load 1   | ...

While the engine loads one bucket the trainer gathers the next; two files alternate, so shared memory holds at most
two buckets. Each wait has a deadline, kept by the group of workers that is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from roll.errors import WeightSyncError
from roll.types import TensorSpec
from roll.weight_sync.bucket import Bucket, plan_buckets


class Sender(Protocol):
    """The trainer, as the sync sees it."""

    async def tensors(self, adapter: bool) -> list[TensorSpec]:
        """What there is to send."""
        ...

    async def write_bucket(self, names: Sequence[str], adapter: bool, path: Path) -> Bucket:
        """Gather some tensors and write them."""
        ...

    async def adapter_config(self) -> str:
        """PEFT's description of the adapter."""
        ...


class Receiver(Protocol):
    """The engines, as the sync sees them."""

    async def pause(self) -> None:
        """Stop producing tokens."""
        ...

    async def load_bucket(self, bucket: Bucket) -> None:
        """Take some of the weights."""
        ...

    async def load_adapter(self, bucket: Bucket) -> None:
        """Take an adapter."""
        ...

    async def resume(self, policy_version: int) -> None:
        """Produce tokens at this version."""
        ...

    async def policy_versions(self) -> list[int]:
        """The version of each engine's weights."""
        ...


class WeightSync:
    """Brings the engines to the trainer's weights, as an adapter or whole."""

    def __init__(self, sender: Sender, receiver: Receiver, adapter: bool, bucket_bytes: int, folder: Path) -> None:
        """`folder` lies in memory that trainer and engines share; whoever made it removes it."""
        self._sender, self._receiver = sender, receiver
        self._adapter, self._bucket_bytes, self._folder = adapter, bucket_bytes, folder

    async def push(self, policy_version: int) -> None:
        """Make every engine generate with the trainer's present weights.

        Raises:
            WeightSyncError: what arrived is not what was sent, or an engine is at another version afterwards.
        """
        await self._receiver.pause()
        await (self._push_adapter() if self._adapter else self._push_model())
        await self._receiver.resume(policy_version)
        if wrong := [version for version in await self._receiver.policy_versions() if version != policy_version]:
            raise WeightSyncError(f"an engine is at policy version {wrong[0]} after a sync to {policy_version}")

    async def _push_adapter(self) -> None:
        names = [tensor.name for tensor in await self._sender.tensors(adapter=True)]
        (self._folder / "adapter_config.json").write_text(await self._sender.adapter_config())
        await self._receiver.load_adapter(await self._sender.write_bucket(names, True, self._folder / "adapter_model.safetensors"))

    async def _push_model(self) -> None:
        buckets = plan_buckets(await self._sender.tensors(adapter=False), self._bucket_bytes)
        written: Bucket | None = None
        for number, names in enumerate(buckets):
            written = await self._write_while_loading(names, self._folder / f"bucket{number % 2}.safetensors", written)
        if written is not None:
            await self._receiver.load_bucket(written)

    async def _write_while_loading(self, names: Sequence[str], path: Path, written: Bucket | None) -> Bucket:
        """Write the next bucket while the engines load the one before. If one side fails, the other is given up."""
        try:
            async with asyncio.TaskGroup() as sides:
                writing = sides.create_task(self._sender.write_bucket(names, False, path))
                if written is not None:
                    sides.create_task(self._receiver.load_bucket(written))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        return writing.result()
