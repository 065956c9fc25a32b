"""Facades of the roles that train or score: the policy, the value function, and the reference and teachers, whose
sequences are distributed over the replicas and reassembled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from roll.algorithms.losses import Loss
from roll.backend import MicroBatch, Rank, ScoreStrategy, TeachStrategy, TrainStepResult, TrainStrategy
from roll.config.derived.flops import gpu_rates
from roll.data import packing
from roll.data.packing import loss_weights
from roll.errors import HostUnreachable, WeightSyncError
from roll.models.flops import TrainingFlops
from roll.ray.batching import Calls, Ranks
from roll.ray.device_sharing import Residency
from roll.ray.group import WorkerGroup
from roll.ray.host_folders import HostFolders
from roll.system.ranges import ranges
from roll.types import Floats, Metrics, Sequences, TensorSpec, TrainBatch
from roll.weight_sync.bucket import Adapter, Bucket
from roll.weight_sync.device import DeviceBucket, cut_off
from roll.weight_sync.routes import MeetingPoint, Rendezvous, SyncRoutes, Transport
from roll.weight_sync.transfer import BucketSender


def share_out(sequences: Sequences, replicas: int, token_budget: int) -> tuple[packing.Split, list[list[Sequences]]]:
    """Split sequences into micro-batches. Return the split, and the micro-batches of each replica, without routes."""
    return share_out_with_routes(replace(sequences, routes=None), replicas, token_budget)


def share_out_with_routes(
    sequences: Sequences, replicas: int, token_budget: int
) -> tuple[packing.Split, list[list[Sequences]]]:
    """Do the same for the policy, whose routers replay the routes."""
    split = packing.split_to_budget(sequences.lengths, replicas, token_budget)
    return split, [[packing.select(sequences, indices) for indices in forwards] for forwards in split.ranks]


def gather_tokens(sequences: Sequences, split: packing.Split, results: Sequence[Sequence[Floats]]) -> Floats:
    """Return all replicas' and micro-batches' results as one array [T], in order of `sequences`, without filler."""
    out = np.zeros(len(sequences.token_ids), np.float32)
    for forwards, values in zip(split.ranks, results, strict=True):
        for indices, part in zip(forwards, values, strict=True):
            if indices:
                out[packing.token_positions(sequences.offsets, indices)] = part
    return out


class Reference:
    """Facade of a group that computes log-probs under a model with constant weights."""

    def __init__(
        self,
        group: WorkerGroup[ScoreStrategy],
        token_budget: int,
        temperature: float,
        seconds: float,
        move_seconds: float,
    ) -> None:
        self._group, self._token_budget, self._temperature = group, token_budget, temperature
        self._seconds, self._move_seconds = seconds, move_seconds

    async def ref_log_probs(self, sequences: Sequences) -> Floats:
        """Return the natural log-probs [T] of the response tokens, 0 for other tokens."""
        split, parts = share_out(sequences, self._group.replicas, self._token_budget)
        arguments = [(part, self._temperature) for part in parts]
        results = await self._group.paced.within(self._seconds).each_replica(ScoreStrategy.log_probs, arguments)
        return gather_tokens(sequences, split, results)

    async def offload(self, discard: bool) -> int | None:
        """See `ColocatedRole`. Always keeps the weights."""
        await self._group.within(self._move_seconds).all(ScoreStrategy.offload)
        return await self._group.held_bytes()

    async def onload(self, level: Residency) -> None:
        """See `ColocatedRole`. A reference has only its weights."""
        await self._group.within(self._move_seconds).all(ScoreStrategy.onload)


class Teacher(Reference):
    """Facade of a group with a teacher model for distillation."""

    def __init__(
        self, group: WorkerGroup[TeachStrategy], token_budget: int, seconds: float, move_seconds: float
    ) -> None:
        super().__init__(group, token_budget, 1.0, seconds, move_seconds)
        self._teachers = group

    async def states(self, sequences: Sequences) -> Floats:
        """Return the teacher's outputs [S, W] for S response tokens in order: states, or its wrapper's output."""
        split, parts = share_out(sequences, self._teachers.replicas, self._token_budget)
        results = await self._teachers.paced.within(self._seconds).each_replica(
            TeachStrategy.states, [(part,) for part in parts]
        )
        forwards = [
            pair for rank in zip(split.ranks, results, strict=True) for pair in zip(*rank, strict=True) if pair[0]
        ]
        out = np.empty((int(sequences.response_mask.sum()), forwards[0][1].shape[1]), np.float32)
        for indices, values in forwards:
            out[packing.response_rows(sequences, indices)] = values
        return out


T = TypeVar("T")
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainShape:
    """Settings of how a step's sequences are split into updates and forward passes, and of the losses."""

    updates: int
    """Number of optimizer updates in one pass over a step's sequences."""
    epochs: int
    """Number of passes over a step's sequences."""
    token_budget: int
    """Largest number of tokens in one forward pass."""
    loss_agg_mode: str
    temperature: float
    loss_scale: float = 1.0
    """Number of tokens that `seq-mean-token-sum-norm` divides by."""
    attention_cost: float = 0.0
    """Attention cost of the model (`ModelShape`). If 0, sequences are balanced by their numbers of tokens alone."""
    flops: TrainingFlops | None = None
    """Counts the model's FLOPs. None if the model's shape is unknown or its dtype is fp32."""


