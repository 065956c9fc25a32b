"""Turns of responses: from characters to tokens, exactly; and from rewards to advantages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from os.path import commonprefix

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from examples.tiny.make_model import END_ID, build_tokenizer
from roll.algorithms.advantages import Normalisation
from roll.algorithms.shaping import Overlong
from roll.rollout.batch import Shaping, experience
from roll.rollout.credit import Credit, CreditAssignment
from roll.rollout.episode import episode
from roll.rollout.turns import TurnEnds
from roll.types import Completion, FinishReason, RewardResult, Rollout, RolloutGroup, Sampling, TurnReward
from tests.unit.rollout.build import make_group, make_prompt, make_rollout


def bytewise() -> PreTrainedTokenizerBase:
    """A token for every byte: other letters than the Latin ones have several."""
    return build_tokenizer()


def wordwise() -> PreTrainedTokenizerBase:
    """Words with their blanks, as SentencePiece has them: the blank before the first word goes when a text is made."""
    words = ["<unk>", "▁on", "e", "▁two", "▁", "=", "1", "2"]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<unk>")


def completed(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> Completion:
    """As an engine returns it."""
    ids = np.array(token_ids, np.int32)
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert isinstance(text, str)
    return Completion(ids, None, np.zeros_like(ids), FinishReason.STOP, text)


def ends_by(tokenizer: PreTrainedTokenizerBase) -> TurnEnds:
    return TurnEnds(partial(tokenizer.decode, skip_special_tokens=True))  # pyright: ignore[reportArgumentType]


def located(tokenizer: PreTrainedTokenizerBase, completion: Completion, ends: list[int]) -> list[int]:
    return ends_by(tokenizer)(completion, ends).tolist()


def test_bytes_of_one_letter_stay_together() -> None:
    tokenizer = bytewise()
    ids = tokenizer("a€b", add_special_tokens=False).input_ids
    assert len(ids) == 5
    completion = completed(tokenizer, [*ids, END_ID])
    # a | the three bytes of the euro | b, and with it the end of the sequence.
    assert located(tokenizer, completion, [1, 2, 3]) == [1, 4, 6]


def test_the_end_of_the_sequence_belongs_to_the_last_turn_if_that_reaches_the_texts_end() -> None:
    tokenizer = bytewise()
    completion = completed(tokenizer, [*tokenizer("ab", add_special_tokens=False).input_ids, END_ID])
    assert located(tokenizer, completion, [1, 2]) == [1, 3]
    assert located(tokenizer, completion, [1]) == [1]


def test_blanks_that_depend_on_what_stands_before() -> None:
    tokenizer = wordwise()
    completion = completed(tokenizer, [1, 2, 3, 1, 2])
    assert completion.text == "one two one"
    assert located(tokenizer, completion, [1, 2, 3, 4, 7, 8, 11]) == [1, 1, 2, 3, 3, 4, 5]


def by_search(tokenizer: PreTrainedTokenizerBase, completion: Completion, end: int) -> int:
    """The definition: tokens are added until the text of all of them has the character."""
    if end == len(completion.text):
        return len(completion.token_ids)
    for count in range(1, len(completion.token_ids) + 1):
        so_far = tokenizer.decode(completion.token_ids[:count].tolist(), skip_special_tokens=True)
        assert isinstance(so_far, str)
        if len(commonprefix([so_far, completion.text])) >= end:
            return count
    raise AssertionError("the text is not that of the tokens")


TOKENIZERS: list[tuple[Callable[[], PreTrainedTokenizerBase], st.SearchStrategy[list[int]]]] = [
    (bytewise, st.lists(st.integers(0, END_ID), min_size=1, max_size=24)),
    (bytewise, st.text("ab €é\u4e2d🙂", min_size=1, max_size=8).map(lambda text: [*bytewise()(text).input_ids, END_ID])),
    (wordwise, st.lists(st.integers(1, 7), min_size=1, max_size=12)),
]


@settings(max_examples=60)
@given(which=st.sampled_from(range(len(TOKENIZERS))), drawn=st.data())
def test_against_the_definition(which: int, drawn: st.DataObject) -> None:
    """Also for bytes that are no text at all."""
    make, ids = TOKENIZERS[which]
    tokenizer = make()
    completion = completed(tokenizer, drawn.draw(ids))
    ends = list(range(1, len(completion.text) + 1))
    got = located(tokenizer, completion, ends)
    assert got == [by_search(tokenizer, completion, end) for end in ends]
    assert got == sorted(got)


def divided(token_ids: list[int], reward: float, ends: list[int], values: list[float], finish: FinishReason = FinishReason.STOP) -> Rollout:
    rollout = make_rollout(token_ids, finish=finish)
    turns = tuple(TurnReward(number + 1, value) for number, value in enumerate(values))
    return Rollout(rollout.completion, RewardResult(reward, turns=turns), np.array(ends, np.int32))


BY_TURNS = Credit("step_reinforce", Normalisation(gamma=0.5))


def advantages_of(groups: list[RolloutGroup], credit: Credit = BY_TURNS, shaping: Shaping | None = None) -> list[float]:
    return CreditAssignment(credit)(experience(groups, shaping or Shaping()), None)[0].advantages.tolist()


def test_turns_are_discounted_and_what_is_left_of_the_value_is_the_last_ones() -> None:
    # Two turns earn 1 and 2; the rest of 7, which is 4, is earned by the tokens after them. Undivided, a response is one turn.
    groups = [make_group(0, [divided([5, 6, 7, 8, 9], 7.0, [2, 3], [1.0, 2.0]), make_rollout([5, 6], 3.0)])]
    assert advantages_of(groups) == [0, 0, 3, 3, 4, 4, 4, 0, 0, 3, 3]
    step = experience(groups, Shaping())
    assert step.turns is not None
    assert step.turns.rewards.tolist() == [1, 2, 4, 3]
    assert step.turns.rows.tolist() == [0, 0, 0, 1]
    assert CreditAssignment(BY_TURNS)(step, None)[1]["response/turns_mean"] == 2


def test_turns_that_end_in_one_token_are_one() -> None:
    assert advantages_of([make_group(0, [divided([5, 6, 7], 4.0, [1, 1, 3], [1.0, 1.0, 2.0])])]) == [0, 0, 3, 2, 2]


def test_the_punishment_of_length_is_the_last_turns() -> None:
    shaping = Shaping(overlong=Overlong(limit=3, buffer=1, factor=4.0))
    assert advantages_of([make_group(0, [divided([5, 6, 7], 2.0, [1, 3], [1.0, 1.0])])], shaping=shaping) == [0, 0, -0.5, -3, -3]


def test_the_turns_of_masked_responses_count_and_are_not_learnt() -> None:
    groups = [
        make_group(0, [divided([5, 6], 3.0, [1, 2], [1.0, 2.0]), divided([7], 9.0, [1], [9.0], FinishReason.LENGTH)]),
    ]
    credit = Credit("step_reinforce", Normalisation(gamma=0.5, mean="group"))
    # Returns 2, 2 and 9: their mean is 13/3.
    got = advantages_of(groups, credit, Shaping(max_len_mask=True))
    assert got == pytest.approx([0, 0, 2 - 13 / 3, 2 - 13 / 3, 0, 0, 0])


def test_other_estimators_do_not_see_turns() -> None:
    alike = [make_group(0, [make_rollout([5, 6, 7], 4.0), make_rollout([5], 1.0)])]
    groups = [make_group(0, [divided([5, 6, 7], 4.0, [1, 3], [1.0, 3.0]), make_rollout([5], 1.0)])]
    for estimator in ("grpo", "reinforce", "rloo"):
        credit = Credit(estimator, Normalisation())
        assert advantages_of(groups, credit) == advantages_of(alike, credit)


class Saying:
    """Answers every prompt with one text, byte by byte."""

    async def generate(self, token_ids: object, sampling: Sampling, seed: int | None = None) -> list[Completion]:
        tokenizer = bytewise()
        return [completed(tokenizer, [*tokenizer("2€").input_ids, END_ID])] * sampling.samples


class Halving:
    """A turn for each character."""

    async def score(self, prompt: object, responses: list[str]) -> list[RewardResult]:
        return [RewardResult(1.0, turns=(TurnReward(1, 0.5), TurnReward(2, 0.5)))] * (len(responses) - 1) + [RewardResult(0.0)]


@pytest.mark.parametrize("divides", [True, False])
def test_an_episode_finds_where_turns_end(divides: bool) -> None:
    locate = ends_by(bytewise()) if divides else None
    group = asyncio.run(episode(make_prompt(0), Saying(), Halving(), Sampling(8, samples=2), None, True, locate))  # type: ignore[arg-type]
    ends = [None if rollout.turn_ends is None else rollout.turn_ends.tolist() for rollout in group.rollouts]
    assert ends == ([[1, 5]] * 2 if divides else [None] * 2)
    assert group.baseline is not None and group.baseline.turn_ends is None
