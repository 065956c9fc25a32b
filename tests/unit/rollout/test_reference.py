"""Reference log-probs, computed for a whole step or for each group as soon as it is finished."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from roll.errors import RollError
from roll.rollout.batch import Shaping, experience
from roll.rollout.reference import ReferenceAhead, ReferenceAtOnce
from roll.types import Floats, RewardOutcome, RolloutGroup, Sequences
from tests.unit.rollout.build import make_episode, make_group

SHAPING = Shaping(max_len_mask=True, longest_wrong=3)


class Model:
    """Stands in for the reference model. A log-prob depends on the token and on its position in the sequence."""

    def __init__(self, fails_on: int | None = None) -> None:
        self.fails_on = fails_on
        self.calls: list[list[int]] = []
        self.at_work = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def log_probs(self, sequences: Sequences) -> Floats:
        assert not self.at_work, "a second call before the first one has returned"
        self.at_work += 1
        self.calls.append(sequences.token_ids.tolist())
        try:
            await self.may_answer.wait()
            await asyncio.sleep(0)
        finally:
            self.at_work -= 1
        if self.fails_on in sequences.token_ids:
            raise RollError("reference rank 0: the process died")
        place = np.concatenate([np.arange(length) for length in sequences.lengths])
        return (-(sequences.token_ids + place / 64) * sequences.response_mask).astype(np.float32)


def groups() -> list[RolloutGroup]:
    """Return groups of different lengths. One response is long and wrong, one has no verdict, and one group has no
    verdict at all.
    """
    crashed = make_episode([90, 91], outcome=RewardOutcome.CRASHED)
    return [
        make_group(0, [make_episode([10, 11, 12], 1.0), make_episode([13, 14, 15, 16])]),
        make_group(1, [crashed, make_episode([20], 1.0)], token_ids=(1, 2, 3)),
        make_group(2, [crashed, crashed]),
        make_group(3, [make_episode([30, 31])], token_ids=(7, 8)),
    ]


def step(of: Sequence[RolloutGroup]) -> Sequences:
    return experience(of, SHAPING).sequences


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_ahead_reference_log_probs_equal_those_of_step(order: tuple[int, ...]) -> None:
    async def compare() -> None:
        taken = groups()
        ahead = ReferenceAhead(Model().log_probs, SHAPING)
        for index in order:
            ahead.finished(taken[index])
        expected = await ReferenceAtOnce(Model().log_probs).of(taken, step(taken))
        found = await ahead.of(taken, step(taken))
        assert found.tolist() == expected.tolist() and np.count_nonzero(found)
        assert found.dtype == expected.dtype

    asyncio.run(compare())


def test_reference_works_before_step_is_complete() -> None:
    async def run() -> None:
        model, taken = Model(), groups()
        ahead = ReferenceAhead(model.log_probs, SHAPING)
        ahead.finished(taken[0])
        while len(model.calls) < 1 or model.at_work:
            await asyncio.sleep(0)
        for group in taken[1:]:
            ahead.finished(group)
        await ahead.of(taken[:2], step(taken[:2]))
        await ahead.of(taken[2:], step(taken[2:]))
        assert model.calls == [step([group]).token_ids.tolist() for group in (taken[0], taken[1], taken[3])]

    asyncio.run(run())


def test_reference_failure_ends_the_step_needing_it() -> None:
    async def run() -> None:
        taken = groups()
        ahead = ReferenceAhead(Model(fails_on=20).log_probs, SHAPING)
        for group in taken:
            ahead.finished(group)
        with pytest.raises(RollError, match="the process died"):
            await ahead.of(taken, step(taken))
        await ahead.aclose()

    asyncio.run(run())


def test_closing_gives_up_what_is_being_asked() -> None:
    async def run() -> None:
        model, taken = Model(), groups()
        model.may_answer.clear()
        ahead = ReferenceAhead(model.log_probs, SHAPING)
        for group in taken:
            ahead.finished(group)
        while not model.at_work:
            await asyncio.sleep(0)
        await ahead.aclose()
        assert not model.at_work and len(asyncio.all_tasks()) == 1

    asyncio.run(run())
