"""`roll.api`: faults are raised before anything starts. tests/integration/test_api.py trains and evaluates a model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import yaml

import roll
import roll.api
from roll.api import evaluate, load_config, train
from roll.config.load.compose import parsed_override
from roll.config.schema.offline import SftConfig
from roll.errors import ConfigError, Fault
from roll.given.words import word_of
from roll.pipeline import main
from tests import limits
from tests.faults import assert_fault
from tests.unit.docs.pages import ROOT

LOCK = Lock()


def test_api_composes_and_checks_like_the_command() -> None:
    config = load_config(
        "tiny/tiny_warm_up", ["dry_run=true", "max_steps=3", "sft_train.training_args.learning_rate=0.5"]
    )
    assert isinstance(config, SftConfig)
    assert config.max_steps == 3 and config.sft_train.training_args.learning_rate == 0.5


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("tiny/tiny_warm_up", ["max_step=3"], "did you mean 'max_steps'"),
        ("tiny/tiny_worm_up", [], "tiny_worm_up"),
        ("tiny/tiny_warm_up", ["--multirun", "seed=1,2"], "'--multirun' is a flag of the command"),
    ],
)
def test_a_fault_is_raised(name: str, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(name, overrides)


APPLICATION = """
import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.version import getbase
from roll import load_config
from roll.errors import ConfigError

@hydra.main(version_base="1.2", config_path=".", config_name="own")
def main(composed):
    own, base = GlobalHydra.instance().hydra, getbase()
    try:
        load_config("no such name")
    except ConfigError:
        assert GlobalHydra.instance().hydra is own
    named, given = load_config("tiny/tiny_warm_up", ["dry_run=true", "max_steps=3"]), load_config(composed)
    assert GlobalHydra.instance().hydra is own is not None and getbase() is base
    print(named.max_steps, given.max_steps)

