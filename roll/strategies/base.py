"""The protocols of backends, by job: train, score given sequences, or generate.

A strategy lives in one process of its role. Methods of training and scoring are collective: every rank of the
role calls them with the same number of micro-batches.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from roll.algorithms.losses import Loss
from roll.types import Floats, Ints, Metrics, NumberedCompletions, Sampling, Sequences, TensorSpec, TrainBatch
from roll.weight_sync.bucket import Adapter, Bucket
from roll.weight_sync.device import DeviceBucket
from roll.weight_sync.routes import Rendezvous, Route


@dataclass(frozen=True)
class Rank:
    """Identifies a process of a role, and how it reaches the others."""

    role: str
    rank: int
    world_size: int
    master_address: str
    master_port: int
    device: str
    """`cpu` or `cuda`. A worker sees only its own CUDA devices: one, or those of its engine."""
    timeout: float
    """Deadline of a collective operation in seconds."""
    devices: tuple[int, ...] = ()
    """Numbers of its devices, counted across all nodes."""
    replica_size: int = 1
    """Number of neighbouring ranks that work on the same micro-batches."""
    start_timeout: float = 900.0
    """Deadline in seconds for building the strategy, which the driver waits for."""


@dataclass(frozen=True)
class MicroBatch:
    """The data of one forward and backward pass."""

    batch: TrainBatch
    loss_weights: Floats
    """[T], see `algorithms.aggregation`."""
    samples: tuple[int, ...] = ()
    """[N], positions of the sequences in the step's batch, for reports."""


@dataclass(frozen=True)
class TrainResult:
    """One replica's share of a training step."""

    sums: Metrics
    """Sum of each metric over this replica's response tokens."""
    tokens: int
    """Number of response tokens in `sums`."""
    scalars: Metrics
    """Values that are the same on every rank: gradient norm, learning rate, skipped updates."""
    counted_sums: Metrics = field(default_factory=dict)
    """Sums of metrics that only some tokens, sequences or pairs have."""
    counts: Metrics = field(default_factory=dict)
    """Number of values in each sum of `counted_sums`."""


@dataclass(frozen=True)
class EngineActivity:
    """Activity of an engine since the previous call, or since its start. None marks what its backend does not count."""

    busy_seconds: float
    """Seconds in which the engine had a request in flight and was neither paused nor off its device."""
    generated_tokens: int
    prefilled_tokens: int
    """Prompt tokens outside the prefix cache, and tokens of preempted requests, which are computed again."""
    preemptions: int | None = None
    """Number of times that a request lost its KV cache, for lack of room or because of new weights."""
    running: float | None = None
    """Mean number of requests in a forward pass. None if there was no pass."""
    waiting: float | None = None
    """Mean number of requests that waited for room during a forward pass. None if there was no pass."""
    kv_cache_use: float | None = None
    """Largest share of the KV cache that was in use, 0 to 1."""
    tokens_in_flight: int | None = None
    """At present: prompt and sampled tokens of unanswered requests. The prompt counts for each sample."""