class Learner:
    """Facade of a group that is trained."""

    def __init__(
        self,
        group: WorkerGroup[TrainStrategy],
        shape: TrainShape,
        train_seconds: float,
        sync_seconds: float,
        save_seconds: float,
    ) -> None:
        self._group, self._shape = group, shape
        self._train_seconds, self._sync_seconds, self._save_seconds = train_seconds, sync_seconds, save_seconds
        self._folders = HostFolders(group, save_seconds)

    async def train_step(self, batch: TrainBatch, loss: Loss, policy_version: int) -> Metrics:
        """Run the updates of one step. Return its metrics, averaged over replicas and updates as described at `merge`.

        The number of updates is fixed. If some responses have no verdict, updates become smaller, not fewer.
        """
        shape = self._shape
        batch = replace(batch, token_selection=loss.token_selection(batch))
        replicas: list[list[list[MicroBatch]]] = [[] for _ in range(self._group.replicas)]
        for update in packing.updates_of(batch, shape.updates) * shape.epochs:
            for replica, micro_batches in enumerate(micro_batches_of(batch, update, len(replicas), shape)):
                replicas[replica].append(micro_batches)
        arguments = [(updates, loss, shape.temperature, policy_version) for updates in replicas]
        return merge(
            await self._group.paced.within(self._train_seconds).each_replica(TrainStrategy.train_step, arguments)
        )

    async def evaluate(self, batch: TrainBatch, loss: Loss) -> list[TrainStepResult]:
        """Return the loss's metrics on a held-out batch, one result for each replica. `merge` averages them."""
        replicas = micro_batches_of(batch, range(len(batch)), self._group.replicas, self._shape)
        arguments = [(micro_batches, loss, self._shape.temperature) for micro_batches in replicas]
        return await self._group.paced.within(self._train_seconds).each_replica(TrainStrategy.evaluate, arguments)

    async def save(self, folder: Path) -> None:
        """Write the training state, so that training continues exactly after `load`."""
        async with self._folders.written(folder) as of_ranks:
            await self._group.within(self._save_seconds).each(TrainStrategy.save, [(own,) for own in of_ranks])

    async def load(self, folder: Path) -> None:
        """Restore the training state that `save` wrote."""
        async with self._folders.brought(folder) as of_ranks:
            await self._group.within(self._save_seconds).each(TrainStrategy.load, [(own,) for own in of_ranks])

    async def offload(self, discard: bool) -> int | None:
        """See `ColocatedRole`. Always keeps the weights, because no other role has them."""
        await self._group.within(self._sync_seconds).all(TrainStrategy.offload)
        return await self._group.held_bytes()

    async def onload(self, level: Residency) -> None:
        """See `ColocatedRole`. Onloads everything."""
        await self._group.within(self._sync_seconds).all(TrainStrategy.onload)


