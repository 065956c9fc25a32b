"""Trainer to engine: pause, move, verify, resume.

    trainer   gather 0 | gather 1 | gather 2 | gather 3 |
    engines            | load 0   | load 1   | load 2   | load 3

While the engines load one bucket the trainer gathers the next. Two slots alternate, so buckets take the room of two.
Each wait has a deadline, kept by the group of workers that is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from roll.errors import WeightSyncError
from roll.types import TensorSpec
from roll.weight_sync.bucket import Adapter, Bucket, plan_buckets
from roll.weight_sync.device import SLOTS, DeviceBucket


class Sender(Protocol):
    """The trainer, as the sync sees it."""

    async def tensors(self) -> list[TensorSpec]:
        """What the whole model consists of."""
        ...

    async def send_bucket(self, names: Sequence[str], slot: int) -> Bucket | DeviceBucket:
        """Gather some tensors into a slot that no engine reads any more."""
        ...

    async def empty_buckets(self) -> None:
        """Give the slots' memory back."""
        ...

    async def send_adapter(self) -> Adapter:
        """Gather the adapter."""
        ...


class Receiver(Protocol):
    """The engines, as the sync sees them."""

    async def pause(self) -> None:
        """Stop producing tokens."""
        ...

    async def load_bucket(self, bucket: Bucket | DeviceBucket) -> None:
        """Take some of the weights."""
        ...

    async def load_adapter(self, adapter: Adapter) -> None:
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

    def __init__(self, sender: Sender, receiver: Receiver, adapter: bool, bucket_bytes: int) -> None:
        self._sender, self._receiver = sender, receiver
        self._adapter, self._bucket_bytes = adapter, bucket_bytes
        self._tensors: list[TensorSpec] = []

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
        await self._receiver.load_adapter(await self._sender.send_adapter())

    async def _push_model(self) -> None:
        self._tensors = self._tensors or await self._sender.tensors()
        sent: Bucket | DeviceBucket | None = None
        for number, names in enumerate(plan_buckets(self._tensors, self._bucket_bytes)):
            sent = await self._send_while_loading(names, number % SLOTS, sent)
        if sent is not None:
            await self._receiver.load_bucket(sent)
        await self._sender.empty_buckets()

    async def _send_while_loading(self, names: Sequence[str], slot: int, sent: Bucket | DeviceBucket | None) -> Bucket | DeviceBucket:
        """Send the next bucket while the engines load the one before. If one side fails, the other is given up."""
        try:
            async with asyncio.TaskGroup() as sides:
                sending = sides.create_task(self._sender.send_bucket(names, slot))
                if sent is not None:
                    sides.create_task(self._receiver.load_bucket(sent))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        return sending.result()