class TrainStrategy(Protocol):
    """A model that learns: a policy, or a critic, which is neither synced nor exported."""

    def train_step(self, updates: Sequence[Sequence[MicroBatch]], loss: Loss, temperature: float, policy_version: int) -> TrainResult:
        """Run one optimizer update for each list of micro-batches. `policy_version` is the version before the first."""
        ...

    def evaluate(self, micro_batches: Sequence[MicroBatch], loss: Loss, temperature: float) -> TrainResult:
        """Return the loss's metrics on held-out micro-batches, without a gradient."""
        ...

    def log_probs(self, micro_batches: Sequence[Sequences], temperature: float, adapter: bool) -> list[Floats]:
        """Return log-probs [T] of each micro-batch, 0 outside the response mask. `adapter=False` leaves LoRA out."""
        ...

    def values(self, micro_batches: Sequence[Sequences]) -> list[Floats]:
        """Return a critic's values [T] of each micro-batch: the expected return before each token, 0 outside the response mask."""
        ...

    def tensors(self, adapter: bool) -> list[TensorSpec]:
        """Describe the tensors to send: the adapter's, or the whole model's with any adapter merged in."""
        ...

    def gathered(self, names: Sequence[str], adapter: bool) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Gather whole tensors, by their names in `tensors(adapter)`, on every rank while the block lasts. Collective."""
        ...

    def adapter_config(self) -> str:
        """Return PEFT's `adapter_config.json` of the trained adapter."""
        ...

    def save(self, folder: Path) -> None:
        """Write the state that `load` needs to continue exactly: trained weights, optimizer, schedule, random states."""
        ...

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote."""
        ...

    def export(self, folder: Path) -> None:
        """Write the policy as a folder for `from_pretrained`: Hugging Face's, or PEFT's for an adapter."""
        ...

    def offload(self) -> None:
        """Free the device's memory for other roles. Nothing is computed until `onload`. Idempotent."""
        ...

    def onload(self) -> None:
        """Return to the device, with bitwise the same values."""
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
        """Free the device's memory for other roles. Nothing is computed until `onload`. Idempotent."""
        ...

    def onload(self) -> None:
        """Return to the device, with bitwise the same values."""
        ...

    def close(self) -> None:
        """Leave the process group and free all memory."""
        ...


class TeachStrategy(ScoreStrategy, Protocol):
    """A fixed teacher model of a student."""

    def states(self, micro_batches: Sequence[Sequences]) -> list[Floats]:
        """Return the last hidden states [S, H] of each micro-batch, from which its S response tokens are predicted."""
        ...


class GenerateStrategy(Protocol):
    """A policy that answers prompts. It loads new weights between answers or during them."""

    async def start(self) -> None:
        """Load the model and prepare to generate."""
        ...

    def generate(self, token_ids: Ints, sampling: Sampling, seed: int | None) -> AsyncGenerator[NumberedCompletions, None]:
        """Yield `sampling.samples` completions of one prompt as they end. Concurrent calls are batched. A seed reproduces the samples."""
        ...

    async def pause(self) -> None:
        """Stop generating until `resume`. Requests in flight are kept, and new ones wait."""
        ...

    async def open_route(self, route: Route, rendezvous: Rendezvous | None) -> None:
        """Prepare for buckets on this route. Files need no preparation. Waits for the other members of a broadcast."""
        ...

    async def load_bucket(self, bucket: Bucket | DeviceBucket) -> None:
        """Load some of the model's weights. The first bucket opens an update.

        Raises:
            WeightSyncError: the bucket is not what was sent. The engine is then between two models and only fit to be closed.
        """
        ...

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load a LoRA adapter.

        Raises:
            WeightSyncError: the adapter is not what was sent. The one before is still in place.
        """
        ...

    async def resume(self, policy_version: int) -> None:
        """Close the update, if one is open, and generate again, now with this version.

        Raises:
            WeightSyncError: some of the model's weights were not sent. The engine is then only fit to be closed.
        """
        ...

    async def policy_version(self) -> int:
        """Return the version of the weights that the engine generates with."""
        ...

    async def activity(self) -> EngineActivity:
        """Return the engine's activity since the last call. Returns at once, also while the engine is paused or off its device."""
        ...

    async def cause_of_death(self) -> str | None:
        """Return why the engine cannot continue, such as the end of a process that it needs, or None if it can. Returns at once."""
        ...

    async def offload(self, discard: bool) -> None:
        """Give the device's memory up to other roles, once every request is answered. Twice is once.

        `discard` says that all weights will be sent again before the next request, so they need not be kept.
        """
        ...

    async def onload(self, whole: bool) -> None:
        """Return to the device: with only the weights, ready to load new ones, or `whole`, ready to generate.

        Raises:
            WeightSyncError: it is to be whole, and the weights that it discarded were not sent again.
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

    async def scores(self, sequences: Sequence[Ints]) -> list[float]:
        """Return the score of each sequence at its last token. Concurrent calls are batched. A sequence has at least two tokens."""
        ...

    async def offload(self) -> None:
        """Give the device's memory up to other roles, once every request is answered. Twice is once."""
        ...

    async def onload(self) -> None:
        """Return to the device, with the same values."""
        ...

    async def close(self) -> None:
        """Free what is held."""
        ...