class ActorTrain(Learner):
    """Facade of the `actor_train` group."""

    def __init__(
        self,
        group: WorkerGroup[TrainStrategy],
        shape: TrainShape,
        folder: Path,
        train_seconds: float,
        sync_seconds: float,
        save_seconds: float,
    ) -> None:
        """`folder` is in this host's shared memory. Files for the weight sync are written there."""
        super().__init__(group, shape, train_seconds, sync_seconds, save_seconds)
        self._folder = folder
        self._senders: Ranks[BucketSender] | None = None
        self._routes = SyncRoutes({}, (), 0)

    async def train_step(self, batch: TrainBatch, loss: Loss, policy_version: int) -> Metrics:
        """See `Learner`. Adds `throughput/mfu`, if the model's FLOPs and the device's peak are known."""
        began = time.perf_counter()
        metrics = await super().train_step(batch, loss, policy_version)
        return metrics | self._utilisation(batch.sequences, time.perf_counter() - began)

    def _utilisation(self, sequences: Sequences, seconds: float) -> Metrics:
        flops, group = self._shape.flops, self._group
        gpu = gpu_rates(group.device_name) if flops and group.device_name else None
        if not flops or not gpu:
            return {}
        done = self._shape.epochs * flops.of(sequences.lengths)
        return {"throughput/mfu": done / (seconds * gpu.bf16_peak * len(group))}

    async def log_probs(self, sequences: Sequences) -> Floats:
        """Return the natural log-probs [T] of the response tokens under the current policy, 0 for other tokens."""
        return await self._score(sequences, adapter=True)

    async def ref_log_probs(self, sequences: Sequences) -> Floats:
        """Return the natural log-probs [T] without the LoRA adapter, that is, under the policy before training."""
        return await self._score(sequences, adapter=False)

    async def averaged_log_probs(self, sequences: Sequences) -> Floats:
        """Return the natural log-probs [T] under the moving average of the policy's weights."""
        split, parts = share_out(sequences, self._group.replicas, self._shape.token_budget)
        results = await self._group.paced.within(self._train_seconds).each_replica(
            TrainStrategy.averaged_log_probs, [(part, self._shape.temperature) for part in parts]
        )
        return gather_tokens(sequences, split, results)

    async def _score(self, sequences: Sequences, adapter: bool) -> Floats:
        share = share_out_with_routes if adapter else share_out  # without the adapter it is the reference
        split, parts = share(sequences, self._group.replicas, self._shape.token_budget)
        arguments = [(part, self._shape.temperature, adapter) for part in parts]
        results = await self._group.paced.within(self._train_seconds).each_replica(TrainStrategy.log_probs, arguments)
        return gather_tokens(sequences, split, results)

    @property
    def host(self) -> str:
        """The address of the host of rank 0."""
        return self._group.host(0)

    async def meeting_point(self, one_host: bool) -> MeetingPoint:
        """See `Sender`."""
        return await self._group.meeting_point([0], self._sync_seconds, one_host)

    async def open_routes(self, routes: SyncRoutes, rendezvous: Rendezvous | None) -> None:
        """See `Sender`."""
        if self._senders is None:
            self._senders = await self._group.colocate(bucket_sender, self._sync_seconds)
        if rendezvous is not None or self._routes.broadcast_size:
            await self._sending.one(0, BucketSender.join_broadcast, rendezvous)
        self._routes = routes

    async def cut_off(self, rendezvous: Rendezvous) -> None:
        """See `Sender`."""
        try:
            await asyncio.to_thread(cut_off, rendezvous)
        except (RuntimeError, TimeoutError, HostUnreachable) as error:  # the next call on rank 0 reports its death
            LOG.info("the broadcast at %s could not be aborted: %s", rendezvous.point, error)

    @property
    def _sending(self) -> Calls[BucketSender]:
        assert self._senders is not None, "weights cannot be sent before open_routes"
        return self._senders.within(self._sync_seconds)

    async def tensors(self) -> list[TensorSpec]:
        """Return descriptions of all tensors of the model."""
        return await self._sending.one(0, BucketSender.tensors)

    async def send_bucket(self, names: Sequence[str], slot: int) -> Bucket | DeviceBucket:
        """Gather the named tensors from all ranks into a bucket for the engines."""
        if any(route.transport is Transport.FILE for route in self._routes.to.values()):
            path = self._folder / f"bucket{slot}.safetensors"
            return of_rank_0(await self._sending.all(BucketSender.write_bucket, names, path))
        arguments = [(names, slot, openers) for openers in self._routes.openers]
        return merge_buckets(await self._sending.each(BucketSender.fill_bucket, arguments))

    async def empty_buckets(self) -> None:
        """Free the buckets' memory on the devices."""
        await self._sending.all(BucketSender.empty_buckets)

    async def send_adapter(self) -> Adapter:
        """Gather the adapter from all ranks, to a folder, or by value if any engine is on another host."""
        is_seen = self._group.is_here(0) and all(route.same_host for route in self._routes.to.values())
        folder = self._folder if is_seen else None
        return of_rank_0(await self._sending.all(BucketSender.write_adapter, folder))

    async def export(self, folder: Path) -> None:
        """Export the policy to a Hugging Face or PEFT folder."""
        async with self._folders.written(folder) as of_ranks:
            await self._group.within(self._save_seconds).each(TrainStrategy.export, [(own,) for own in of_ranks])