main()
"""


@pytest.fixture
def composed(capsys: pytest.CaptureFixture[str]) -> str:
    """The composed configuration of an experiment, as YAML."""
    assert main(["--config-name", "tiny/tiny_warm_up", "max_steps=4", "dry_run=true", "--cfg", "job"]) == 0
    return capsys.readouterr().out


def test_a_hydra_application_gives_its_own_configuration(composed: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(composed)
    (tmp_path / "application.py").write_text(APPLICATION)
    command = [sys.executable, "application.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=limits.PROCESS
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "3 4"
    assert load_config(yaml.safe_load(composed)).max_steps == 4


def test_a_value_of_no_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="experiment"):
        load_config({"max_steps": object()})


def test_keywords_set_values_as_they_are() -> None:
    training = {"training_args": {"learning_rate": 0.5}}
    keys = {"sft_train": training, "sft_train.data_args.prompt": "a,b", "max_steps": 3}
    config = load_config("tiny/tiny_warm_up", "seed=7", dry_run=True, **keys)
    assert isinstance(config, SftConfig) and config.sft_train.data_args is not None
    assert (config.seed, config.max_steps, config.sft_train.data_args.prompt) == (7, 3, "a,b")
    assert config.sft_train.training_args.learning_rate == 0.5
    assert config.sft_train.training_args.warmup_steps == 10, "a block changes only the keys that it names"


def test_blocks_take_overrides(composed: str) -> None:
    blocks = yaml.safe_load(composed)
    assert load_config(blocks, ["max_steps=4"], exp_name="own").max_steps == 4
    preset = blocks | {"deepspeed": {"zero_optimization": {"stage": 3}}}
    preset["sft_train"] = preset["sft_train"] | {"strategy_args": {"strategy_config": "${deepspeed}"}}
    with pytest.raises(ConfigError, match=r"set deepspeed\.x instead"):
        load_config(preset, ["sft_train.strategy_args.strategy_config.x=1"])


def test_a_file_is_an_experiment(composed: str, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(composed)
    assert load_config(file, max_steps=9).max_steps == load_config(str(file), "max_steps=9").max_steps == 9


@pytest.mark.parametrize(
    "value", [None, True, 3, 1e-6, "a,b", "it's \\", "", "5", "${x}", [1, {"a": None}], {"a": [1, "b:c"]}]
)
def test_words_keep_python_values(value: Any) -> None:
    assert parsed_override(word_of("k.j", value)).value() == value


def test_the_package_shows_its_public_names() -> None:
    assert sorted(dir(roll)) == sorted([*roll.__all__, "__version__"])
    assert all(hasattr(roll.api, name) for name in roll.__all__)
    with pytest.raises(AttributeError, match="it has .*train"):
        _ = roll.fit


def test_a_checked_configuration_cannot_be_changed() -> None:
    config = load_config("tiny/tiny_warm_up", dry_run=True)
    with pytest.raises(ConfigError) as caught:
        config.max_steps = 4
    assert caught.value.faults[0].code == "not_supported" and caught.value.faults[0].place == "max_steps"
    with pytest.raises(ConfigError, match="seed"):
        load_config(config, seed=4)
    assert load_config(config) is config


@pytest.mark.parametrize(
    ("experiment", "given", "place", "code"),
    [
        (5, {}, "experiment", "wrong_type"),
        (Path("absent.yaml"), {}, "experiment", "not_found"),
        ("no such name", {}, "experiment", "unknown_name"),
        ("tiny/tiny_warm_up", {"config_path": "absent"}, "config_path", "not_found"),
        ("tiny/tiny_warm_up", {"overrides": "max_steps"}, "overrides", "malformed"),
        ("tiny/tiny_warm_up", {"max_step": 3}, "max_step", "unknown_key"),
        ("tiny/tiny_warm_up", {"seed": object()}, "seed", "wrong_type"),
        ("tiny/tiny_warm_up", {"rows": 5}, "rows", "wrong_type"),
        ("tiny/tiny_warm_up", {"rows": []}, "rows", "empty"),
        ("tiny/tiny_warm_up", {"rows": [{"a": 1}, 2]}, "rows[1]", "wrong_type"),
        ("tiny/tiny_warm_up", {"rows": [{"a": object()}]}, "rows[0]", "wrong_type"),
        ("tiny/tiny_rlvr_lora_zero3", {"reward": [len]}, "reward", "wrong_type"),
        ("tiny/tiny_rlvr_lora_zero3", {"reward": lambda prompt, response, row: LOCK}, "reward", "unfit"),
        ("tiny/tiny_rlvr_lora_zero3", {"policy_loss": lambda: 1}, "policy_loss", "unfit"),
        ("tiny/tiny_rlvr_lora_zero3", {"reward": "__main__:f"}, "rewards.arithmetic.reward", "not_found"),
    ],
)
def test_faults_name_the_argument(
    experiment: Any, given: dict[str, Any], place: str, code: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(experiment, **given, output_dir=tmp_path / "run", dry_run=True)
    assert (caught.value.faults[0].place, caught.value.faults[0].code) == (place, code), caught.value
    assert not list(tmp_path.rglob("*.py"))


def test_arguments_of_a_replaced_reward_can_be_removed(tmp_path: Path) -> None:
    tiny, words = "tiny/tiny_rlvr_lora_zero3", ["+rewards.arithmetic.reward_args.penalty=0.5"]

    def refused(*further: str) -> list[Fault]:
        with pytest.raises(ConfigError) as caught:
            load_config(
                tiny, [*words, *further], reward=lambda prompt, response, row: 0.0, output_dir=tmp_path, max_step=1
            )
        return list(caught.value.faults)

    assert_fault(refused(), "reward_args.penalty", "unknown_key", "0.5", "'~rewards.arithmetic.reward_args'")
    assert not any("reward_args" in fault.place for fault in refused("~rewards.arithmetic.reward_args"))


@pytest.mark.parametrize(
    ("options", "place", "code"),
    [
        ({"sample": 3}, "sample", "unknown_key"),
        ({"dry_run": True}, "dry_run", "not_supported"),
        ({"data": 5, "reward": "exact_match"}, "data", "wrong_type"),
        ({"data": [{"prompt": "1", "ground_truth": "1"}]}, "reward", "missing"),
        ({"reward": "exact_match"}, "data", "missing"),
        ({"reward": "exact_match", "data": "absent.jsonl"}, "data", "not_found"),
    ],
)
def test_faults_of_an_evaluation_name_the_option(
    options: dict[str, Any], place: str, code: str, tmp_path: Path, tiny_model: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        evaluate(tiny_model, output=tmp_path, max_new_tokens=8, overrides="prompt_length=8", **options)
    assert (caught.value.faults[0].place, caught.value.faults[0].code) == (place, code), caught.value


def test_a_dry_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="load_config checks the keys"):
        train(load_config("tiny/tiny_warm_up", ["dry_run=true"]))
