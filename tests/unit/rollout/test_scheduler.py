"""The rollout scheduler: batches, staleness, resumes, failures and dynamic sampling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from roll.errors import RollError
from roll.rollout.group import Scorer, SingleTurns, prompt_seed
from roll.rollout.scheduler import TRAINING, RolloutScheduler
from roll.types import Completion, FinishReason, Ints, NumberedCompletions, Prompt, RewardResult, RolloutGroup, Sampling
from tests import limits
from tests.unit.rollout.build import EachByItself, make_prompt


class Counting:
    """A source of prompts 0, 1, 2, ... The only token of a prompt is its number."""

    def __init__(self) -> None:
        self.position = 0

    def draw(self, count: int) -> list[Prompt]:
        drawn = [make_prompt(self.position + n, [self.position + n]) for n in range(count)]
        self.position += count
        return drawn

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


class Gated:
    """A generator that finishes a prompt when the test opens its gate. Each response to prompt n has n + 1 tokens."""

    def __init__(self, *, is_open: bool) -> None:
        self.is_open = is_open
        self.gates: dict[int, asyncio.Event] = {}
        self.seeds: dict[int, int | None] = {}
        self.running: set[int] = set()
        self.cancelled: list[int] = []
        self.asked: list[Sampling] = []
        self.fails_on: int | None = None

    async def generate(
        self, token_ids: Ints, sampling: Sampling, seed: int | None = None, shown: object = None
    ) -> AsyncGenerator[NumberedCompletions, None]:
        prompt_id = int(token_ids[0])
        self.asked.append(sampling)
        self.seeds[prompt_id] = seed
        self.gates[prompt_id] = asyncio.Event()
        self.running.add(prompt_id)
        try:
            if prompt_id == self.fails_on:
                raise RollError("the engine died")
            if not self.is_open:
                await self.gates[prompt_id].wait()
        except asyncio.CancelledError:
            self.cancelled.append(prompt_id)
            raise
        finally:
            self.running.remove(prompt_id)
        ids = np.zeros(1 + prompt_id, np.int32)
        yield list(
            enumerate(
                [
                    Completion(ids, ids.astype(np.float32), ids, FinishReason.STOP, f"{prompt_id}/{n}")
                    for n in range(sampling.samples)
                ]
            )
        )


class ByText(EachByItself):
    """Rewards a response with the number of its prompt."""

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
        return [RewardResult(float(text.split("/")[0])) for text in responses]


class AlikeFor(EachByItself):
    """Rewards all responses to a prompt with 0 if `alike` is true for it, and with 0, 1, ... otherwise."""

    def __init__(self, alike: Callable[[int], bool]) -> None:
        self._alike = alike

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
        return [
            RewardResult(0.0 if self._alike(prompt.prompt_id) else float(number)) for number in range(len(responses))
        ]


def scheduler(
    generator: Gated,
    batch_size: int = 4,
    ratio: float = 0.0,
    seed: int | None = 7,
    scorer: Scorer | None = None,
    greedy_baseline: bool = False,
    **settings: Any,
) -> tuple[RolloutScheduler, Counting]:
    source = Counting()
    sampler = SingleTurns(generator, scorer or ByText(), Sampling(8, samples=2), greedy_baseline)
    return RolloutScheduler(source, sampler, batch_size, ratio, seed, **settings), source


def ids(groups: Sequence[RolloutGroup]) -> list[int]:
    return [group.prompt.prompt_id for group in groups]


async def settle() -> None:
    """Yield to the event loop often enough that every task waits afterwards."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_synchronous_training_drains_before_it_hands_over() -> None:
    async def run() -> None:
        generator = Gated(is_open=True)
        rollouts, source = scheduler(generator)
        for step in range(3):
            groups = await rollouts.take()
            assert ids(groups) == list(range(4 * step, 4 * step + 4))
            assert source.position == 4 * (step + 1)
            assert not generator.running
        assert [[episode.reward.value for episode in group.episodes] for group in groups] == [
            [n, n] for n in range(8, 12)
        ]

    asyncio.run(run())


def test_asynchronous_training_keeps_the_ratio_in_flight() -> None:
    async def run() -> None:
        generator = Gated(is_open=False)
        rollouts, _ = scheduler(generator, batch_size=4, ratio=0.5)
        taking = asyncio.create_task(rollouts.take())
        await settle()
        assert generator.running == set(range(6))
        for prompt_id in range(4):
            generator.gates[prompt_id].set()
        assert ids(await taking) == [0, 1, 2, 3]
        assert generator.running == {4, 5}
        taking = asyncio.create_task(rollouts.take())
        await settle()
        assert generator.running == set(range(4, 10))
        for prompt_id in range(4, 8):
            generator.gates[prompt_id].set()
        assert ids(await taking) == [4, 5, 6, 7]
        await rollouts.aclose()

    asyncio.run(run())


