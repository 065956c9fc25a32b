"""Stands in for the Ray actors of a run of any size, inside the driver's process, for `benchmarks/driver_scale.py`.

A stub answers at once and does no work. Each call counts as a message, and its pickled arguments as its bytes. The CPU
time of the stubs, with that of pickling, is added up, so that it can be subtracted from that of the process.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roll.backend import EngineActivity, MicroBatch, TrainStepResult
from roll.ray.batching import decoded, encode_value
from roll.ray.group import WorkerGroup
from roll.ray.liveness import RayNodes
from roll.system.signs import ProcessActivity
from roll.types import Completion, FinishReason, Floats, RewardResult, Sequences, TensorSpec
from roll.weight_sync.device import DeviceBucket

HANDLE = b"\0" * 300
"""Stands in for a CUDA IPC handle, which has about as many bytes once pickled."""


@dataclass
class Ledger:
    """Messages between the driver and its actors, and the CPU time of the stubs."""

    messages: Counter[str] = field(default_factory=Counter)
    """Number of messages by method."""
    bytes: Counter[str] = field(default_factory=Counter)
    """Pickled bytes of the arguments by method, with those of results for `collect`."""
    largest: int = 0
    """Bytes of the largest message."""
    seconds: float = 0.0
    """CPU seconds of the stubs."""

    @contextmanager
    def own(self) -> Iterator[None]:
        """A context whose CPU time is the stubs'. It must not be nested."""
        begin = time.thread_time()
        try:
            yield
        finally:
            self.seconds += time.thread_time() - begin

    def note(self, method: str, arguments: Any) -> None:
        """Count a message."""
        apart: list[pickle.PickleBuffer] = []
        inline = pickle.dumps(arguments, 5, buffer_callback=apart.append)
        size = len(inline) + sum(len(part.raw()) for part in apart)
        self.messages[method] += 1
        self.bytes[method] += size
        self.largest = max(self.largest, size)


@dataclass(frozen=True)
class Reference:
    """Stands in for Ray's reference to an object in its store: a message carries the reference alone."""

    held: Any

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (b"\0" * 28,)


def opened(value: Any) -> Any:
    """Return the object that a reference stands for, or the value itself."""
    return value.held if isinstance(value, Reference) else value


