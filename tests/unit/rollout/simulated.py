"""Runs of the scheduler with a simulated engine, rewards and trainer in virtual time, and their traces.

After a change that is meant to alter the traces, run `PYTHONPATH=. python -m tests.unit.rollout.simulated`: it writes
the traces of all `CASES` again.
"""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roll.rollout.group import SingleTurns
from roll.rollout.record import token_versions
from roll.rollout.scheduler import RolloutScheduler
from roll.types import (
    Completion,
    Episode,
    FinishReason,
    Ints,
    NumberedCompletions,
    Prompt,
    RewardResult,
    RolloutGroup,
    Sampling,
    StopReason,
)
from tests.unit.rollout.build import EachByItself, make_prompt

TRACES = Path(__file__).with_name("scheduler_traces.json")
BATCH = 3
STEPS = 5
RESUMED_AFTER = 3
"""Number of steps after which the run is closed and continues from the saved state with a new scheduler."""
TRAIN_SECONDS = 7.0
Event = list[Any]


@dataclass(frozen=True)
class Case:
    """A configuration of the scheduler."""

    ratio: float
    most_batches: int | None = None
    greedy_baseline: bool = False


CASES = {
    "synchronous": Case(0.0),
    "synchronous, dynamic sampling": Case(0.0, most_batches=3),
    "ratio 1": Case(1.0),
    "ratio 1, greedy baseline": Case(1.0, greedy_baseline=True),
    "ratio 1.5": Case(1.5),
    "ratio 1.5, dynamic sampling, greedy baseline": Case(1.5, most_batches=2, greedy_baseline=True),
}


class _NoWait(selectors.DefaultSelector):
    """Advances virtual time when the event loop would wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "deadlock: every task waits for another one"
        self.now += timeout
        return super().select(0)


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer at once."""

    def __init__(self) -> None:
        self._virtual = _NoWait()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def drawn(*key: int) -> np.random.Generator:
    """Return a random generator that depends only on the key."""
    return np.random.default_rng(key)


class World(EachByItself):
    """Prompt source, engine, rewards and policy version in one object. All its actions are recorded in the trace."""

    def __init__(self, trace: list[Event]) -> None:
        self.position = 0
        self.version = 0
        self._trace = trace

    def say(self, event: str, *details: Any) -> None:
        self._trace.append([round(asyncio.get_running_loop().time(), 3), event, *details])

    def draw(self, count: int) -> list[Prompt]:
        prompts = [make_prompt(self.position + n, [self.position + n]) for n in range(count)]
        self.position += count
        self.say("draw", [prompt.prompt_id for prompt in prompts])
        return prompts

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]

    async def generate(
        self, token_ids: Ints, sampling: Sampling, seed: int | None = None, shown: object = None
    ) -> AsyncGenerator[NumberedCompletions, None]:
        """Generate 1 to 7 tokens per sample, or three times as many for every fourth prompt.

        Each token takes 0.5 to 3 s, and has the policy version at the end of this time.
        """
        prompt_id = int(token_ids[0])
        self.say("dispatch", prompt_id, sampling.samples, sampling.temperature, seed)
        numbers = drawn(prompt_id, sampling.samples)
        versions: list[int] = []
        count = int(numbers.integers(1, 8)) * (3 if prompt_id % 4 == 3 else 1)
        for seconds in numbers.uniform(0.5, 3.0, count).round(3):
            await asyncio.sleep(seconds)
            versions.append(self.version)
        self.say("finish", prompt_id, versions)
        ids, reached = np.arange(len(versions), dtype=np.int32) + 100 * prompt_id, np.array(versions, np.int32)
        log_probs = (-0.25 - ids / 1000).astype(np.float32)
        reasons = (FinishReason.STOP, FinishReason.LENGTH)
        yield list(
            enumerate(
                [
                    Completion(ids + n, log_probs, reached, reasons[n % 2], f"{prompt_id}/{n}")
                    for n in range(sampling.samples)
                ]
            )
        )

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
        """Give all samples of an even prompt the same reward, and those of an odd one different rewards."""
        await asyncio.sleep(round(drawn(prompt.prompt_id).uniform(0.1, 2.0), 3))
        self.say("scored", prompt.prompt_id, len(responses))
        return [RewardResult(float(n if prompt.prompt_id % 2 else 1)) for n in range(len(responses))]


def told(group: RolloutGroup) -> dict[str, Any]:
    """Return a group for the trace. Each sample is: first and last token, last log-prob, versions, truncated, text,
    reward.
    """

    def of(episode: Episode) -> list[Any]:
        [trajectory] = episode.trajectories
        prompt, response = trajectory.segments
        assert prompt.token_ids.tolist() == group.prompt.token_ids.tolist() and response.log_probs is not None
        ends = [int(response.token_ids[0]), int(response.token_ids[-1]), round(float(response.log_probs[-1]), 3)]
        truncated = episode.stop is StopReason.LENGTH
        return [*ends, token_versions([response]).tolist(), truncated, response.text, episode.reward.value]

    samples = [of(episode) for episode in group.episodes]
    return {"prompt": group.prompt.prompt_id, "samples": samples, "baseline": group.baseline and of(group.baseline)}


async def _run(case: Case, trace: list[Event]) -> None:
    state: dict[str, Any] = {"position": 0}
    version = 0
    for steps in (RESUMED_AFTER, STEPS - RESUMED_AFTER):
        world = World(trace)
        world.version = version
        sampling = Sampling(8, samples=2)
        sampler = SingleTurns(world, world, sampling, case.greedy_baseline)
        scheduler = RolloutScheduler(world, sampler, BATCH, case.ratio, 7, most_batches=case.most_batches)
        scheduler.load_state_dict(state)
        for _ in range(steps):
            groups = await scheduler.take()
            world.say("take", [told(group) for group in groups], scheduler.metrics())
            await asyncio.sleep(TRAIN_SECONDS)
            world.version += 2
            state = scheduler.state_dict()
            world.say("trained", world.version, state)
        version = world.version
        await scheduler.aclose()
        world.say("closed")


def trace_of(case: Case) -> list[Event]:
    """Return all events of a run in order, each with its virtual time in seconds, after a round trip through JSON."""
    trace: list[Event] = []
    loop = VirtualTime()
    try:
        loop.run_until_complete(_run(case, trace))
    finally:
        loop.close()
    return json.loads(json.dumps(trace))


def write() -> None:
    """Replace the stored traces by new ones for all cases."""
    lines = {
        name: [json.dumps(event, separators=(",", ":")) for event in trace_of(case)] for name, case in CASES.items()
    }
    cases = [f"{json.dumps(name)}: [\n" + ",\n".join(events) + "\n]" for name, events in lines.items()]
    TRACES.write_text("{" + ",\n".join(cases) + "}\n")


if __name__ == "__main__":
    write()