def test_groups_leave_in_order_of_drawing() -> None:
    async def run() -> None:
        generator = Gated(is_open=False)
        rollouts, _ = scheduler(generator, batch_size=2, ratio=1.0)
        taking = asyncio.create_task(rollouts.take())
        await settle()
        for prompt_id in (3, 2, 1):
            generator.gates[prompt_id].set()
        await settle()
        assert not taking.done()
        generator.gates[0].set()
        assert ids(await taking) == [0, 1]
        # Groups 2 and 3 are already finished, and are the next batch without a wait.
        assert ids(await asyncio.wait_for(rollouts.take(), limits.CALL)) == [2, 3]
        await rollouts.aclose()

    asyncio.run(run())


def test_saved_position_repeats_only_groups_in_flight() -> None:
    async def run() -> None:
        generator = Gated(is_open=True)
        rollouts, source = scheduler(generator, batch_size=4, ratio=1.0)
        assert rollouts.state_dict() == {"position": 0}
        await rollouts.take()
        assert source.position == 8
        assert rollouts.state_dict() == {"position": 4}
        await rollouts.take()
        saved = rollouts.state_dict()
        assert saved == {"position": 8}
        seeds = dict(generator.seeds)
        await rollouts.aclose()

        resumed_generator = Gated(is_open=True)
        resumed, _ = scheduler(resumed_generator, batch_size=4, ratio=1.0)
        resumed.load_state_dict(saved)
        assert ids(await resumed.take()) == [8, 9, 10, 11]
        shared = seeds.keys() & resumed_generator.seeds.keys()
        assert shared == {8, 9, 10, 11}
        assert {n: seeds[n] for n in shared} == {n: resumed_generator.seeds[n] for n in shared}
        with pytest.raises(AssertionError, match="already running"):
            resumed.load_state_dict(saved)
        await resumed.aclose()

    asyncio.run(run())


def test_every_prompt_has_own_seed_or_none() -> None:
    async def run(seed: int | None) -> dict[int, int | None]:
        generator = Gated(is_open=True)
        rollouts, _ = scheduler(generator, seed=seed)
        await rollouts.take()
        return generator.seeds

    assert asyncio.run(run(7)) == {n: prompt_seed(7, TRAINING, n) for n in range(4)}
    assert asyncio.run(run(None)) == dict.fromkeys(range(4))


def test_generator_failure_is_raised_and_close_cancels() -> None:
    async def run() -> None:
        generator = Gated(is_open=False)
        generator.fails_on = 2
        rollouts, _ = scheduler(generator, batch_size=3, ratio=1.0)
        with pytest.raises(RollError, match="the engine died"):
            await rollouts.take()
        await rollouts.aclose()
        assert sorted(generator.cancelled) == [0, 1, 3, 4, 5]
        assert not generator.running

    asyncio.run(run())


def test_rollout_window_skips_consumed_groups_after_resume() -> None:
    async def run() -> None:
        generator = Gated(is_open=False)
        rollouts, _ = scheduler(generator, batch_size=2, ratio=1.0, window=4)
        taking = asyncio.create_task(rollouts.take())
        await settle()
        assert generator.running == {0, 1, 2, 3}
        for prompt_id in (3, 1):
            generator.gates[prompt_id].set()
        assert ids(await taking) == [1, 3]
        state = rollouts.state_dict()
        assert state == {"position": 0, "window": {"gone": [1, 3]}}
        await rollouts.aclose()

        generator = Gated(is_open=True)
        rollouts, _ = scheduler(generator, batch_size=2, ratio=1.0, window=4)
        rollouts.load_state_dict(state)
        assert [ids(await rollouts.take()) for _ in range(2)] == [[0, 2], [4, 5]]
        assert not {1, 3} & generator.seeds.keys()
        await rollouts.aclose()

    asyncio.run(run())


def test_failure_in_flight_does_not_break_close() -> None:
    async def run() -> None:
        generator = Gated(is_open=True)
        generator.fails_on = 3
        rollouts, source = scheduler(generator, batch_size=2, ratio=1.0)
        assert ids(await rollouts.take()) == [0, 1]
        await settle()
        with pytest.raises(RollError, match="the engine died"):
            await rollouts.take()
        await rollouts.aclose()
        # Nothing is in flight, so the saved position is that of the source.
        assert rollouts.state_dict() == source.state_dict()

    asyncio.run(run())


