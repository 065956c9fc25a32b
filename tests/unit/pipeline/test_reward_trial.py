"""Rows that their rewards cannot use end a run before anything starts, each with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from roll.config.schema.environments import EnvironmentConfig
from roll.config.schema.model import DataConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import RewardConfig
from roll.data.prompts import Joined, PromptSet, Tasks, prepare_prompts
from roll.errors import BadInput, ConfigError, DataError
from roll.rewards.passing import Bar
from roll.runs.rlvr.reward_trial import bar_notices, bars_by_domain, check_rewards, warn_of_unreached
from tests import limits
from tests.unit.data.conftest import tokenizer  # noqa: F401  # a fixture

MATHS: dict[str, Any] = {"maths": {"reward": "exact_match"}}


def config_of(rewards: dict[str, Any]) -> RlvrConfig:
    sections = {name: RewardConfig.model_validate({"timeout": limits.CALL, **keys}) for name, keys in rewards.items()}
    deadlines = SimpleNamespace(start=limits.START)
    return cast(
        RlvrConfig,
        SimpleNamespace(rewards=sections, environments={}, validation=None, system_envs={}, deadlines=deadlines),
    )


@pytest.fixture
def prompts_in(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Any:  # noqa: F811
    def prepare(name: str, rows: list[dict], rewards: dict[str, Any]) -> PromptSet:
        path = tmp_path / name
        path.write_text("\n".join(json.dumps({"prompt": "One?", **row}) for row in rows))
        data_args = DataConfig.model_validate({"file_name": str(path), "template": "chatml", "prompt": "prompt"})
        return prepare_prompts(data_args, tokenizer, 100, config_of(rewards).rewards, tmp_path / "cache")

    return prepare


def places(error: BadInput) -> list[str]:
    return [Path(fault.place).name for fault in error.faults]


def test_a_row_without_reference_is_named_by_line(prompts_in: Any) -> None:
    rows = [{"ground_truth": "1"}] * 6 + [{}] + [{"ground_truth": "2"}] * 3
    with pytest.raises(DataError) as caught:
        check_rewards(config_of(MATHS), prompts_in("rows.jsonl", rows, MATHS))
    assert places(caught.value) == ["rows.jsonl:7"]
    assert caught.value.faults[0].code == "unfit" and "'ground_truth' nor 'answer'" in caught.value.faults[0].problem
    assert caught.value.exit_status == 2


def test_bad_rows_of_all_sets_are_reported_together(prompts_in: Any) -> None:
    training = prompts_in("train.jsonl", [{"ground_truth": "1"}, {"ground_truth": ""}], MATHS)
    held_out = prompts_in("test.jsonl", [{"ground_truth": [1]}, {"ground_truth": "1"}], MATHS)
    with pytest.raises(DataError) as caught:
        check_rewards(config_of(MATHS), training, held_out)
    assert places(caught.value) == ["train.jsonl:2", "test.jsonl:1"]


def test_many_bad_rows_are_counted_by_reason(prompts_in: Any) -> None:
    rewards: dict[str, Any] = {"maths": {"reward": "math_rule"}}
    rows = [{"ground_truth": "1"}, *[{"ground_truth": "{{"}] * 30]
    with pytest.raises(DataError) as caught:
        check_rewards(config_of(rewards), prompts_in("rows.jsonl", rows, rewards))
    assert [fault.code for fault in caught.value.faults] == ["unfit"] * 20 + ["unusable_rows"]
    assert caught.value.faults[-1].problem.startswith("30 of 31 rows")
    assert caught.value.faults[-1].problem.endswith(": 30 x no reference for 'math_rule'")


def test_only_rows_of_the_domain_need_its_reference(prompts_in: Any) -> None:
    rewards: dict[str, Any] = {"maths": {"reward": "exact_match"}, "short": {"reward": "length_penalty"}}
    rows = [{"tag": "maths", "ground_truth": "1"}, {"tag": "short"}, {"tag": "maths"}]
    with pytest.raises(DataError) as caught:
        check_rewards(config_of(rewards), prompts_in("rows.jsonl", rows, rewards))
    assert places(caught.value) == ["rows.jsonl:3"]


def test_bad_rows_and_rewards_are_reported_together(prompts_in: Any) -> None:
    rewards: dict[str, Any] = {"maths": {"reward": "exact_match"}, "own": {"reward": "nowhere:absent"}}
    rows = [{"tag": "maths", "ground_truth": "1"}, {"tag": "own"}, {"tag": "maths"}]
    with pytest.raises(BadInput) as caught:
        check_rewards(config_of(rewards), prompts_in("rows.jsonl", rows, rewards))
    assert places(caught.value) == ["rewards.own.reward", "rows.jsonl:3"]


def test_judge_with_reference_requires_one_per_row(prompts_in: Any) -> None:
    judge: dict[str, Any] = {"judged": {"reward": "llm_judge", "judge_prompt": "same_answer"}}
    rows = [{"ground_truth": "1"}, {"ground_truth": None}]
    with pytest.raises(DataError) as caught:
        check_rewards(config_of(judge), prompts_in("rows.jsonl", rows, judge))
    assert places(caught.value) == ["rows.jsonl:2"] and "judge_prompt" in caught.value.faults[0].problem


def test_rows_beside_generated_tasks_are_checked(prompts_in: Any) -> None:
    prompts = prompts_in("rows.jsonl", [{"ground_truth": "1"}, {}], MATHS)
    tasks = Tasks(prompts.domains, {"maths": 0})
    with pytest.raises(DataError) as caught:
        check_rewards(config_of(MATHS), Joined([prompts, tasks]))
    assert places(caught.value) == ["rows.jsonl:2"]


def test_a_reward_without_rows_is_said(prompts_in: Any, caplog: pytest.LogCaptureFixture) -> None:
    rewards = {**MATHS, "towns": {"reward": "exact_match"}}
    warn_of_unreached(config_of(rewards), prompts_in("rows.jsonl", [{"ground_truth": "1", "tag": "maths"}], rewards))
    assert [record.args for record in caplog.records] == [("towns", "towns")]


def test_usable_rows_pass(prompts_in: Any) -> None:
    bars = check_rewards(config_of(MATHS), prompts_in("rows.jsonl", [{"ground_truth": "1"}, {"answer": 2}], MATHS))
    assert bars == {"maths": (Bar(1.0),)}


def test_a_bar_of_the_users_reward_is_said() -> None:
    config = config_of(
        {
            "own": {"reward": "mine:graded"},
            "key": {"reward": "mine:graded", "passes_at": 0.5},
            "model": {"reward": "reward_model"},
        }
    )
    bars = bars_by_domain(config, {"own": (Bar(1.0),), "key": (Bar(0.5),)})
    assert bars == {"own": (Bar(1.0),), "key": (Bar(0.5),), "model": ()}
    assert [line.split(":")[0].split(" ")[0] for line in bar_notices(config, bars)] == ["rewards.own", "rewards.model"]


def test_an_environment_passes_by_key_or_success() -> None:
    config = config_of({"both": {"reward": "exact_match"}})
    by_key, by_success = EnvironmentConfig.model_validate({"passes_at": 7.5}), EnvironmentConfig.model_validate({})
    cast(dict[str, EnvironmentConfig], config.environments).update(
        {
            "key": by_key,
            "success": by_success,
            "both": by_success,
            "own": EnvironmentConfig.model_validate({"environment": "mine:World"}),
        }
    )
    by_metric = (Bar(1.0, ("environment/success",)),)
    bars = bars_by_domain(config, {"both": (Bar(1.0),)})
    assert bars == {"key": (Bar(7.5),), "success": by_metric, "both": (Bar(1.0),), "own": by_metric}
    [said] = bar_notices(config, bars)
    assert said.startswith("environments.own: ") and str(by_metric[0]) in said


def test_reward_failing_on_every_row_is_named(prompts_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_reward.py").write_text("def fails(prompt, response, row):\n    return row['nothing']\n")
    monkeypatch.syspath_prepend(tmp_path)
    rewards: dict[str, Any] = {"own": {"reward": "failing_reward:fails"}}
    with pytest.raises(ConfigError) as caught:
        check_rewards(config_of(rewards), prompts_in("rows.jsonl", [{"a": 1}, {"a": 2}], rewards))
    assert places(caught.value) == ["rewards.own.reward"]


def test_a_crash_says_where_a_reference_may_be(
    prompts_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reading_reward.py").write_text(
        "def reads(prompt, response, row):\n    return bool(response) and response == row['ground_truth']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rewards: dict[str, Any] = {"own": {"reward": "reading_reward:reads"}}
    with pytest.raises(ConfigError) as caught:
        check_rewards(config_of(rewards), prompts_in("rows.jsonl", [{"reward_model": {"ground_truth": "1"}}], rewards))
    (fault,) = caught.value.faults
    assert "the response '1'" in fault.problem and "data_args.ground_truth=reward_model.ground_truth" in fault.remedy


def test_rows_of_a_domain_keep_their_indices(prompts_in: Any) -> None:
    rewards: dict[str, Any] = {"maths": {"reward": "exact_match"}, "short": {"reward": "length_penalty"}}
    prompts = prompts_in(
        "rows.jsonl", [{"tag": "short", "n": 0}, {"tag": "maths", "n": 1}, {"tag": "short", "n": 2}], rewards
    )
    assert [(index, row["n"]) for index, row in prompts.rows("short")] == [(0, 0), (2, 2)]
    assert np.array_equal(prompts.domain_index, [1, 0, 1])
