"""Measures the host's CPU time of a step without its models: microseconds per sample of every process, for several step
sizes.

    python benchmarks/host.py [--samples 4096,32768] [--mean-length 512] [--apart] [--json FILE]

Ray, the scheduler, `ActorInfer`, reward workers with `exact_match`, experience, credit, packing and `ActorTrain` are
those of a real run. Engines and trainers are simulated: an engine immediately returns 8 responses per prompt, of
geometrically distributed lengths, with their log-probs; a trainer accepts its micro-batches and does nothing. No
weights are synced. User and system time of all processes is counted: the driver, the Ray actors, the processes of the
reward functions, and Ray's own processes (raylet, GCS, agents). For each size, the counted steps together have as many
samples as the largest size. One step runs before them and is not counted; it provides a digest of all arrays that the
trainers receive and of the step's metrics. Two checkouts that print the same digests train on the same numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import zlib
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from roll.algorithms.advantages import Normalisation
from roll.algorithms.losses import Loss
from roll.algorithms.objectives import PolicyLoss
from roll.backend import MicroBatch, Rank, TrainStepResult
from roll.config.derived.placement import RolePlan
from roll.config.schema.roles import RewardConfig
from roll.engines.actor_infer import ActorInfer
from roll.engines.pool import Running
from roll.ray.cluster import ClusterSession, cluster
from roll.ray.group import WorkerGroup
from roll.ray.placement import worker_placements
from roll.rewards.reward_workers import Rewards, RewardSettings
from roll.rollout.batch import Credit, CreditAssignment, Shaping, experience, rollout_metrics, token_count
from roll.rollout.group import SingleTurns
from roll.rollout.scheduler import RolloutScheduler
from roll.system.step_memory import memory_of_steps
from roll.training.actor_train import ActorTrain, TrainShape
from roll.types import Completion, FinishReason, Ints, Metrics, NumberedCompletions, Prompt, Sampling

GROUP = 8
RANKS = 2
"""Number of ranks per role."""
PROMPT_TOKENS = 128
PROMPT_TEXT = "What is the sum of these numbers, and why? " * 12
CHARACTERS = 4
"""Number of characters per token."""
SECONDS = 3600.0
"""Value of every deadline, in seconds, in case something hangs."""
DOMAIN = "exact_match"
SHAPE = TrainShape(updates=4, epochs=1, token_budget=32768, loss_agg_mode="token-mean", temperature=1.0)
CHECKED = 0
"""Policy version of the step whose digest is computed."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings of `Engine`."""

    mean_length: int
    apart: bool
    """Whether each sample is returned separately. Otherwise all samples of a prompt are returned together."""

    def build(self, rank: Rank) -> Engine:
        """See `Settings`."""
        return Engine(self)


class Engine:
    """An engine that answers immediately. The answer depends only on the seed."""

    def __init__(self, settings: EngineSettings) -> None:
        numbers, longest = np.random.default_rng(0), 4 * settings.mean_length
        self._lengths = np.minimum(numbers.geometric(1 / settings.mean_length, 1021), longest).tolist()
        self._token_ids = numbers.integers(0, 150_000, 2 * longest).astype(np.int32)
        self._log_probs = -numbers.random(2 * longest).astype(np.float32)
        self._text = "".join(map(chr, numbers.integers(97, 123, 2 * longest * CHARACTERS)))
        self._longest, self._apart = longest, settings.apart

    async def start(self) -> None:
        """See `GenerateStrategy`."""

    async def generate(
        self, token_ids: Ints, sampling: Sampling, seed: int, shown: None = None
    ) -> AsyncGenerator[NumberedCompletions, None]:
        """See `GenerateStrategy`. Arrays and texts are new objects, as from a real engine."""
        completions = [(number, self._completion(seed + number)) for number in range(sampling.samples)]
        for one in completions if self._apart else ():
            yield [one]
        if not self._apart:
            yield completions

    def _completion(self, number: int) -> Completion:
        length, begin = self._lengths[number % len(self._lengths)], number % self._longest
        end, text = begin + length, self._text[CHARACTERS * begin : CHARACTERS * (begin + length)]
        token_ids, log_probs = self._token_ids[begin:end].copy(), self._log_probs[begin:end].copy()
        # Every other response is right.
        text = f"{text}</think>{number % 2}"
        return Completion(token_ids, log_probs, np.zeros(length, np.int32), FinishReason.STOP, text)

    async def close(self) -> None:
        """See `GenerateStrategy`."""


