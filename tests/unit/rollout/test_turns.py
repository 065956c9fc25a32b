"""Turns of responses: the exact mapping of their ends from characters to tokens, and their rewards and advantages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
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
from roll.rollout.batch import Credit, CreditAssignment, Shaping, experience
from roll.rollout.group import SingleTurns
from roll.rollout.record import TurnEnds, by_turns, joined_turns, token_log_probs, token_versions
from roll.types import (
    Completion,
    Episode,
    FinishReason,
    NumberedCompletions,
    RewardResult,
    RolloutGroup,
    Sampling,
    Segment,
    StopReason,
    TurnReward,
)
from tests.unit.rollout.build import (
    EachByItself,
    make_episode,
    make_group,
    make_prompt,
    make_trajectory,
    observed,
    sampled,
)


def bytewise() -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token per byte. A non-ASCII character has several tokens."""
    return build_tokenizer()


def wordwise() -> PreTrainedTokenizerBase:
    """Return a tokenizer like SentencePiece: a word includes the space before it, and decoding removes the first
    space.
    """
    words = ["<unk>", "▁on", "e", "▁two", "▁", "=", "1", "2"]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<unk>")


def text_of(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def response(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> Segment:
    return sampled(token_ids, text=text_of(tokenizer, token_ids))


def ends_by(tokenizer: PreTrainedTokenizerBase) -> TurnEnds:
    return TurnEnds(partial(tokenizer.decode, skip_special_tokens=True))  # pyright: ignore[reportArgumentType]


def located(tokenizer: PreTrainedTokenizerBase, segment: Segment, ends: list[int]) -> list[int]:
    return ends_by(tokenizer)(segment, ends).tolist()


def test_bytes_of_one_letter_stay_together() -> None:
    tokenizer = bytewise()
    ids = tokenizer("a€b", add_special_tokens=False).input_ids
    assert len(ids) == 5
    segment = response(tokenizer, [*ids, END_ID])
    # Turns: a | the three bytes of the euro sign | b and the end of the sequence.
    assert located(tokenizer, segment, [1, 2, 3]) == [1, 4, 6]


def test_end_token_belongs_to_turn_reaching_text_end() -> None:
    tokenizer = bytewise()
    segment = response(tokenizer, [*tokenizer("ab", add_special_tokens=False).input_ids, END_ID])
    assert located(tokenizer, segment, [1, 2]) == [1, 3]
    assert located(tokenizer, segment, [1]) == [1]


def test_blanks_that_depend_on_what_stands_before() -> None:
    tokenizer = wordwise()
    segment = response(tokenizer, [1, 2, 3, 1, 2])
    assert segment.text == "one two one"
    assert located(tokenizer, segment, [1, 2, 3, 4, 7, 8, 11]) == [1, 1, 2, 3, 3, 4, 5]


def by_search(tokenizer: PreTrainedTokenizerBase, segment: Segment, end: int) -> int:
    """Return the end in tokens by its definition: the smallest number of tokens whose text contains the first `end`
    characters.
    """
    if end == len(segment.text):
        return len(segment.token_ids)
    for count in range(1, len(segment.token_ids) + 1):
        if len(commonprefix([text_of(tokenizer, segment.token_ids[:count].tolist()), segment.text])) >= end:
            return count
    raise AssertionError("the tokens do not decode to the text")


TOKENIZERS: list[tuple[Callable[[], PreTrainedTokenizerBase], st.SearchStrategy[list[int]]]] = [
    (bytewise, st.lists(st.integers(0, END_ID), min_size=1, max_size=24)),
    (
        bytewise,
        st.text("ab €é\u4e2d🙂", min_size=1, max_size=8).map(lambda text: [*bytewise()(text).input_ids, END_ID]),
    ),
    (wordwise, st.lists(st.integers(1, 7), min_size=1, max_size=12)),
]


@settings(max_examples=60)
@given(which=st.sampled_from(range(len(TOKENIZERS))), drawn=st.data())
def test_against_the_definition(which: int, drawn: st.DataObject) -> None:
    """Also covers bytes that are not valid UTF-8."""
    make, ids = TOKENIZERS[which]
    tokenizer = make()
    segment = response(tokenizer, drawn.draw(ids))
    ends = list(range(1, len(segment.text) + 1))
    got = located(tokenizer, segment, ends)
    assert got == [by_search(tokenizer, segment, end) for end in ends]
    assert got == sorted(got)


def turn_rewarded(
    token_ids: list[int], reward: float, ends: list[int], values: list[float], stop: StopReason = StopReason.COMPLETED
) -> Episode:
    """Return an episode with a response that is divided into turns. It has no prompt, which `make_group` adds."""
    turns = tuple(TurnReward(number + 1, value) for number, value in enumerate(values))
    path = make_trajectory(observed([]), sampled(token_ids, text="x" * (len(turns) + 1)), stop=stop)
    episode = by_turns(Episode([path], RewardResult(reward, turns=turns)), lambda segment, _: np.array(ends, np.int32))
    [path] = episode.trajectories
    return replace(episode, trajectories=[replace(path, segments=path.segments[1:])])


BY_TURNS = Credit("step_reinforce", Normalisation(gamma=0.5))


def advantages_of(groups: list[RolloutGroup], credit: Credit = BY_TURNS, shaping: Shaping | None = None) -> list[float]:
    return CreditAssignment(credit)(experience(groups, shaping or Shaping()), None)[0].advantages.tolist()


def test_turn_rewards_discount_and_last_turn_gets_rest() -> None:
    # Two turns get 1 and 2. The rest of the reward 7, which is 4, goes to the tokens after them. An undivided response
    # is one turn.
    groups = [make_group(0, [turn_rewarded([5, 6, 7, 8, 9], 7.0, [2, 3], [1.0, 2.0]), make_episode([5, 6], 3.0)])]
    assert advantages_of(groups) == [0, 0, 3, 3, 4, 4, 4, 0, 0, 3, 3]
    step = experience(groups, Shaping())
    assert step.turns is not None
    assert step.turns.rewards.tolist() == [1, 2, 4, 3]
    assert step.turns.rows.tolist() == [0, 0, 0, 1]
    assert CreditAssignment(BY_TURNS)(step, None)[1]["response/turns_mean"] == 2


def test_turns_that_end_in_one_token_are_one() -> None:
    assert advantages_of([make_group(0, [turn_rewarded([5, 6, 7], 4.0, [1, 1, 3], [1.0, 1.0, 2.0])])]) == [
        0,
        0,
        3,
        2,
        2,
    ]


def test_the_punishment_of_length_is_the_last_turns() -> None:
    shaping = Shaping(overlong=Overlong(limit=3, buffer=1, factor=4.0))
    assert advantages_of([make_group(0, [turn_rewarded([5, 6, 7], 2.0, [1, 3], [1.0, 1.0])])], shaping=shaping) == [
        0,
        0,
        -0.5,
        -3,
        -3,
    ]


def test_masked_turns_count_in_statistics_only() -> None:
    groups = [
        make_group(
            0, [turn_rewarded([5, 6], 3.0, [1, 2], [1.0, 2.0]), turn_rewarded([7], 9.0, [1], [9.0], StopReason.LENGTH)]
        )
    ]
    credit = Credit("step_reinforce", Normalisation(gamma=0.5, mean="group"))
    # The returns are 2, 2 and 9, with mean 13/3.
    got = advantages_of(groups, credit, Shaping(max_len_mask=True))
    assert got == pytest.approx([0, 0, 2 - 13 / 3, 2 - 13 / 3, 0, 0, 0])


def test_other_estimators_do_not_see_turns() -> None:
    alike = [make_group(0, [make_episode([5, 6, 7], 4.0), make_episode([5], 1.0)])]
    groups = [make_group(0, [turn_rewarded([5, 6, 7], 4.0, [1, 3], [1.0, 3.0]), make_episode([5], 1.0)])]
    for estimator in ("grpo", "reinforce", "rloo"):
        credit = Credit(estimator, Normalisation())
        assert advantages_of(groups, credit) == advantages_of(alike, credit)


def whole_texts(episode: Episode) -> str:
    return "".join(segment.text for segment in episode.sampled)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_divided_turns_keep_tokens_and_rewards(drawn: st.DataObject) -> None:
    """For any response and turns: the segments join to the response, and each has the rewards of the turns that end in
    it.
    """
    count = drawn.draw(st.integers(0, 6))
    ends = sorted(drawn.draw(st.lists(st.integers(min(count, 1), count), min_size=1, max_size=5)))
    values = [float(drawn.draw(st.integers(-3, 3))) for _ in ends]
    versions = sorted(drawn.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    reward = float(drawn.draw(st.integers(-5, 5)))
    whole = sampled(list(range(count)), [-0.5 * n for n in range(count)], versions, "x" * 6)
    turns = tuple(TurnReward(number + 1, value) for number, value in enumerate(values))
    episode = Episode([make_trajectory(observed([8, 9]), whole)], RewardResult(reward, turns=turns))
    parts = by_turns(episode, lambda segment, _: np.array(ends, np.int32))
    assert whole_texts(parts) == whole.text
    assert np.concatenate([segment.token_ids for segment in parts.sampled]).tolist() == whole.token_ids.tolist()
    for read in (token_versions, token_log_probs):
        assert read(parts.sampled).tolist() == read([whole]).tolist()
    borders = sorted({*ends, count})
    assert np.cumsum([len(segment.token_ids) for segment in parts.sampled]).tolist() == borders
    assert list(parts.turn_rewards) == [
        sum(value for end, value in zip(ends, values, strict=True) if end == border) for border in borders
    ]
    joined = joined_turns([parts], np.array([reward], np.float32))
    assert joined is not None
    rest = reward - sum(values)
    assert joined.rewards.tolist() == [*parts.turn_rewards[:-1], parts.turn_rewards[-1] + rest]
    tokens = np.diff(borders, prepend=0)
    tokens[0] += 2
    assert joined.of_token.tolist() == np.repeat(np.arange(len(borders)), tokens).tolist()


class Saying:
    """Answers every prompt with the same text, with one token per byte."""

    async def generate(
        self, token_ids: object, sampling: Sampling, seed: int | None = None, shown: object = None
    ) -> AsyncGenerator[NumberedCompletions, None]:
        tokenizer = bytewise()
        ids = np.array([*tokenizer("2€").input_ids, END_ID], np.int32)
        yield list(
            enumerate(
                [Completion(ids, None, np.zeros_like(ids), FinishReason.STOP, text_of(tokenizer, ids.tolist()))]
                * sampling.samples
            )
        )


class Halving(EachByItself):
    """Makes each of the two characters of a response a turn with reward 0.5."""

    async def score(self, prompt: object, responses: list[str]) -> list[RewardResult]:
        """Return the rewards. A greedy response, which is scored alone, gets 0."""
        if len(responses) == 1:
            return [RewardResult(0.0)]
        return [RewardResult(1.0, turns=(TurnReward(1, 0.5), TurnReward(2, 0.5)))] * len(responses)


@pytest.mark.parametrize("divides", [True, False])
def test_response_is_divided_when_it_is_scored(divides: bool) -> None:
    locate = ends_by(bytewise()) if divides else None
    sampler = SingleTurns(Saying(), Halving(), Sampling(8, samples=2), True, locate)  # type: ignore[arg-type]
    group = asyncio.run(sampler.sample(make_prompt(0), None))
    for episode in group.episodes:
        assert [(len(segment.token_ids), segment.text) for segment in episode.sampled] == (
            [(1, "2"), (4, "€")] if divides else [(5, "2€")]
        )
        assert list(episode.turn_rewards) == ([0.5, 0.5] if divides else [])
    assert group.baseline is not None and len(group.baseline.sampled) == 1 and not group.baseline.turn_rewards


def test_each_unknown_state_is_a_state_apart() -> None:
    def with_states(*states: str) -> Episode:
        path = make_trajectory(observed([1]), sampled([5]), observed([2]), sampled([6]))
        return Episode([path], RewardResult(1.0), (0.0, 1.0), states)

    joined = joined_turns(
        [with_states("a", "b"), with_states(), with_states("b", "a"), with_states()], np.ones(4, np.float32)
    )
    assert joined is not None and joined.states is not None
    assert joined.states.tolist() == [0, 1, 2, 3, 1, 0, 4, 5]


def test_sampled_segments_are_turns_without_rewards() -> None:
    """An environment that pays nothing until the end still has turns. An episode of one segment is no turn."""
    path = make_trajectory(observed([1]), sampled([5]), observed([2]), sampled([6]))
    joined = joined_turns([Episode([path], RewardResult(3.0))], np.array([3.0], np.float32))
    assert joined is not None and joined.rewards.tolist() == [0.0, 3.0] and joined.of_token.tolist() == [0, 0, 1, 1]
    single = Episode([make_trajectory(observed([1]), sampled([5]))], RewardResult(3.0))
    assert joined_turns([single], np.array([3.0], np.float32)) is None
