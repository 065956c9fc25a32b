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
    """Which process of a role this is, and how it finds the others."""

    role: str
    rank: int
    world_size: int
    master_address: str
    master_port: int
    device: str
    """`cpu` or `cuda`; a worker sees its own CUDA devices alone: one, or those of its engine."""
    timeout: float
    """Seconds after which a collective operation gives up."""
    devices: tuple[int, ...] = ()
    """Numbers of its devices, counted over all nodes."""
    replica_size: int = 1
    """So many neighbouring ranks work on the same micro-batches."""
    start_timeout: float = 900.0
    """Seconds after which the driver gives up waiting for the strategy to be built."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass trains on."""

    batch: TrainBatch
    loss_weights: Floats
    """[T], see `algorithms.aggregation`."""
    samples: tuple[int, ...] = ()
    """[N], positions of its sequences in the step's batch, for reports."""


@dataclass(frozen=True)
class TrainResult:
    """One replica's share of a training step."""

    sums: Metrics
    """Over this replica's response tokens, of each metric."""
    tokens: int
    """Response tokens behind `sums`."""
    scalars: Metrics
    """The same on every rank: gradient norm, learning rate, skipped updates."""
    counted_sums: Metrics = field(default_factory=dict)
    """Over some of the tokens, sequences or pairs, of metrics that are not of all tokens."""
    counts: Metrics = field(default_factory=dict)
    """For each such metric, how many values its sum has."""


@dataclass(frozen=True)
class EngineActivity:
    """What an engine did since it was asked before, or since it was made. None stands for what its backend does not count."""

    busy_seconds: float
    """Time with at least one request in flight, neither paused nor off its device."""
    generated_tokens: int
    prefilled_tokens: int
    """Tokens of prompts, without those found in the prefix cache, and tokens of preempted requests, which are computed again."""
    preemptions: int | None = None
    """How often a request lost its KV cache: for lack of room, or for new weights."""
    running: float | None = None
    """Requests in the engine's forward passes, mean over these; None if there was no pass."""
    waiting: float | None = None
    """Requests that waited for room meanwhile; likewise."""
    kv_cache_use: float | None = None
    """The largest share of the KV cache that was in use, 0 to 1."""
    tokens_in_flight: int | None = None
    """Now: prompt and sampled tokens of requests that are not answered yet, the prompt counted for each sample."""


class TrainStrategy(Protocol):
    """A model that learns: a policy, or a critic, which is neither synced nor exported."""

    def train_step(self, updates: Sequence[Sequence[MicroBatch]], loss: Loss, temperature: float, policy_version: int) -> TrainResult:
        """Run one optimizer update for each list of micro-batches. `policy_version` is the version before the first."""
        ...

    def evaluate(self, micro_batches: Sequence[MicroBatch], loss: Loss, temperature: float) -> TrainResult:
        """The loss's metrics on what is not learnt from, without a gradient."""
        ...

    def log_probs(self, micro_batches: Sequence[Sequences], temperature: float, adapter: bool) -> list[Floats]:
        """[T] for each micro-batch, 0 outside the response mask; `adapter=False` leaves LoRA out."""
        ...

    def values(self, micro_batches: Sequence[Sequences]) -> list[Floats]:
        """A critic's values: [T] for each micro-batch, the expected return before each token; 0 outside the response mask."""
        ...

    def tensors(self, adapter: bool) -> list[TensorSpec]:
        """The tensors to send: the adapter's, or the whole model's with any adapter merged in."""
        ...

    def gathered(self, names: Sequence[str], adapter: bool) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Whole tensors, by the names of `tensors(adapter)`, on every rank, for as long as the block lasts. Collective."""
        ...

    def adapter_config(self) -> str:
        """PEFT's `adapter_config.json` of the adapter that is learnt."""
        ...

    def save(self, folder: Path) -> None:
        """Write what `load` needs to go on exactly: weights that train, optimizer, schedule, random states."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        ...

    def export(self, folder: Path) -> None:
        """Write the policy as a folder that `from_pretrained` loads: Hugging Face, or PEFT for an adapter."""
        ...

    def offload(self) -> None:
        """Give the device's memory up to other roles; nothing is computed until `onload`. Twice is once."""
        ...

    def onload(self) -> None:
        """Be on the device again, with the same values to the bit."""
        ...

    def close(self) -> None:
        """Leave the process group and free what is held."""
        ...