@dataclass(frozen=True)
class TrainerSettings:
    """Settings of `Trainer`."""

    def build(self, rank: Rank) -> Trainer:
        """See `Settings`."""
        return Trainer(rank)


class Trainer:
    """A trainer that accepts batches and does nothing."""

    def __init__(self, rank: Rank) -> None:
        self._name = f"digest/trainer_{rank.rank}"

    def train_step(
        self, updates: Sequence[Sequence[MicroBatch]], loss: Loss, temperature: float, policy_version: int
    ) -> TrainStepResult:
        """See `TrainStrategy`. In the checked step, the metric is a digest of the batches."""
        batches = [one for update in updates for one in update]
        tokens = sum(len(one.batch.sequences.token_ids) for one in batches)
        # A metric is a sum over tokens; 24 bits of a digest stay exact.
        sums = {self._name: float(digest(batches) & 0xFFFFFF)} if policy_version == CHECKED else {}
        return TrainStepResult(sums, tokens, {})

    def close(self) -> None:
        """See `TrainStrategy`."""


def digest(micro_batches: Sequence[MicroBatch]) -> int:
    """Return a digest of all arrays and sequence numbers, in order."""
    found = 0
    for one in micro_batches:
        batch, sequences = one.batch, one.batch.sequences
        assert batch.behaviour_log_probs is not None
        arrays = (
            sequences.token_ids,
            sequences.offsets,
            sequences.response_mask,
            batch.advantages,
            batch.behaviour_log_probs,
        )
        for array in (*arrays, batch.policy_versions, one.loss_weights, np.array(one.samples)):
            found = zlib.crc32(np.ascontiguousarray(array).tobytes(), zlib.crc32(array.dtype.str.encode(), found))
    return found


class Source:
    """A `PromptSource` with an unlimited number of prompts."""

    def __init__(self) -> None:
        self._drawn = 0

    def draw(self, count: int) -> list[Prompt]:
        """See `PromptSource`."""
        numbers = range(self._drawn, self._drawn + count)
        self._drawn += count
        return [self._prompt(number) for number in numbers]

    def _prompt(self, number: int) -> Prompt:
        row = {
            "messages": [{"role": "user", "content": PROMPT_TEXT}],
            "ground_truth": "1",
            "tag": DOMAIN,
            "number": number,
        }
        return Prompt(
            number,
            np.arange(PROMPT_TOKENS, dtype=np.int32) + number,
            f"<user>{PROMPT_TEXT}{number}<assistant>",
            DOMAIN,
            row,
        )

    def state_dict(self) -> dict[str, Any]:
        """See `PromptSource`."""
        return {"drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `PromptSource`."""
        self._drawn = state["drawn"]


@dataclass(frozen=True)
class Roles:
    """The roles of a run."""

    actor_infer: ActorInfer
    rewards: Rewards
    actor_train: ActorTrain


@asynccontextmanager
async def started(session: ClusterSession, engine: EngineSettings) -> AsyncIterator[Roles]:
    """Start all roles, and stop them when the context exits."""
    async with AsyncExitStack() as stack:

        async def start(role: str, settings: Any, blocking: bool) -> WorkerGroup[Any]:
            places = worker_placements(RolePlan(role, "none", ((),) * RANKS), 8, {})
            group: WorkerGroup[Any] = WorkerGroup(
                role, places, session.logs, session.shared_memory / f"{role}.held", blocking
            )
            stack.push_async_callback(group.stop, SECONDS)
            await group.start(settings, SECONDS, SECONDS)
            return group

        section = RewardConfig.model_validate({})
        engines = await start("actor_infer", engine, blocking=False)
        rewards = await start("rewards", RewardSettings(DOMAIN, section, SECONDS), blocking=False)
        trainers = await start("actor_train", TrainerSettings(), blocking=True)
        yield Roles(
            ActorInfer(engines, Running(None, RANKS), SECONDS, SECONDS, SECONDS),
            Rewards({DOMAIN: rewards}, {DOMAIN: section}, SECONDS),
            ActorTrain(trainers, SHAPE, session.shared_memory, SECONDS, SECONDS, SECONDS),
        )


def main() -> int:
    """Measure each size and print a row for each kind of process."""
    options = parse()
    sizes = [int(size) for size in options.samples.split(",")]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="roll-host-"))
        session = stack.enter_context(cluster(Path(folder), gpus=0, gpus_per_node=8))
        stack.enter_context(memory_of_steps())
        found, checked = asyncio.run(measure(session, sizes, EngineSettings(options.mean_length, options.apart)))
    table = Table("process", *(f"{size:,} samples" for size in sizes), title="CPU time, microseconds per sample")
    for process in sorted(found[sizes[0]]):
        table.add_row(process, *(f"{found[size].get(process, 0.0):.1f}" for size in sizes))
    table.add_row("sum", *(f"{sum(found[size].values()):.1f}" for size in sizes))
    table.add_row(
        "digest", *(f"{zlib.crc32(json.dumps(checked[size], sort_keys=True).encode()):08x}" for size in sizes)
    )
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({"microseconds": found, "metrics": checked}, indent=1))
    return 0


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", default="4096,32768", help="step sizes in samples, separated by commas")
    parser.add_argument(
        "--mean-length", type=int, default=512, help="mean tokens per response; the maximum is four times as long"
    )
    parser.add_argument("--apart", action="store_true", help="return and score each sample separately")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


