"""The wire format: decoding returns exactly what was encoded."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from roll.ray.batching import decoded, encode_value
from roll.types import Completion, FinishReason, RewardOutcome, RewardResult, TurnReward

TEXTS = st.text(max_size=8)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    """Draw a completion, possibly without tokens, with one or several policy versions, and with or without
    log-probs.
    """
    tokens = draw(
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-50, 0, width=32), st.integers(0, 2)), max_size=6)
    )
    has_log_probs, is_one_version = draw(st.booleans()), draw(st.booleans())
    return Completion(
        np.array([token for token, _, _ in tokens], np.int32),
        np.array([log_prob for _, log_prob, _ in tokens], np.float32) if has_log_probs else None,
        np.array([5 if is_one_version else version for _, _, version in tokens], np.int32),
        draw(st.sampled_from(FinishReason)),
        draw(TEXTS),
        np.arange(len(tokens) * 6, dtype=np.int16).reshape(-1, 3, 2) if draw(st.booleans()) else None,
        draw(st.integers(0, 9)),
    )


def same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.tobytes() == other.tobytes() and one.shape == other.shape


@given(st.lists(completions(), max_size=4))
def test_completions_arrive_as_they_were(sent: list[Completion]) -> None:
    arrived = decoded(encode_value((sent, None)))[0]
    assert len(arrived) == len(sent)
    for one, other in zip(sent, arrived, strict=True):
        assert same(one.token_ids, other.token_ids) and same(one.log_probs, other.log_probs)
        assert same(one.policy_versions, other.policy_versions) and same(one.routes, other.routes)
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
        assert one.cached_tokens == other.cached_tokens and isinstance(other.finish_reason, FinishReason)


@given(
    value=st.floats(allow_nan=False),
    outcome=st.sampled_from(RewardOutcome),
    note=TEXTS,
    turns=st.lists(st.integers(1, 9)),
)
def test_rewards_arrive_as_they_were(value: float, outcome: RewardOutcome, note: str, turns: list[int]) -> None:
    sent = RewardResult(value, outcome, {"part": value}, note, tuple(TurnReward(end, value) for end in turns))
    assert decoded(encode_value(sent)) == sent
