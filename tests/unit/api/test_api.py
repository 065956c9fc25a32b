"""`roll.api`: faults are raised before anything starts. tests/integration/test_api.py trains and evaluates a model."""

from __future__ import annotations

import pytest

from roll.api import load_config, train
from roll.config.schema.offline import SftConfig
from roll.errors import ConfigError


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


def test_a_dry_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="load_config has checked everything"):
        train(load_config("tiny/tiny_warm_up", ["dry_run=true"]))