def test_prompt_seeds_are_distinct_and_fit_31_bits() -> None:
    seeds = {
        (run, stream, prompt): prompt_seed(run, stream, prompt)
        for run in range(4)
        for stream in range(2)
        for prompt in range(500)
    }
    assert len(set(seeds.values())) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds.values())
    assert prompt_seed(1, 0, 3) == seeds[1, 0, 3]


ODD = AlikeFor(lambda prompt_id: prompt_id % 2 == 1)


def test_dynamic_sampling_replaces_groups_that_teach_nothing() -> None:
    async def run() -> None:
        generator = Gated(is_open=True)
        rollouts, source = scheduler(generator, scorer=ODD, most_batches=3)
        assert rollouts.metrics() == {}
        # Of 0 to 3, groups 0 and 2 are kept. Of the replacements 4 and 5, group 4 is kept, and then 6.
        assert ids(await rollouts.take()) == [0, 2, 4, 6]
        # Groups 1, 3 and 5 were dropped. Each had two responses, of 2, 4 and 6 tokens respectively.
        assert rollouts.metrics() == {
            "sampling/drawn_groups": 7,
            "sampling/dropped_groups": 3,
            "sampling/dropped_tokens": 24,
        }
        # In synchronous training, nothing is generated beyond the step.
        assert source.position == 7 and not generator.running
        assert rollouts.state_dict() == {"position": 7}
        assert ids(await rollouts.take()) == [8, 10, 12, 14]

    asyncio.run(run())


def test_dropped_groups_fill_batch_at_the_bound(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        rollouts, source = scheduler(
            Gated(is_open=True), scorer=AlikeFor(lambda prompt_id: prompt_id != 5), most_batches=2
        )
        assert ids(await rollouts.take()) == [5, 0, 1, 2]
        assert source.position == 8
        # Groups 3, 4, 6 and 7 were dropped.
        assert rollouts.metrics() == {
            "sampling/drawn_groups": 8,
            "sampling/dropped_groups": 4,
            "sampling/dropped_tokens": 48,
        }

    asyncio.run(run())
    assert "1 of 8 drawn groups" in caplog.text and "a step of 4" in caplog.text


def test_dynamic_sampling_keeps_ratio_and_resumes_exactly() -> None:
    async def run() -> None:
        generator = Gated(is_open=True)
        rollouts, source = scheduler(generator, scorer=ODD, ratio=0.5, most_batches=3)
        assert ids(await rollouts.take()) == [0, 2, 4, 6]
        # Seven groups were used up, and the ratio keeps two more in flight.
        assert source.position == 9
        saved = rollouts.state_dict()
        assert saved == {"position": 7}
        expected = [ids(await rollouts.take()) for _ in range(3)]
        await rollouts.aclose()
        resumed, _ = scheduler(Gated(is_open=True), scorer=ODD, ratio=0.5, most_batches=3)
        resumed.load_state_dict(saved)
        assert [ids(await resumed.take()) for _ in range(3)] == expected
        await resumed.aclose()

    asyncio.run(run())


def test_greedy_baseline_ignores_sampling_truncation() -> None:
    async def run() -> list[Sampling]:
        generator = Gated(is_open=True)
        sampling = Sampling(8, samples=2, temperature=0.7, top_p=0.5, top_k=3)
        await SingleTurns(generator, ByText(), sampling, greedy_baseline=True).sample(make_prompt(0, [0]), None)
        return generator.asked

    sampled, greedy = asyncio.run(run())
    assert sampled == Sampling(8, samples=2, temperature=0.7, top_p=0.5, top_k=3)
    assert greedy == Sampling(8, samples=1, temperature=0.0, top_p=1.0, top_k=-1)


def test_the_greedy_response_stands_beside_the_samples() -> None:
    async def run() -> None:
        generator = Gated(is_open=True)
        rollouts, _ = scheduler(generator, batch_size=1, greedy_baseline=True)
        [group] = await rollouts.take()
        assert [(sampling.samples, sampling.temperature) for sampling in generator.asked] == [(2, 1.0), (1, 0.0)]
        assert len(group.episodes) == 2
        assert group.baseline is not None and group.baseline.sampled[0].text == "0/0"

    asyncio.run(run())