def bucket_sender(strategy: TrainStrategy, rank: Rank) -> BucketSender:
    """Return the sender of weights for one rank of the trainer."""
    return BucketSender(strategy, rank.rank, torch.device(rank.device))


def of_rank_0(said: Sequence[T | None]) -> T:
    """Return the result of rank 0. The other ranks only take part in the collectives."""
    assert said[0] is not None, "rank 0 returned nothing"
    return said[0]


def merge_buckets(ranks: Sequence[DeviceBucket]) -> DeviceBucket:
    """Merge the ranks' buckets into one with the handles of each. Raises WeightSyncError if their weights differ."""
    if len({bucket.checksum for bucket in ranks}) > 1:
        having: dict[str, list[int]] = {}
        for rank, bucket in enumerate(ranks):
            having.setdefault(bucket.checksum, []).append(rank)
        said = "; ".join(f"{checksum} on rank(s) {ranges(held)}" for checksum, held in having.items())
        raise WeightSyncError(f"the trainer's ranks gathered different weights: {said}")
    return replace(ranks[0], of_ranks=tuple(handles for bucket in ranks for handles in bucket.of_ranks))


def micro_batches_of(
    batch: TrainBatch, update: Sequence[int], replicas: int, shape: TrainShape
) -> list[list[MicroBatch]]:
    """Return the micro-batches of one update by replica. Examples are never split. Loss weights are computed before the
    split.

    A step with fewer sequences than updates has updates without sequences. In these, all replicas run the filler (see
    `packing.take_sequences`).
    """
    chosen = packing.take_sequences(batch, update)
    if not len(update):
        return [[MicroBatch(chosen, np.zeros(len(chosen.sequences.token_ids), np.float32))] for _ in range(replicas)]
    weights = loss_weights(
        chosen.sequences, shape.loss_agg_mode, shape.loss_scale, chosen.sequence_weights, chosen.episode_of_sequence
    )
    split = packing.split_to_budget(
        chosen.sequences.lengths, replicas, shape.token_budget, shape.attention_cost, chosen.sequences_per_example
    )

    def micro_batch(indices: Sequence[int]) -> MicroBatch:
        samples = tuple(update[index] for index in indices)
        return MicroBatch(
            packing.take_sequences(chosen, indices), packing.select_tokens(weights, chosen.sequences, indices), samples
        )

    return [[micro_batch(indices) for indices in forwards] for forwards in split.ranks]


def merge(results: Sequence[TrainStepResult]) -> Metrics:
    """Turn the replicas' sums into means: over response tokens, or counted tokens, sequences or pairs."""
    metrics = dict(results[0].scalars)
    if tokens := sum(result.tokens for result in results):
        for name in {name for result in results for name in result.sums}:
            metrics[name] = sum(result.sums.get(name, 0.0) for result in results) / tokens
    for name in {name for result in results for name in result.counts}:
        if count := sum(result.counts.get(name, 0.0) for result in results):
            metrics[name] = sum(result.counted_sums.get(name, 0.0) for result in results) / count
    return metrics


class Critic(Learner):
    """Facade of the `critic` group."""

    async def values(self, sequences: Sequences) -> Floats:
        """Return the critic's current values [T] before each response token, 0 for other tokens."""
        split, parts = share_out(sequences, self._group.replicas, self._shape.token_budget)
        results = await self._group.paced.within(self._train_seconds).each_replica(
            TrainStrategy.values, [(part,) for part in parts]
        )
        return gather_tokens(sequences, split, results)

    async def train_step(self, batch: TrainBatch, loss: Loss, policy_version: int) -> Metrics:
        """See `Learner`. Fields that only the policy needs are not sent."""
        own = replace(
            batch, behaviour_log_probs=None, ref_log_probs=None, proximal_log_probs=None, sequence_weights=None
        )
        own = replace(own, sequences=replace(batch.sequences, routes=None))
        return await super().train_step(own, loss, policy_version)
