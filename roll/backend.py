"""The protocols of backends: training, scoring of given sequences, generation, and reward models.

A strategy runs in one process of its role. The methods of training and scoring strategies are collective: every rank of
the role must call them with the same number of micro-batches.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from roll.types import (
    AskedPictures,
    Floats,
    Ints,
    Metrics,
    NumberedCompletions,
    Pictures,
    Sampling,
    Sequences,
    TensorSpec,
    TrainBatch,
)
from roll.weight_sync.routes import MeetingPoint, Rendezvous, Route

if TYPE_CHECKING:  # the driver builds `Rank` before it imports torch
    from torch import Tensor

    from roll.algorithms.losses import Loss
    from roll.weight_sync.bucket import Adapter, Bucket
    from roll.weight_sync.device import DeviceBucket


@dataclass(frozen=True)
class Rank:
    """The identity of one process of a role, and the settings of its process group."""

    role: str
    rank: int
    world_size: int
    master_address: str
    master_port: int
    device: str
    """`cpu` or `cuda`. A worker sees only its own CUDA devices: one device, or the devices of its engine."""
    timeout: float
    """Deadline of a collective operation, in seconds."""
    devices: tuple[int, ...] = ()
    """Indices of its devices, counted across all nodes."""
    replica_size: int = 1
    """Number of neighbouring ranks that work on the same micro-batches."""
    start_timeout: float = 900.0
    """Deadline for building the strategy, in seconds. The driver waits that long."""
    meeting_file: str = ""
    """File by which the ranks find each other, if all are on the driver's host; see `MeetingPoint`."""

    @property
    def meeting_point(self) -> MeetingPoint:
        """Where the ranks of the role find each other."""
        return MeetingPoint(self.master_address, self.master_port, self.meeting_file)

    def seed(self, of_run: int) -> int:
        """Return a 32-bit seed for this process's own random numbers, other than those of other ranks, roles and runs.

        Two engines with the same seed would answer the same prompt alike.
        """
        return int(np.random.SeedSequence([of_run, self.rank, *self.role.encode()]).generate_state(1)[0])


@dataclass(frozen=True)
class MicroBatch:
    """The data of one forward and backward pass."""

    batch: TrainBatch
    loss_weights: Floats
    """[T], weight of each token in the loss, see `data.packing`."""
    samples: tuple[int, ...] = ()
    """[N], positions of the sequences in the step's batch, for error reports."""


@dataclass(frozen=True)
class TrainStepResult:
    """One replica's share of a training step."""

    sums: Metrics
    """Sum of each metric over this replica's response tokens."""
    tokens: int
    """Number of response tokens in `sums`."""
    scalars: Metrics
    """Values that are the same on every rank: gradient norm, learning rate, skipped updates."""
    counted_sums: Metrics = field(default_factory=dict)
    """Sums of metrics that exist only for some tokens, sequences or pairs."""
    counts: Metrics = field(default_factory=dict)
    """Number of values in each sum of `counted_sums`."""


@dataclass(frozen=True)
class EngineActivity:
    """Activity of an engine since the last call, or its start. Fields are None if the backend does not measure them."""

    busy_seconds: float
    """Seconds during which the engine had a request in flight and was neither paused nor offloaded."""
    generated_tokens: int
    prefilled_tokens: int
    """Prompt tokens that were not in the prefix cache, plus tokens of preempted requests that were recomputed."""
    preemptions: int | None = None
    """Number of times that a request lost its KV cache, because the cache was full or because of new weights."""
    running: float | None = None
    """Mean number of requests in a forward pass. None if there was no pass."""
    waiting: float | None = None
    """Mean number of requests that waited for KV cache during a forward pass. None if there was no pass."""
    kv_cache_use: float | None = None
    """Largest fraction of the KV cache in use, 0 to 1."""
    tokens_in_flight: int | None = None
    """Current number of prompt and sampled tokens of unfinished requests. The prompt counts once per sample."""
    proposed_tokens: int | None = None
    """Number of tokens that a draft proposed. None without speculative decoding."""
    accepted_tokens: int | None = None
    """Number of proposed tokens that became part of a response."""


