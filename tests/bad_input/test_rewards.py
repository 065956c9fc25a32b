"""Reward settings that contradict each other, and reward functions that fail on the data, are refused before any role
starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from roll.errors import Fault, FaultCode
from roll.pipeline import main
from tests.faults import assert_fault

SUM = "rewards.math_rule.parts={right: {reward: math_rule}, same: {reward: exact_match}}"
NORMALISED = "rewards.math_rule.normalise=group"
ONE = (
    "num_return_sequences_in_group=1",
    "actor_train.training_args.per_device_train_batch_size=4",
    "adv_estimator=reinforce",
)
FAULTS = [
    (
        [SUM, "rewards.math_rule.reward=exact_match"],
        "rewards.math_rule.reward",
        "exclusive",
        "'exact_match', but",
        "one of the parts",
    ),
    (
        [SUM, "rewards.math_rule.failed_value=-1.0"],
        "rewards.math_rule.failed_value",
        "exclusive",
        "-1.0, but",
        "one of the parts",
    ),
    (
        [NORMALISED],
        "rewards.math_rule.normalise",
        "owner_missing",
        "'group'",
        "adv_estimator normalises a single reward",
    ),
    (
        ["rewards.math_rule.parts={rihgt: {}}"],
        "rewards.math_rule.parts.rihgt",
        "unknown_name",
        "no reward function 'rihgt'",
        "math_rule",
    ),
    (
        ["rewards.math_rule.parts={a: {reward: math_rul}}"],
        "rewards.math_rule.parts.a.reward",
        "unknown_name",
        "did you mean 'math_rule'",
        "package.module:function",
    ),
    (
        ["rewards.math_rule.parts={a: {wieght: 2}}"],
        "rewards.math_rule.parts.a.wieght",
        "unknown_key",
        "2",
        "did you mean 'weight'",
    ),
    (["rewards.math_rule.concurrency=0"], "rewards.math_rule.concurrency", "out_of_range", "0", "a number above 0"),
    (
        ["rewards.math_rule.reward=code_sandbox"],
        "rewards.math_rule.timeout",
        "too_small",
        "60 s (wall_seconds)",
        "to 90, or lower rewards.math_rule.reward_args.wall_seconds",
    ),
    (
        ["rewards.math_rule.parts={code_sandbox: {reward_args: {wall_seconds: 10}}}"],
        "rewards.math_rule.timeout",
        "too_small",
        "may run for 10 s",
        "to 40",
    ),
    (["rewards.math_rule.memory_gib=0"], "rewards.math_rule.memory_gib", "out_of_range", "0", "a number above 0"),
    (["rewards.math_rule.normalise=batch"], "rewards.math_rule.normalise", "not_allowed", '"batch"', "'group'"),
    (
        [SUM, NORMALISED, *ONE],
        "rewards.math_rule.normalise",
        "contradiction",
        "num_return_sequences_in_group is 1",
        "set it to none",
    ),
    (
        [SUM, NORMALISED, "adv_estimator=remax"],
        "rewards.math_rule.normalise",
        "contradiction",
        "adv_estimator remax",
        "set it to none",
    ),
    (
        [SUM, NORMALISED, "difficulty_mask=true"],
        "rewards.math_rule.normalise",
        "contradiction",
        "difficulty_mask uses the mean",
        "set it to none",
    ),
    (
        [SUM, NORMALISED, "adv_estimator=maxrl"],
        "rewards.math_rule.normalise",
        "contradiction",
        "adv_estimator maxrl",
        "set it to none",
    ),
    (
        [
            SUM,
            NORMALISED,
            "rewards.math_rule.query_filter_config={type: mean_filter, filter_args: {threshold_down: 0.1}}",
        ],
        "rewards.math_rule.query_filter_config",
        "contradiction",
        "mean_filter, ",
        "use std_filter",
    ),
    (
        [
            SUM,
            NORMALISED,
            "rewards.math_rule.query_filter_config={type: mean_filter, filter_args: {threshold_up: 0.0}}",
        ],
        "rewards.math_rule.query_filter_config",
        "contradiction",
        "mean_filter, ",
        "use std_filter",
    ),
    (
        [SUM, NORMALISED, "rewards.math_rule.query_filter_config={type: std_filter, filter_args: {std_threshold: 2}}"],
        "rewards.math_rule.query_filter_config.filter_args.std_threshold",
        "too_large",
        "above 2, ",
        "set it below 2",
    ),
    (
        [
            "adv_estimator=maxrl",
            "rewards.math_rule.query_filter_config={type: mean_filter, filter_args: {threshold_up: 0.0}}",
        ],
        "rewards.math_rule.query_filter_config.filter_args.threshold_up",
        "no_effect",
        "adv_estimator maxrl",
        "raise it above 0",
    ),
    (
        [SUM, NORMALISED, "error_max_len_clip=true", "error_max_len_threshold=4"],
        "rewards.math_rule.normalise",
        "contradiction",
        "error_max_len_clip",
        "set it to none",
    ),
    (
        ["rewards.math_rule.parts={a: {reward: right_prefix}}", NORMALISED, "adv_estimator=step_reinforce"],
        "rewards.math_rule.normalise",
        "contradiction",
        "adv_estimator step_reinforce",
        "set it to none",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "place", "code", "value", "remedy"), FAULTS, ids=[" ".join(case[0])[-60:] for case in FAULTS]
)
def test_keys_of_rewards_that_do_not_go_together(
    faults_of: Callable[..., tuple[Fault, ...]],
    overrides: list[str],
    place: str,
    code: FaultCode,
    value: str,
    remedy: str,
) -> None:
    assert_fault(faults_of(*overrides), place, code, value, remedy)


@pytest.mark.parametrize(
    "overrides",
    [
        [SUM],
        [SUM, "rewards.math_rule.reward=null"],
        [SUM, NORMALISED],
        [
            SUM,
            NORMALISED,
            "rewards.math_rule.query_filter_config={type: mean_filter, filter_args: {threshold_down: -0.5}}",
        ],
        [
            SUM,
            NORMALISED,
            "rewards.math_rule.query_filter_config={type: std_filter, filter_args: {std_threshold: 0.5}}",
        ],
        ["rewards.math_rule.parts={right_prefix: {}}", "adv_estimator=step_reinforce"],
    ],
)
def test_sums_of_rewards_are_accepted(judged: Callable[..., str | None], overrides: list[str]) -> None:
    assert judged(*overrides) is None


OWN = """
def right(prompt, response, row):
    return row["solution"] == response
