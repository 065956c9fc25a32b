"""Notices about responses at the length limit and about advantages that are all 0, and the causes that they name."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from roll.algorithms.advantages import ADVANTAGES, Normalisation
from roll.data.chat import NO_END, EndOfTurn
from roll.rollout.batch import Credit, CreditAssignment, Shaping, experience, rollout_metrics
from roll.runs.notices import ZeroAdvantages, held_out_watches, training_watches
from roll.tracking.base import StepNotices
from roll.types import Episode, RolloutGroup, StopReason
from tests.unit.rollout.build import make_episode, make_group, make_trajectory, observed, sampled

TOKENIZER = cast(Any, SimpleNamespace(eos_token="<|endoftext|>", convert_ids_to_tokens={7: "<|im_end|>"}.get))
CHATML = EndOfTurn((7,))


def at_limit(config: Any, end: EndOfTurn = CHATML) -> str:
    [notice] = StepNotices(training_watches(config, TOKENIZER, end)).after(1, {"response/at_limit_fraction": 1.0})
    return notice.text


def test_limit_notice_names_ends_limit_and_remedy(configured: Callable[..., Any]) -> None:
    text = at_limit(
        configured("tiny/tiny_rlvr_lora_zero3", "response_length=48", "actor_infer.generating_args.max_new_tokens=null")
    )
    for part in (
        "48 tokens",
        "response_length",
        "'<|endoftext|>' (the model's",
        "'<|im_end|>' (token 7",
        "SFT",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("overrides", "end", "parts"),
    [
        (
            ["actor_infer.generating_args.max_new_tokens=5"],
            CHATML,
            ["5 tokens (actor_infer.generating_args.max_new_tokens)"],
        ),
        (
            ["actor_infer.generating_args.ignore_eos=true"],
            CHATML,
            ["stops at: nothing.", "With ignore_eos no response"],
        ),
        ([], NO_END, ["stops at: '<|endoftext|>'", "no chat template", "stop_strings"]),
        ([], EndOfTurn((), ("</turn>",)), ["'</turn>' (the template's end of a turn)", "has not learnt"]),
        (["actor_infer.generating_args.stop_strings=[STOP]"], NO_END, ["'STOP' (stop_strings)", "has not learnt"]),
    ],
)
def test_limit_notice_cause_follows_from_ends(
    overrides: list[str], end: EndOfTurn, parts: list[str], configured: Callable[..., Any]
) -> None:
    text = at_limit(configured("tiny/tiny_rlvr_lora_zero3", *overrides), end)
    assert [part for part in parts if part not in text] == []


def test_each_held_out_set_has_its_own_limit(configured: Callable[..., Any]) -> None:
    sets = "{a.b: {data_args: {file_name: a.jsonl, prompt: prompt}, generating_args: {max_new_tokens: 3}}, "
    sets += "c: {data_args: {file_name: b.jsonl, prompt: prompt}, generating_args: {max_new_tokens: 9}}}"
    config = configured("tiny/tiny_rlvr_lora_zero3", "validation.data_args=null", f"+validation.sets={sets}")
    ends = {"a.b": CHATML, "c": NO_END}
    metrics = {"val/a.b/at_limit_fraction": 1.0, "val/c/at_limit_fraction": 0.99}
    [notice] = StepNotices(held_out_watches(config, TOKENIZER, ends)).after(0, metrics)
    assert (
        "every response of a.b" in notice.text
        and "3 tokens (validation.sets.a.b.generating_args.max_new_tokens)" in notice.text
    )
    [notice] = StepNotices(held_out_watches(config, TOKENIZER, ends, "--max-new-tokens")).after(0, metrics)
    assert "3 tokens (--max-new-tokens)" in notice.text


def test_only_length_stops_count_as_at_limit() -> None:
    turns = [observed([1]), sampled([2, 2]), observed([3]), sampled([4, 4])]
    stops = (StopReason.LENGTH, StopReason.MAX_TURNS, StopReason.CONTEXT_FULL, StopReason.COMPLETED)
    played = {
        stop: make_group(0, [Episode([make_trajectory(*turns, stop=stop)], make_episode([5]).reward)]) for stop in stops
    }
    found = {stop: rollout_metrics([group], 0)["response/at_limit_fraction"] for stop, group in played.items()}
    assert found == dict.fromkeys(stops, 0.0) | {StopReason.LENGTH: 1.0}


def step_of(*groups: list[float], greedy: float | None = None) -> list[RolloutGroup]:
    baseline = None if greedy is None else make_episode([5], greedy)
    return [
        make_group(number, [make_episode([5, 6], r) for r in rewards], baseline=baseline)
        for number, rewards in enumerate(groups)
    ]


def zero_fraction(
    groups: list[RolloutGroup], estimator: str, norm: Normalisation | None = None, shaping: Shaping | None = None
) -> float:
    step = experience(groups, shaping or Shaping())
    values = np.zeros(len(step.sequences.token_ids), np.float32) if estimator == "gae" else None
    return CreditAssignment(Credit(estimator, norm or Normalisation()))(step, None, None, values)[1][
        "advantage/zero_fraction"
    ]


@pytest.mark.parametrize("estimator", sorted(ADVANTAGES))
def test_every_estimator_tells_zero_advantages(estimator: str) -> None:
    differing, without = step_of([0, 1, 1], [1, 0, 0], greedy=0.5), step_of([0, 0, 0], [0, 0, 0], greedy=0.0)
    assert zero_fraction(differing, estimator) < 1
    assert zero_fraction(without, estimator) == 1


@pytest.mark.parametrize(
    "estimator", ["grpo", "dr_grpo", "rloo", "gigpo", "reinforce_plus_plus_baseline", "opo", "gpg", "maxrl"]
)
def test_equal_rewards_are_zero_despite_rounding(estimator: str) -> None:
    assert zero_fraction(step_of([0.1] * 3, [0.7] * 3), estimator) == 1


def test_the_share_counts_responses_that_teach_nothing() -> None:
    assert zero_fraction(step_of([0, 1], [1, 1], [0, 0], [1, 0]), "grpo") == 0.5
    masked = step_of([0, 1], [1, 0])
    assert zero_fraction(masked, "grpo", shaping=Shaping(longest_wrong=1)) == 0.5
    assert zero_fraction(masked, "grpo", shaping=Shaping(difficulty=(0.6, 0.9))) == 1


@pytest.mark.parametrize(
    ("reward", "warns"),
    [
        ("reward=no_reward", False),
        ("parts={exact_match: {weight: 0}}", False),
        ("parts={exact_match: {weight: 0}, brief: {reward: length_penalty}}", True),
        ("reward=exact_match", True),
    ],
)
def test_rewards_that_only_count_are_not_watched(reward: str, warns: bool, configured: Callable[..., Any]) -> None:
    words = ["~rewards.arithmetic", f"+rewards.arithmetic={{{reward.replace('=', ': ', 1)}}}"]
    config = configured("algorithms/on_policy_distillation_full", *words)
    watches = training_watches(config, TOKENIZER, CHATML)
    assert any(isinstance(watch, ZeroAdvantages) for watch in watches) is warns


@pytest.mark.parametrize(("kl", "warns"), [(0.0011, False), (0.0342, True)])
def test_engine_that_computes_something_else_is_said(kl: float, warns: bool, configured: Callable[..., Any]) -> None:
    config = configured("tiny/tiny_rlvr_lora_zero3")
    notices = StepNotices(training_watches(config, TOKENIZER, CHATML)).after(1, {"mismatch/kl": kl})
    assert [notice.topic for notice in notices] == ["mismatch/kl"] * warns
    assert not warns or "0.034 nats a token" in notices[0].text


def test_corrected_difference_is_not_said(configured: Callable[..., Any]) -> None:
    words = ("behaviour_log_probs=trainer", "mismatch_correction=tis")
    config = configured("tiny/tiny_rlvr_lora_zero3", *words)
    assert not StepNotices(training_watches(config, TOKENIZER, CHATML)).after(1, {"mismatch/kl": 0.03})


def cause(
    config: Any,
    groups: list[RolloutGroup],
    norm: Normalisation | None = None,
    shaping: Shaping | None = None,
    dropped: float = 0,
) -> str:
    step = experience(groups, shaping or Shaping())
    values = np.zeros(len(step.sequences.token_ids), np.float32)
    _, metrics = CreditAssignment(Credit(config.adv_estimator.name, norm or Normalisation()))(step, None, None, values)
    [notice] = StepNotices([ZeroAdvantages(config)]).after(
        3, metrics | rollout_metrics(groups, 0) | {"sampling/dropped_groups": dropped}
    )
    return notice.text


def test_zero_advantages_name_the_cause(configured: Callable[..., Any]) -> None:
    def made(*words: str) -> Any:
        return configured("tiny/tiny_rlvr_lora_zero3", "num_return_sequences_in_group=4", *words)

    equal = cause(made("adv_estimator=grpo"), step_of([0] * 4, [1] * 4))
    assert "all 4 got" in equal and "step: 0.5" in equal and "filter" not in equal
    filtered = cause(made("adv_estimator=rloo"), step_of([0] * 4), dropped=6)
    assert "6 groups that" in filtered and "filter" in filtered
    masked = cause(
        made("adv_estimator=grpo", "difficulty_mask=true"), step_of([0, 1]), shaping=Shaping(difficulty=(0.6, 0.9))
    )
    assert "difficulty_mask excluded all" in masked
    nothing = cause(made("adv_estimator=reinforce"), step_of([0, 0], [0, 0]))
    assert "step is 0" in nothing
    batch = cause(
        made("adv_estimator=reinforce", "norm_mean_type=batch"), step_of([2, 2], [2, 2]), Normalisation(mean="batch")
    )
    assert "step is 2" in batch
    group = cause(
        made("adv_estimator=reinforce", "norm_mean_type=group"), step_of([0] * 4, [2] * 4), Normalisation(mean="group")
    )
    assert "all 4 got" in group
    greedy = cause(made("adv_estimator=remax"), [*step_of([0, 0], greedy=0.0), *step_of([1, 1], greedy=1.0)])
    assert "greedy response" in greedy


@pytest.mark.parametrize(
    ("shares", "said"), [({}, False), ({"crashed": 0.25, "timed_out": 0.5}, True), ({"unavailable": 0.75}, True)]
)
def test_rewards_that_failed_are_a_cause(shares: dict[str, float], said: bool, configured: Callable[..., Any]) -> None:
    metrics = {
        "advantage/zero_fraction": 1.0,
        "reward/mean": 1.0,
        "reward/std": 0.0,
        "reward/equal_groups_fraction": 1.0,
    }
    metrics |= {f"reward/{outcome}_fraction": share for outcome, share in shares.items()}
    text = ZeroAdvantages(configured("tiny/tiny_rlvr_lora_zero3")).text(metrics)
    assert ("75% of the" in text) == said


def test_group_of_one_is_named_as_cause(configured: Callable[..., Any]) -> None:
    text = cause(
        configured("tiny/tiny_rlvr_lora_zero3", "num_return_sequences_in_group=1", "adv_estimator=reinforce"),
        step_of([0], [0]),
    )
    assert "Every reward" in text
    config = configured("tiny/tiny_rlvr_lora_zero3", "adv_estimator=grpo").model_copy(
        update={"num_return_sequences_in_group": 1}
    )
    assert "only one: raise num_return_sequences_in_group" in cause(config, step_of([0], [1]))


def test_normalisation_that_cancels_is_named_with_its_keys(configured: Callable[..., Any]) -> None:
    config = configured("tiny/tiny_rlvr_lora_zero3", "adv_estimator=reinforce", "norm_mean_type=domain")
    groups = [make_group(0, [make_episode([5], 1.0)], domain="a"), make_group(1, [make_episode([5], 0.0)], domain="b")]
    text = cause(config, groups, Normalisation(mean="domain"))
    assert "reinforce, with norm_mean_type: domain, cancels" in text
    assert "mean 0.5" in text and "deviation 0.5" in text


def test_terms_that_still_train_the_policy_are_named(configured: Callable[..., Any]) -> None:
    words = ("adv_estimator=reinforce", "use_kl_loss=false", "entropy_loss_coef=0")
    assert "learnt nothing" in cause(configured("tiny/tiny_rlvr_lora_zero3", *words), step_of([0]))
    config = configured("tiny/tiny_rlvr_lora_zero3", *words).model_copy(update={"entropy_loss_coef": 0.1})
    text = cause(config, step_of([0]))
    assert "entropy term" in text and "learnt nothing" not in text
