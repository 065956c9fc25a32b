"""A step whose prompts show pictures: responses share their prompt's pixels, and never end with a placeholder."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from roll.data import packing
from roll.rollout.batch import Shaping, experience
from roll.rollout.record import single_turns, without_placeholder
from roll.types import (
    AskedPictures,
    Completion,
    FinishReason,
    Pictures,
    Prompt,
    PromptPictures,
    RewardResult,
    RolloutGroup,
    Sampling,
)
from tests.unit.rollout.build import make_prompt

TOKEN = 9


def completion(ids: list[int]) -> Completion:
    count = len(ids)
    log_probs = np.arange(count, dtype=np.float32)
    return Completion(np.array(ids, np.int32), log_probs, np.full(count, 3, np.int32), FinishReason.STOP, "text")


def seeing(prompt: Prompt, rows: list[int], first: float) -> Prompt:
    """Return a prompt with a picture for each number of rows, whose values count from `first`."""
    total, count = sum(rows), len(rows)
    values = first + np.arange(total, dtype=np.float32)[:, None]
    own = Pictures(values, np.array(rows), np.ones((count, 2), np.int64), np.arange(count), np.array([count]))
    asked = AskedPictures(prompt.token_ids, (b"",) * count, ("",) * count)
    return replace(prompt, shown=PromptPictures(("",) * count, lambda: asked, lambda: own))


def group(prompt: Prompt, samples: int) -> RolloutGroup:
    completions = [completion([5, 6 + sample]) for sample in range(samples)]
    rewards = [RewardResult(float(sample)) for sample in range(samples)]
    return RolloutGroup(prompt, single_turns(prompt, completions, rewards))


def test_chosen_responses_share_pixels() -> None:
    prompts = [make_prompt(number, [TOKEN, TOKEN, 1]) for number in range(3)]
    groups = [
        group(seeing(prompts[0], [2, 3], 100.0), 2),
        group(prompts[1], 2),
        group(seeing(prompts[2], [4], 200.0), 2),
    ]
    sequences = experience(groups, Shaping()).sequences
    assert sequences.shown is not None
    assert len(sequences.shown.values) == 2 + 3 + 4, "a prompt's pictures are there once"
    assert sequences.shown.counts.tolist() == [2, 2, 0, 0, 1, 1]
    first, second = np.arange(100.0, 105.0), np.arange(200.0, 204.0)
    expected = [first, first, [], [], second, second]
    for chosen in ([0], [1, 4], [5, 0, 2], [2, 3], [0, 1, 2, 3, 4, 5], [4, 5]):
        shown = packing.select(sequences, chosen).shown
        values = np.concatenate([expected[index] for index in chosen])
        assert (shown is None) == (not len(values))
        if shown is not None:
            rows = np.concatenate(
                [np.arange(begin, begin + count) for begin, count in zip(shown.begins, shown.rows, strict=True)]
            )
            assert shown.values[rows, 0].tolist() == values.tolist()
            assert len(shown.values) == len(set(values.tolist())), "what responses share is there once"
            assert shown.counts.tolist() == sequences.shown.counts[chosen].tolist()


def test_pictures_that_share_rows_can_be_joined_again() -> None:
    prompt = seeing(make_prompt(0, [TOKEN, 1]), [2], 0.0)
    assert prompt.shown is not None
    own = prompt.shown.pixels()
    twice = packing.concatenate_pictures([own, own])
    again = packing.concatenate_pictures([twice, None, own])
    assert again.counts.tolist() == [1, 1, 0, 1] and again.begins.tolist() == [0, 0, 2]
    chosen = packing.select_pictures(again, np.array([3, 1]))
    assert chosen is not None and chosen.values[:, 0].tolist() == [0.0, 1.0] * 2


def test_step_without_pictures_shows_none() -> None:
    assert experience([group(make_prompt(0, [1, 2]), 2)], Shaping()).sequences.shown is None


def test_placeholder_that_ends_response_is_cut_off() -> None:
    cut = without_placeholder(completion([5, 6, TOKEN]), TOKEN)
    assert cut.token_ids.tolist() == [5, 6] and cut.policy_versions.tolist() == [3, 3]
    assert cut.log_probs is not None and cut.log_probs.tolist() == [0.0, 1.0]
    for kept in (completion([5, 6]), completion([])):
        assert without_placeholder(kept, TOKEN) is kept
    assert without_placeholder(whole := completion([5, TOKEN]), None) is whole
    assert not len(without_placeholder(completion([TOKEN]), TOKEN).token_ids)


def test_placeholder_ends_responses_and_is_no_text() -> None:
    sampling = Sampling(4, stop_token_ids=(2,), placeholder=TOKEN)
    assert sampling.ending_token_ids == (2, TOKEN) and Sampling(4, stop_token_ids=(2,)).ending_token_ids == (2,)
    assert sampling.without_stop_token([1, TOKEN]) == [1] and sampling.without_stop_token([1, 3]) == [1, 3]