"""


@pytest.mark.parametrize(
    ("own", "heading", "problem"),
    [
        (
            False,
            "1 fault in the data",
            "train.jsonl:1: 'math_rule' .* 'ground_truth' nor 'answer'",
        ),
        (
            True,
            "1 fault in the configuration",
            r"rewards.math_rule.reward: 'own_rewards:right', .* fails: KeyError: 'solution' \({}, line 3\)",
        ),
    ],
)
def test_reward_that_rejects_rows_ends_run_before_start(
    folder: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    own: bool,
    heading: str,
    problem: str,
) -> None:
    def started(*_: object) -> None:
        pytest.fail("the roles were started")

    monkeypatch.setattr("roll.runs.assemble.cluster", lambda *_: nullcontext())
    monkeypatch.setattr("roll.runs.assemble.early_groups", lambda *_: {})
    monkeypatch.setattr("roll.runs.assemble.run_in_loop", started)
    monkeypatch.syspath_prepend(folder)
    (file := folder / "own_rewards.py").write_text(OWN)
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "tag": "math_rule", "solution_": "2"}) + "\n")
    words = [
        f"pretrain={tiny_model}",
        "+actor_train.data_args.template=raw",
        *(["+rewards.math_rule.reward=own_rewards:right"] if own else []),
    ]
    assert main(["--config-path", str(folder / "exp"), "--config-name", "sound", *words]) == 2
    printed = capsys.readouterr().err
    assert heading in printed
    assert re.search(problem.format(re.escape(str(file))), printed)
    assert ("columns prompt, tag, solution_" in printed) == own


@pytest.mark.parametrize(
    ("name", "written"), [("own_rewards", "own_rewards:FUNCTION"), ("own_rewards.right", "own_rewards:right")]
)
def test_remedy_for_a_file_without_its_function(
    folder: Path, faults_of: Callable[..., tuple[Fault, ...]], name: str, written: str
) -> None:
    (folder / "own_rewards.py").write_text("def right(prompt, response, row):\n    return 1.0\n")
    faults = faults_of(f"rewards.math_rule.reward={name}")
    assert_fault(faults, "rewards.math_rule.reward", "unknown_name", f"'{name}'", written)
