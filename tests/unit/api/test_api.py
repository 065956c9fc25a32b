"""`roll.api`: faults are raised before anything starts. tests/integration/test_api.py trains and evaluates a model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from roll.api import load_config, train
from roll.config.schema.offline import SftConfig
from roll.errors import ConfigError
from roll.pipeline import main
from tests import limits
from tests.unit.docs.pages import ROOT


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


def test_a_hydra_application_gives_its_own_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-name", "tiny/tiny_warm_up", "max_steps=4", "dry_run=true", "--cfg", "job"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "own.yaml").write_text(text)
    (tmp_path / "application.py").write_text(APPLICATION)
    command = [sys.executable, "application.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=limits.PROCESS
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "3 4"
    assert load_config(yaml.safe_load(text)).max_steps == 4


def test_a_value_of_no_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="experiment"):
        load_config({"max_steps": object()})


def test_a_configuration_takes_no_overrides() -> None:
    with pytest.raises(ConfigError, match="overrides"):
        load_config({"max_steps": 3}, ["max_steps=4"])


def test_a_dry_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="load_config has checked everything"):
        train(load_config("tiny/tiny_warm_up", ["dry_run=true"]))
