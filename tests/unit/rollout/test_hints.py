"""What a self-teacher sees: the hints of each response, and sequences that end with the exact tokens of responses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from roll.config.schema.self_distillation import Hint
from roll.rollout.batch import Shaping, experience
from roll.rollout.hints import step_hints, taught_sequences, taught_tokens
from roll.types import Episode, Prompt, RewardOutcome, RolloutGroup, StopReason
from tests.unit.rollout.build import make_episode, make_group


def said(text: str, reward: float, note: str = "", outcome: RewardOutcome = RewardOutcome.SCORED) -> Episode:
    """Return a scored response with this text."""
    made = make_episode([5], reward, outcome=outcome, note=note)
    [path] = made.trajectories
    return replace(made, trajectories=[replace(path, segments=[replace(path.segments[0], text=text)])])


def passed(prompt: Prompt, episode: Episode) -> bool:
    return episode.reward.value >= 1


def hints_of(*episodes: Episode, sees: tuple[Hint, ...], solution: str | None = None) -> list[dict[Hint, str]]:
    found = step_hints([make_group(0, episodes)], sees, passed, lambda prompt: solution)
    return [dict(hints) for _, hints in found]


def test_success_is_another_response_that_passed() -> None:
    episodes = said("a", 0), said("b", 1), said("c", 1), said("d", 1)
    found = hints_of(*episodes, sees=("success",))
    assert found == [{"success": "b"}, {"success": "c"}, {"success": "b"}, {"success": "b"}]


def test_response_never_sees_itself() -> None:
    assert hints_of(said("a", 0), said("b", 1), sees=("success",)) == [{"success": "b"}, {}]


@pytest.mark.parametrize("text", ["", " \n"])
def test_empty_success_is_no_hint(text: str) -> None:
    assert hints_of(said("a", 0), said(text, 1), sees=("success",)) == [{}, {}]


def test_feedback_is_the_note_of_a_failure() -> None:
    episodes = said("a", 0, "case 2: wrong"), said("b", 1, "4 of 4 cases"), said("c", 0, " ")
    assert hints_of(*episodes, sees=("feedback",)) == [{"feedback": "case 2: wrong"}, {}, {}]


def test_solution_is_shown_to_every_response() -> None:
    episodes = said("a", 0, "wrong"), said("b", 1)
    assert hints_of(*episodes, sees=("solution",), solution="42") == [{"solution": "42"}] * 2
    assert hints_of(*episodes, sees=("solution",)) == [{}, {}]
    both = hints_of(*episodes, sees=("solution", "feedback", "success"), solution="42")
    assert both == [{"solution": "42", "feedback": "wrong", "success": "b"}, {"solution": "42"}]


def test_responses_without_verdict_have_no_place() -> None:
    episodes = said("a", 0), said("b", 1, outcome=RewardOutcome.CRASHED), said("c", 1)
    assert hints_of(*episodes, sees=("success",)) == [{"success": "c"}, {}]


def step_groups() -> list[RolloutGroup]:
    first = make_group(0, [make_episode([5, 6, 2], 0), make_episode([7], 1, stop=StopReason.LENGTH)])
    return [first, make_group(1, [make_episode([8, 2], 1), make_episode([9, 9], 0)], token_ids=(3,))]


def test_teacher_reads_exact_tokens_after_its_prompt() -> None:
    step = experience(step_groups(), Shaping(max_len_mask=True))
    prompts = {3: np.array([20, 21], np.int32), 0: np.array([30, 31, 32], np.int32)}
    both = taught_sequences(step.sequences, prompts)
    assert both.rows == [0, 3]
    assert both.student.token_ids.tolist() == [1, 2, 5, 6, 2, 3, 9, 9]
    assert both.teacher.token_ids.tolist() == [30, 31, 32, 5, 6, 2, 20, 21, 9, 9]
    assert both.teacher.offsets.tolist() == [0, 6, 10]
    assert both.teacher.response_mask.tolist() == [False] * 3 + [True] * 3 + [False] * 2 + [True] * 2
    where = taught_tokens(step.sequences, both.rows)
    assert step.sequences.token_ids[where].tolist() == both.teacher.token_ids[both.teacher.response_mask].tolist()
    assert not taught_tokens(step.sequences, [1]).any(), "a response outside the loss"