class TrainStrategy(Protocol):
    """A model in training: a policy, a reward model, or a critic, which is neither synced nor exported."""

    def train_step(
        self, updates: Sequence[Sequence[MicroBatch]], loss: Loss, temperature: float, policy_version: int
    ) -> TrainStepResult:
        """Run one optimizer update per list of micro-batches. `policy_version` is that before the first update."""
        ...

    def evaluate(self, micro_batches: Sequence[MicroBatch], loss: Loss, temperature: float) -> TrainStepResult:
        """Return the metrics of the loss on held-out micro-batches, without computing gradients."""
        ...

    def log_probs(self, micro_batches: Sequence[Sequences], temperature: float, adapter: bool) -> list[Floats]:
        """Return log-probs [T] of each micro-batch, 0 outside the mask. `adapter=False` disables the LoRA adapter."""
        ...

    def averaged_log_probs(self, micro_batches: Sequence[Sequences], temperature: float) -> list[Floats]:
        """Return log-probs as `log_probs` does, under the moving average of the weights that the settings ask for."""
        ...

    def values(self, micro_batches: Sequence[Sequences]) -> list[Floats]:
        """Return a critic's values [T] of each micro-batch: the expected return before a token; 0 outside the mask."""
        ...

    def tensors(self, adapter: bool) -> list[TensorSpec]:
        """Return the specifications of the tensors to send: the adapter's, or the whole model's with it merged in."""
        ...

    def gathered(self, names: Sequence[str], adapter: bool) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Return a context that gathers whole tensors, by name in `tensors(adapter)`, on every rank. Collective."""
        ...

    def adapter_config(self) -> str:
        """Return the content of PEFT's `adapter_config.json` for the trained adapter."""
        ...

    def save(self, folder: Path) -> None:
        """Write the state that `load` needs to continue exactly: weights, optimizer, schedule and random states."""
        ...

    def load(self, folder: Path) -> None:
        """Restore the state written by `save`."""
        ...

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder for `from_pretrained`, or an adapter as a PEFT folder."""
        ...

    def offload(self) -> None:
        """Free GPU memory for other roles. No other method may be called until `onload`. Idempotent."""
        ...

    def onload(self) -> None:
        """Move the state back to the device, with bitwise identical values."""
        ...

    def close(self) -> None:
        """Leave the process group and free all memory."""
        ...


class ScoreStrategy(Protocol):
    """A fixed policy that computes the log-probs of given sequences."""

    def log_probs(self, micro_batches: Sequence[Sequences], temperature: float) -> list[Floats]:
        """Return log-probs [T] of each micro-batch, 0 outside the response mask."""
        ...

    def offload(self) -> None:
        """Free GPU memory for other roles. No other method may be called until `onload`. Idempotent."""
        ...

    def onload(self) -> None:
        """Move the state back to the device, with bitwise identical values."""
        ...

    def close(self) -> None:
        """Leave the process group and free all memory."""
        ...


class TeachStrategy(ScoreStrategy, Protocol):
    """A fixed teacher model for distillation."""

    def states(self, micro_batches: Sequence[Sequences]) -> list[Floats]:
        """Return the teacher's output for S response tokens of each micro-batch: states [S, H] or encoded top k."""
        ...


class GenerateStrategy(Protocol):
    """A policy that generates completions. It can load new weights while requests are in flight."""

    async def start(self) -> None:
        """Load the model and prepare to generate."""
        ...

    def generate(
        self, token_ids: Ints, sampling: Sampling, seed: int | None, shown: AskedPictures | None = None
    ) -> AsyncGenerator[NumberedCompletions, None]:
        """Yield `sampling.samples` completions of a prompt as they finish, reproducibly with a seed. Concurrent.

        Args:
            token_ids: [P], the prompt, with as many placeholders of its pictures as the model needs.
            shown: the pictures. None if the prompt shows none.
        """
        ...

    async def pause(self) -> None:
        """Stop generating until `resume`. Requests in flight are kept, and new requests wait."""
        ...

    async def open_route(self, route: Route, rendezvous: Rendezvous | None) -> None:
        """Prepare for buckets on this route. On a broadcast route, wait for the other members. Files need none."""
        ...

    async def load_bucket(self, bucket: Bucket | DeviceBucket) -> None:
        """Load a part of the model's weights. The first bucket opens an update.

        Raises:
            WeightSyncError: the bucket does not match what was sent. The engine then has a mixture of weights and must
                be closed.
        """
        ...

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load a LoRA adapter. Raises WeightSyncError, and keeps the previous one, if it is not what was sent."""
        ...

    async def resume(self, policy_version: int) -> int:
        """Close the update, if one is open, and generate again. `policy_version` is the version of the weights from now
        on. Return the engine's own answer to `policy_version()`, to save the caller that call.

        Raises:
            WeightSyncError: some of the model's weights were not sent. The engine must then be closed.
        """
        ...

    async def abandon_update(self) -> None:
        """Close an update that the trainer cannot complete, once the bucket in progress is loaded.

        Until a complete update the engine has a mixture of weights, and stays paused.

        Raises:
            WeightSyncError: the engine cannot load another update. It must then be closed.
        """
        ...

    async def policy_version(self) -> int:
        """Return the version of the weights that the engine generates with."""
        ...

    async def activity(self) -> EngineActivity:
        """Return the engine's activity since the last call. Never blocks, even while it is paused or offloaded."""
        ...

    async def cause_of_death(self) -> str | None:
        """Return why the engine cannot continue, such as a death of a process; None if it can. Does not block."""
        ...

    async def offload(self, discard: bool) -> None:
        """Free GPU memory for other roles. Idempotent.

        With `discard`, the weights need not be kept, because all of them will be sent again before the next request.
        """
        ...

    async def onload(self, whole: bool) -> None:
        """Move back to the device: only the weights, to load new ones, or the `whole` engine, to generate.

        Raises:
            WeightSyncError: `whole` is true, but the discarded weights were not sent again.
        """
        ...

    async def close(self) -> None:
        """Stop the engine and its processes."""
        ...


class RewardStrategy(Protocol):
    """A fixed classifier that scores sequences for rewards."""

    async def start(self) -> None:
        """Load the model."""
        ...

    async def scores(self, sequences: Sequence[Ints], shown: Sequence[Pictures | None] = ()) -> list[float]:
        """Return the score of each sequence, of two tokens or more, at its last token. Concurrent calls are batched.

        `shown` are the pictures of each sequence, or nothing at all.
        """
        ...

    async def offload(self) -> None:
        """Free GPU memory for other roles, once every request is answered. Idempotent."""
        ...

    async def onload(self) -> None:
        """Move the model back to the device, with the same values."""
        ...

    async def close(self) -> None:
        """Free the model and stop its processes."""
        ...