class Actor:
    """Stands in for Ray's handle of a process with a strategy."""

    def __init__(self, ledger: Ledger, strategy: Any) -> None:
        self._ledger, self.strategy = ledger, strategy
        self._hosted, self._answers = [strategy], deque[tuple[int, bytes, bool]]()
        self._collecting: asyncio.Future[Any] | None = None

    def __getattr__(self, method: str) -> _Method:
        return _Method(self, method)

    def ask(self, method: str, arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Answer one message."""
        answer = asyncio.get_running_loop().create_future()
        with self._ledger.own():
            self._ledger.note(f"call {arguments[1]}" if method == "call" else method, arguments)
            if method == "collect":
                self._collecting = answer
            elif method == "post":
                for call in arguments[0]:
                    self._answer(*decoded(call))
                answer.set_result(None)
            else:
                answer.set_result(self._result(method, tuple(map(opened, arguments))))
            self._deliver()
        return answer

    def _result(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "call":
            return getattr(self._hosted[arguments[0]], arguments[1])(*arguments[2:])
        if method == "add":
            self._hosted.append(self.strategy)
            return len(self._hosted) - 1
        return {"pid": 1, "free_address": ("node", 1)}.get(method)

    def _answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        if method == "generate":
            for item in self.strategy.generate(*arguments):
                self._answers.append((number, encode_value((item, None)), False))
            self._answers.append((number, b"", True))
        else:
            answer = getattr(self.strategy, method)(*arguments)
            self._answers.append((number, encode_value((answer, None)), True))

    def _deliver(self) -> None:
        """Answer a `collect` with one answer: in a long rollout, responses end one by one."""
        if self._collecting is None or not self._answers:
            return
        waiting, self._collecting = self._collecting, None
        found = [self._answers.popleft()]
        if self._answers and not self._answers[0][1]:
            found.append(self._answers.popleft())
        self._ledger.bytes["collect"] += sum(len(answer) for _, answer, _ in found)
        if not waiting.done():
            waiting.set_result(found)


@dataclass(frozen=True)
class _Method:
    actor: Actor
    name: str

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        """Call the method, like Ray."""
        return self.actor.ask(self.name, arguments)


class StubGroup(WorkerGroup[Any]):
    """A role whose processes are stubs. `make` returns the strategy of a rank."""

    def __init__(self, ledger: Ledger, make: Any, *arguments: Any, **named: Any) -> None:
        self._ledger, self._make = ledger, make
        super().__init__(*arguments, **named)

    def _new_actor(self, rank: int) -> Any:
        return Actor(self._ledger, self._make(rank))

    def start_at_once(self) -> None:
        """Mark all processes as built, with process ids of their own on each node."""
        self._pids = {rank: rank for rank in range(len(self))}
        self._built = set(self._pids)
        self._started = True


class StubNodes(RayNodes):
    """Nodes whose processes all run."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def _probe(self, node_id: str | None) -> Any:
        if node_id not in self._probes:
            self._probes[node_id] = Actor(self._ledger, None)
            self._probes[node_id]._result = _looked
        return self._probes[node_id]


def _looked(method: str, arguments: tuple[Any, ...]) -> Any:
    if method == "process_activities":
        return [ProcessActivity(None, 0, None, False) for _ in arguments[0]]
    return {}


class Engine:
    """A `GenerateStrategy` that returns each response singly."""

    def __init__(self, mean_length: int) -> None:
        numbers = np.random.default_rng(0)
        self._lengths = np.minimum(numbers.geometric(1 / mean_length, 1021), 4 * mean_length).tolist()
        self._version = 0

    def generate(
        self, token_ids: Any, sampling: Any, seed: int, shown: None = None
    ) -> Iterator[list[tuple[int, Completion]]]:
        """See `GenerateStrategy`."""
        for number in range(sampling.samples):
            length = self._lengths[(seed + number) % len(self._lengths)]
            ids, versions = np.full(length, 7, np.int32), np.full(length, self._version, np.int32)
            yield [(number, Completion(ids, np.full(length, -0.5, np.float32), versions, FinishReason.STOP, "7"))]

    def resume(self, policy_version: int) -> int:
        """See `GenerateStrategy`."""
        self._version = policy_version
        return policy_version

    def activity(self) -> EngineActivity:
        """See `GenerateStrategy`."""
        return EngineActivity(1.0, 1, 1, 0, 1.0, 0.0, 0.5, 0)

    def cause_of_death(self) -> None:
        """See `GenerateStrategy`."""

    pause = offload = onload = open_route = load_bucket = load_adapter = lambda self, *_: None


class Trainer:
    """A rank of a `TrainStrategy`, and its `BucketSender`."""

    def __init__(self, rank: int, tensors: Sequence[TensorSpec]) -> None:
        self._rank, self._tensors = rank, {tensor.name: tensor for tensor in tensors}

    def train_step(self, updates: Sequence[Sequence[MicroBatch]], *_: Any) -> TrainStepResult:
        """See `TrainStrategy`."""
        tokens = sum(len(one.batch.sequences.token_ids) for update in updates for one in update)
        return TrainStepResult({"policy/loss": 0.5 * tokens}, tokens, {"train/gradient_norm": 1.0})

    def log_probs(self, micro_batches: Sequence[Sequences], *_: Any) -> list[Floats]:
        """See `TrainStrategy` and `ScoreStrategy`."""
        return [np.full(len(one.token_ids), -0.5, np.float32) for one in micro_batches]

    def tensors(self) -> list[TensorSpec]:
        """See `BucketSender`."""
        return list(self._tensors.values())

    def fill_bucket(self, names: Sequence[str], slot: int, openers: int) -> DeviceBucket:
        """See `BucketSender`."""
        handles = ({f"GPU-{self._rank:032}": HANDLE},) * openers
        return DeviceBucket(tuple(self._tensors[name] for name in names), "0", of_ranks=(handles,))

    offload = onload = join_broadcast = empty_buckets = lambda self, *_: None


class Rewarder:
    """A `RewardWorker`: every other response is right."""

    def score(self, prompt: Any, responses: Sequence[str]) -> list[RewardResult]:
        """See `RewardWorker`."""
        return [RewardResult(float((prompt.prompt_id + number) % 2)) for number in range(len(responses))]
