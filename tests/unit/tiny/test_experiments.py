"""The tiny demo's two experiments: both pass the checks and can be planned, and the second starts from the first one's
export.
"""

from pathlib import Path

import numpy as np
import pytest

from examples.tiny import demo
from examples.tiny.make_problems import problem, write_problems
from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.plan.plan import make_plan
from roll.config.schema.offline import SftConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.rewards.base import load_reward
from roll.types import Prompt


def load(experiment: Path) -> Config:
    loaded: list[Config] = []
    words = ["--config-name", f"tiny/{experiment.stem}", "dry_run=true"]
    compose(words, lambda composed, presets: loaded.append(checked_config(composed, presets)))
    return loaded[0]


@pytest.fixture(scope="module")
def warm_up() -> SftConfig:
    config = load(demo.WARM_UP)
    assert isinstance(config, SftConfig)
    return config


@pytest.fixture(scope="module")
def rlvr() -> RlvrConfig:
    config = load(demo.RLVR)
    assert isinstance(config, RlvrConfig)
    return config


def test_demo_experiments_read_previous_outputs(warm_up: SftConfig, rlvr: RlvrConfig) -> None:
    assert Path(warm_up.pretrain) == demo.MODEL
    assert Path(rlvr.pretrain) == Path(warm_up.output_dir) / "export"
    assert rlvr.validation is not None
    train, heldout = demo.PROBLEMS / "train.jsonl", demo.PROBLEMS / "heldout.jsonl"
    assert rlvr.actor_train.data_args is not None
    assert [warm_up.sft_train.data_args.file_name, rlvr.actor_train.data_args.file_name] == [str(train)] * 2
    assert rlvr.validation.data_args is not None
    assert rlvr.validation.data_args.file_name == str(heldout)


def test_demo_summary_metric_is_of_validation_set(rlvr: RlvrConfig) -> None:
    assert rlvr.validation is not None
    assert f"val/{rlvr.validation.name}/pass@1" == demo.ACCURACY
    assert rlvr.eval_steps > 0


def test_the_plan_runs_every_role_on_the_cpu(rlvr: RlvrConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_problems(demo.PROBLEMS, seed=0)
    plan = make_plan(rlvr)
    assert plan.devices == ()
    assert set(plan.roles) == {"actor_train", "actor_infer", "reference", "rewards.arithmetic"}
    assert plan.reference == "role"


def test_warm_up_has_rows_for_its_steps(warm_up: SftConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_problems(demo.PROBLEMS, seed=0)
    rows = len((demo.PROBLEMS / "train.jsonl").read_text().splitlines())
    arguments = warm_up.sft_train.training_args
    assert warm_up.sft_train.world_size is not None and warm_up.max_steps is not None
    assert arguments.gradient_accumulation_steps is None
    batch = arguments.per_device_train_batch_size * warm_up.sft_train.world_size
    assert arguments.num_train_epochs * (rows // batch) >= warm_up.max_steps


@pytest.mark.parametrize(("response", "reward"), [("22", 1.0), ("21", 0.0), ("7+4+9+2", 0.0), ("7+15", 0.0), ("", 0.0)])
def test_only_the_worked_out_sum_is_rewarded(rlvr: RlvrConfig, response: str, reward: float) -> None:
    row = problem("7492")
    prompt = Prompt(0, np.zeros(1, dtype=np.int32), row["prompt"], row["tag"], row)
    domain = rlvr.rewards[row["tag"]]
    assert domain.reward is not None
    assert load_reward(domain.reward)(prompt, response, row, **domain.reward_args).value == reward