class ScoreStrategy(Protocol):
    """A fixed policy that says how probable given sequences are."""

    def log_probs(self, micro_batches: Sequence[Sequences], temperature: float) -> list[Floats]:
        """[T] for each micro-batch, 0 outside the response mask."""
        ...

    def offload(self) -> None:
        """Give the device's memory up to other roles; nothing is computed until `onload`. Twice is once."""
        ...

    def onload(self) -> None:
        """Be on the device again, with the same values to the bit."""
        ...

    def close(self) -> None:
        """Leave the process group and free what is held."""
        ...


class TeachStrategy(ScoreStrategy, Protocol):
    """A fixed model that a student learns from."""

    def states(self, micro_batches: Sequence[Sequences]) -> list[Floats]:
        """[S, H] for each micro-batch, the last hidden states from which its S response tokens are predicted."""
        ...


class GenerateStrategy(Protocol):
    """A policy that answers prompts, and takes new weights between answers or during them."""

    async def start(self) -> None:
        """Load the model and be ready to generate."""
        ...

    def generate(self, token_ids: Ints, sampling: Sampling, seed: int | None) -> AsyncGenerator[NumberedCompletions, None]:
        """`sampling.samples` completions of one prompt, as they end. Concurrent calls are batched. A seed makes them reproducible."""
        ...

    async def pause(self) -> None:
        """Stop producing tokens until `resume`; requests in flight are kept, and new ones wait."""
        ...

    async def open_route(self, route: Route, rendezvous: Rendezvous | None) -> None:
        """Prepare for buckets that come by this route; files need no preparation. Waits for the others of a broadcast."""
        ...

    async def load_bucket(self, bucket: Bucket | DeviceBucket) -> None:
        """Take some of the model's weights; the first bucket of an update opens it.

        Raises:
            WeightSyncError: the bucket is not what was sent. The engine is then between two models and only fit to be closed.
        """
        ...

    async def load_adapter(self, adapter: Adapter) -> None:
        """Take a LoRA adapter.

        Raises:
            WeightSyncError: the adapter is not what was sent. The one before is still in place.
        """
        ...

    async def resume(self, policy_version: int) -> None:
        """Close the update, if one is open, and produce tokens again, now at this version.

        Raises:
            WeightSyncError: some of the model's weights were not sent. The engine is then only fit to be closed.
        """
        ...

    async def policy_version(self) -> int:
        """Version of the weights that generate now."""
        ...

    async def activity(self) -> EngineActivity:
        """What the engine did since the last call. Answers at once, also while it is paused or off its device."""
        ...

    async def cause_of_death(self) -> str | None:
        """Why it can do nothing any more, such as the end of a process that it needs; None as long as it can. Answers at once."""
        ...

    async def offload(self, discard: bool) -> None:
        """Give the device's memory up to other roles, once every request is answered. Twice is once.

        `discard` says that all weights will be sent again before the next request, so they need not be kept.
        """
        ...

    async def onload(self, whole: bool) -> None:
        """Be on the device again: with the weights alone, ready to take new ones, or `whole`, ready to generate.

        Raises:
            WeightSyncError: it is to be whole, and the weights that it discarded were not sent again.
        """
        ...

    async def close(self) -> None:
        """End the engine and its processes."""
        ...


class RewardStrategy(Protocol):
    """A fixed classifier whose score is a reward."""

    async def start(self) -> None:
        """Load the model and be ready."""
        ...

    async def scores(self, sequences: Sequence[Ints]) -> list[float]:
        """The score of each sequence, read at its last token. Concurrent calls are batched. Each has at least two tokens."""
        ...

    async def offload(self) -> None:
        """Give the device's memory up to other roles, once every request is answered. Twice is once."""
        ...

    async def onload(self) -> None:
        """Be on the device again, with the same values."""
        ...

    async def close(self) -> None:
        """Free what is held."""
        ...
