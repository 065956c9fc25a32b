"""Routes of an engine, from a completion to the trainer's micro-batches. Expected values are worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from roll.algorithms.advantages import Normalisation
from roll.data.packing import select
from roll.rollout.batch import Credit, CreditAssignment, Experience, Shaping, experience, unknown_fraction
from roll.rollout.record import Transcript, routed, single_turns
from roll.training.actor_train import share_out, share_out_with_routes
from roll.types import Completion, FinishReason, RewardResult, RolloutGroup, Routes, StopReason
from tests.unit.rollout.build import make_prompt, observed, sampled


def routes_of(*experts: int) -> Routes:
    """Return routes of one layer and one expert per token."""
    return np.array(experts, np.int16)[:, None, None]


def completion(tokens: int, *experts: int) -> Completion:
    """Return a completion whose context and tokens have these experts."""
    ids = np.arange(10, 10 + tokens, dtype=np.int32)
    routes = routes_of(*experts)
    return Completion(ids, np.zeros(tokens, np.float32), np.zeros(tokens, np.int32), FinishReason.STOP, "", routes)


def test_responses_to_one_prompt_have_own_routes() -> None:
    prompt = make_prompt(0)
    asked = len(prompt.token_ids)
    said = [completion(2, *[1] * asked, 2, -1), completion(1, *[3] * asked, -1)]
    episodes = single_turns(prompt, said, [RewardResult(0.0), RewardResult(1.0)])
    found = experience([RolloutGroup(prompt, episodes)], Shaping()).sequences
    assert found.routes is not None
    assert found.routes[:, 0, 0].tolist() == [1] * asked + [2, -1] + [3] * asked + [-1]
    assert unknown_fraction(found, found.routes) == 0.0


def test_turns_fill_unknown_routes_of_earlier_turns() -> None:
    transcript = Transcript()
    transcript.start(np.array([1, 2], np.int32), "")
    transcript.act(completion(2, 4, 5, 6, -1), (), "")
    transcript.go_on(np.array([3], np.int32), "")
    # The engine reads the first turn again, and may then choose otherwise.
    transcript.act(completion(1, 4, 5, 0, 7, 8, -1), (), "")
    segments = transcript.episode(stop=StopReason.COMPLETED).trajectories[0].segments
    laid = np.concatenate([segment.routes for segment in segments if segment.routes is not None])
    assert laid[:, 0, 0].tolist() == [4, 5, 6, 7, 8, -1]


def test_unknown_routes_are_counted_without_last_tokens() -> None:
    segments = routed([observed([1, 2]), sampled([3, 4])], routes_of(1, -1, 2, -1))
    assert [segment.routes[:, 0, 0].tolist() for segment in segments if segment.routes is not None] == [
        [1, -1],
        [2, -1],
    ]
    whole = experience_of(completion(2, *[1] * 4, 2, -1), completion(2, *[-1] * 4, 2, -1))
    assert whole.sequences.routes is not None
    assert unknown_fraction(whole.sequences, whole.sequences.routes) == pytest.approx(4 / 10)
    _, metrics = CreditAssignment(Credit("grpo", Normalisation(mean="group")))(whole, None)
    assert metrics["router/unknown_fraction"] == pytest.approx(4 / 10)


def experience_of(*said: Completion) -> Experience:
    prompt = replace(make_prompt(0), token_ids=np.arange(4, dtype=np.int32))
    episodes = single_turns(prompt, said, [RewardResult(float(number)) for number in range(len(said))])
    return experience([RolloutGroup(prompt, episodes)], Shaping())


def test_only_the_policy_gets_routes() -> None:
    found = experience_of(completion(1, 1, 2, 3, 4, -1), completion(2, 5, 6, 7, 8, 9, -1)).sequences
    chosen = select(found, [1])
    assert chosen.routes is not None
    assert chosen.routes[:, 0, 0].tolist() == [5, 6, 7, 8, 9, -1]
    _, parts = share_out(found, 1, 100)
    assert all(part.routes is None for forwards in parts for part in forwards)
    _, parts = share_out_with_routes(found, 1, 100)
    assert all(part.routes is not None for forwards in parts for part in forwards)


def test_routes_of_another_length_are_an_error() -> None:
    with pytest.raises(AssertionError, match="3 tokens"):
        routed([observed([1]), sampled([2])], routes_of(1, 2, 3))
