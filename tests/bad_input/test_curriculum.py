"""The curriculum in the configuration: refused settings, with place, code, value and remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from roll.errors import Fault, FaultCode
from tests.faults import assert_fault

OWN = "curriculum"
FAULTS: list[tuple[list[str], str, FaultCode, str, str]] = [
    (["+curriculum={hard_at_most: 0.9}"], f"{OWN}.hard_at_most", "contradiction", "0.9", "below solved_at_least"),
    (["+curriculum={hard_at_most: 1, solved_at_least: 0}"], f"{OWN}.hard_at_most", "contradiction", "1", "below"),
    (["+curriculum={hard_at_most: -0.1}"], f"{OWN}.hard_at_most", "out_of_range", "-0.1", "at least 0"),
    (["+curriculum={solved_at_least: 2}"], f"{OWN}.solved_at_least", "out_of_range", "2", "at most 1"),
    (["+curriculum={update_rate: 0}"], f"{OWN}.update_rate", "out_of_range", "0", "above 0"),
    (["+curriculum={update_rate: 1.5}"], f"{OWN}.update_rate", "out_of_range", "1.5", "at most 1"),
    (["+curriculum={shares: {unseen: 0}}"], f"{OWN}.shares.unseen", "out_of_range", "0", "above 0"),
    (["+curriculum={shares: {solved: -1}}"], f"{OWN}.shares.solved", "out_of_range", "-1", "at least 0"),
    (["+curriculum={shares: {hard: 0, learnable: 0, solved: 0}}"], f"{OWN}.shares", "no_effect", "all 0", "above 0"),
    (["+curriculum={shares: {easy: 1}}"], f"{OWN}.shares.easy", "unknown_key", "", ""),
    (["+curriculum={}", "replay_from=kept"], OWN, "no_effect", "'kept'", "remove one"),
]
REPLAY = f"{OWN}.replay"
REPLAYED = "+curriculum={replay: {solve_rate_at_most: 0.5, share: 0.5}}"
TEACHER = "+teacher={model_args: {model_name_or_path: model}, strategy_args: {strategy_name: hf_infer}}"
REPLAY_FAULTS: list[tuple[list[str], str, FaultCode, str, str]] = [
    (["+curriculum={replay: {solve_rate_at_most: 0.1}}"], f"{REPLAY}.solve_rate_at_most", "no_effect", "0.1", "raise"),
    (["+curriculum={replay: {solve_rate_at_most: 1}}"], f"{REPLAY}.solve_rate_at_most", "out_of_range", "1", "below 1"),
    (["+curriculum={replay: {share: 0.01}}"], f"{REPLAY}.share", "no_effect", "0.01", "at least"),
    (["+curriculum={replay: {share: 0}}"], f"{REPLAY}.share", "out_of_range", "0", "above 0"),
    (
        [
            "+curriculum={replay: {solve_rate_at_most: 0.5, staleness_at_most: 1}}",
            "actor_train.training_args.per_device_train_batch_size=4",
        ],
        f"{REPLAY}.staleness_at_most",
        "no_effect",
        "2 updates",
        "at least 2",
    ),
    (["+curriculum={replay: {buffer_size: 0}}"], f"{REPLAY}.buffer_size", "out_of_range", "0", "above 0"),
    (["+curriculum={replay: {times: 2}}"], f"{REPLAY}.times", "unknown_key", "", ""),
    ([REPLAYED, "behaviour_log_probs=trainer"], REPLAY, "contradiction", "trainer", "behaviour_log_probs=engine"),
    ([REPLAYED, "behaviour_log_probs=on_policy"], REPLAY, "contradiction", "on_policy", "behaviour_log_probs=engine"),
    ([REPLAYED, "policy_loss=pg"], REPLAY, "contradiction", "pg", "mismatch_correction=tis"),
    ([REPLAYED, "policy_loss=topr"], REPLAY, "contradiction", "topr", "policy_loss=ppo"),
    (
        [REPLAYED, "behaviour_log_probs=trainer", "mismatch_correction=token_rs"],
        REPLAY,
        "contradiction",
        "token_rs",
        "tis or icepop",
    ),
    ([REPLAYED, "actor_infer.generating_args.top_p=0.9"], REPLAY, "contradiction", "top_p 0.9", "top_p=1"),
    ([REPLAYED, "adv_estimator=reinforce"], REPLAY, "contradiction", "reinforce", "grpo"),
    ([REPLAYED, "adv_estimator=reinforce_plus_plus_baseline"], REPLAY, "contradiction", "plus_baseline", "grpo"),
    ([REPLAYED, "whiten_advantages=true"], REPLAY, "contradiction", "whiten_advantages", "remove"),
    ([REPLAYED, "adv_estimator=remax"], REPLAY, "contradiction", "remax", "grpo"),
    ([REPLAYED, "add_token_level_kl=true"], REPLAY, "contradiction", "add_token_level_kl", "remove"),
    ([REPLAYED, "+dynamic_sampling={}"], REPLAY, "exclusive", "dynamic_sampling", "remove"),
    ([REPLAYED, "adv_estimator=gigpo"], REPLAY, "contradiction", "gigpo", "grpo"),
    (
        [REPLAYED, "rewards.math_rule.query_filter_config={type: mean_filter, filter_args: {threshold_down: 0.1}}"],
        REPLAY,
        "exclusive",
        "rewards.math_rule.query_filter_config",
        "remove",
    ),
    ([REPLAYED, TEACHER], REPLAY, "contradiction", "teacher", "remove teacher"),
    ([REPLAYED, "+self_distillation={sees: [success]}"], REPLAY, "contradiction", "self_distillation", "remove"),
]


@pytest.mark.parametrize(
    ("words", "place", "code", "value", "remedy"), FAULTS + REPLAY_FAULTS, ids=lambda one: str(one)[:60]
)
def test_refused_with_place_value_and_remedy(
    words: list[str], place: str, code: FaultCode, value: str, remedy: str, faults_of: Callable[..., tuple[Fault, ...]]
) -> None:
    assert_fault(faults_of(*words), place, code, value, remedy)


@pytest.mark.parametrize(
    "words",
    [
        ["+curriculum={}"],
        ["+curriculum={hard_at_most: 0, solved_at_least: 1, update_rate: 1}"],
        ["+curriculum={shares: {hard: 0, solved: 0}}", "+dynamic_sampling={}", "async_generation_ratio=1.5"],
        [REPLAYED],
        [REPLAYED, "async_generation_ratio=1", "adv_estimator=rloo"],
        [REPLAYED, "behaviour_log_probs=trainer", "mismatch_correction=tis"],
        [REPLAYED, "policy_loss=pg", "behaviour_log_probs=trainer", "mismatch_correction=seq_tis"],
    ],
    ids=str,
)
def test_a_curriculum_is_accepted(words: list[str], faults_of: Callable[..., tuple[Fault, ...]]) -> None:
    assert faults_of(*words) == ()
