"""The JSON schema accepts every shipped experiment, names wrong keys and values, and describes every key."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from roll.config.docs import meaning
from roll.config.json_schema import DEFINITIONS, experiment_schema, main
from roll.config.schema.fields import walk
from roll.config.schema.pipelines import PIPELINES
from roll.config.shipped import PRESETS, examples_folder, experiments

FILES = [*experiments().values(), *sorted((examples_folder() / PRESETS).glob("*.yaml"))]
LEARNER = "actor_train.training_args"


@cache
def validator() -> Draft7Validator:
    schema = experiment_schema()
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def wrong(key: str, value: Any) -> bool:
    """Return whether the schema refuses a shipped experiment with a changed key."""
    values = yaml.safe_load(experiments()["quickstart/gsm8k_rlvr"].read_text(encoding="utf-8"))
    block = values
    *above, last = key.split(".")
    for step in above:
        block = block.setdefault(step, {})
    block[last] = value
    return not validator().is_valid(values)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_shipped_file_is_valid(file: Path) -> None:
    assert [error.message for error in validator().iter_errors(yaml.safe_load(file.read_text(encoding="utf-8")))] == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rollout_batchsize", 32),
        (f"{LEARNER}.learning_rte", 1e-6),
        (f"{LEARNER}.learning_rate", "fast"),
        ("rewards.math_rule.world_sze", 4),
        ("actor_infer.strategy_args.strategy_config.gpu_memory_utilisation", 0.7),
        ("adv_estimator", "grpoo"),
        ("max_steps", 1.5),
        ("pipeline", "sft"),
        ("actor_train.device_mapping", "all"),
        ("actor_train.model_args.lora_target", []),
    ],
)
def test_a_typing_error_is_refused(key: str, value: object) -> None:
    assert wrong(key, value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_steps", "${steps}"),
        ("seed", "???"),
        ("adv_estimator", "my_estimators:median"),
        (f"{LEARNER}", "${training}"),
        ("actor_train.strategy_args.strategy_config", "deepspeed_zero3"),
        ("actor_train.device_mapping", "list(range(0,8))"),
        ("actor_train.system_envs", {"LEVEL": 3}),
        ("actor_train.model_args.lora_target", ["q_proj", "v_proj"]),
        ("validation", None),
        ("rewards.math_rule", None),
        ("logging_steps", 1),
    ],
)
def test_a_value_of_a_file_is_accepted(key: str, value: object) -> None:
    assert not wrong(key, value)


def test_every_key_has_its_description() -> None:
    schema = experiment_schema()
    for root in PIPELINES.values():
        for key in walk(root):
            block = schema if key.section is root else schema[DEFINITIONS][key.section.__name__]
            said = block["properties"][key.path[-1]]["description"]
            assert key.section is root or said == meaning(key.path[-1], key.field), key.path


def test_the_command_writes_the_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "roll.schema.json"
    monkeypatch.setattr(sys, "argv", ["json_schema", str(file)])
    main()
    assert json.loads(file.read_text(encoding="utf-8")) == experiment_schema()