async def measure(
    session: ClusterSession, sizes: Sequence[int], engine: EngineSettings
) -> tuple[dict[int, dict[str, float]], dict[int, Metrics]]:
    """Return, by size, the microseconds per sample of each kind of process, and the metrics of the checked step."""
    found: dict[int, dict[str, float]] = {}
    checked: dict[int, Metrics] = {}
    async with started(session, engine) as roles:
        for size in sizes:
            sampling, credit = (
                Sampling(4 * engine.mean_length, GROUP),
                CreditAssignment(Credit("grpo", Normalisation())),
            )
            sampler = SingleTurns(roles.actor_infer, roles.rewards, sampling)
            scheduler = RolloutScheduler(Source(), sampler, size // GROUP, 0.0, seed=0)
            async with aclosing(scheduler):
                checked[size] = await step(scheduler, roles.actor_train, credit, CHECKED)
                steps = max(sizes) // size
                before = seconds(session.logs)
                for version in range(1, steps + 1):
                    await step(scheduler, roles.actor_train, credit, version)
                spent = {process: time - before[process] for process, time in seconds(session.logs).items()}
            found[size] = {process: 1e6 * time / (steps * size) for process, time in spent.items()}
    return found, checked


async def step(scheduler: RolloutScheduler, actor_train: ActorTrain, credit: CreditAssignment, version: int) -> Metrics:
    """Run one step as `rlvr.train` does, without reference, critic and weight sync. Return its metrics."""
    groups = await scheduler.take()
    batch, metrics = credit(experience(groups, Shaping()), None)
    metrics |= rollout_metrics(groups, version)
    metrics |= await actor_train.train_step(batch, PolicyLoss(), version)
    return metrics | {"tokens": float(token_count(groups))}


def seconds(logs: Path) -> dict[str, float]:
    """Return the CPU time so far of this process and its descendants, by kind."""
    spent: dict[str, float] = defaultdict(float)
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        times = process.cpu_times()
        spent["driver" if process == own else kind_of(process, logs)] += times.user + times.system
    return spent


def kind_of(process: psutil.Process, logs: Path) -> str:
    """Return the kind of a process. A worker is identified by its log."""
    if "roll.rewards.child" in process.cmdline():
        return "reward functions"
    log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
    return log.stem.rpartition("-")[0] if log.parent == logs else "Ray's own"


if __name__ == "__main__":
    raise SystemExit(main())
