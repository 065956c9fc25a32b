"""Fixtures for refused configurations: a small valid experiment on the CPU, in which each test makes one mistake."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.plan.plan import make_plan
from roll.errors import ConfigError, Fault
from roll.pipeline import main

Composition = tuple[DictConfig, set[str]]

EXPERIMENT = """
defaults:
  - ../config/deepspeed_zero3@_here_
  - _self_

exp_name: sound
output_dir: output
pretrain: model
max_steps: 2
rollout_batch_size: 4
num_return_sequences_in_group: 2
prompt_length: 16
response_length: 8

actor_train:
  model_args: {dtype: fp32}
  training_args: {per_device_train_batch_size: 8, gradient_accumulation_steps: 1}
  data_args: {file_name: [train.jsonl], prompt: prompt}
  strategy_args:
    strategy_name: deepspeed_train
    strategy_config: ${deepspeed_zero3}

actor_infer:
  model_args: {dtype: fp32}
  strategy_args:
    strategy_name: vllm
    strategy_config: {max_num_seqs: 8}

rewards:
  math_rule: {world_size: 1}
"""
MODEL = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory of the experiment, with `exp/sound.yaml`, a model's config.json and a data file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "sound.yaml").write_text(EXPERIMENT)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "tag": "math_rule", "ground_truth": "2"}\n')
    return tmp_path


@pytest.fixture(scope="session")
def compositions() -> dict[str, Composition]:
    """Cache of composed experiments, by the text of their file."""
    return {}


@pytest.fixture
def faults_of(folder: Path, compositions: dict[str, Composition]) -> Callable[..., tuple[Fault, ...]]:
    """Return a function that applies overrides to an experiment and returns its faults.

    Hydra composes each experiment only once. Overrides have the form `key=value`, `+key=value` or `~key`; tests of any
    other argument use `refused_by_command`.
    """

    def judge(*overrides: str, name: str = "sound") -> tuple[Fault, ...]:
        file = folder / "exp" / f"{name}.yaml"
        composed, passing = compositions.get(text := file.read_text()) or compositions.setdefault(
            text, composition(file)
        )
        words = [word if word[0] in "+~" else f"++{word}" for word in overrides]
        parsed = OverridesParser.create().parse_overrides(words)
        changed = copy.deepcopy(composed)
        ConfigLoaderImpl._apply_overrides_to_config(parsed, changed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                make_plan(checked_config(changed, passing - {override.key_or_group for override in parsed}))
        except ConfigError as refusal:
            assert refusal.exit_status == 2
            return refusal.faults
        return ()

    return judge


@pytest.fixture
def judged(faults_of: Callable[..., tuple[Fault, ...]]) -> Callable[..., str | None]:
    """Return a function like `faults_of` that returns the message with the faults, or None if there are none."""

    def judge(*overrides: str, name: str = "sound") -> str | None:
        faults = faults_of(*overrides, name=name)
        return str(ConfigError(*faults)) if faults else None

    return judge


@pytest.fixture
def refused(judged: Callable[..., str | None]) -> Callable[..., str]:
    """Return a function like `judged` for an experiment that must have faults."""

    def judge(*overrides: str, name: str = "sound") -> str:
        said = judged(*overrides, name=name)
        assert said is not None, f"{overrides} were not refused"
        return said

    return judge


def composition(file: Path) -> Composition:
    """Return the experiment as composed by Hydra, and the root keys that only `${...}` expressions use."""
    found: list[Composition] = []
    compose(
        ["--config-path", str(file.parent), "--config-name", file.stem],
        lambda composed, passing: found.append((composed, passing)),
    )
    return found[0]


@pytest.fixture
def refused_by_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs the command line in this process, asserts exit status 2, and returns what was printed
    to stderr.
    """

    def run(*overrides: str, name: str = "sound") -> str:
        status = main(["--config-path", str(folder / "exp"), "--config-name", name, *overrides])
        printed = capsys.readouterr()
        assert status == 2, printed.err
        assert "Traceback" not in printed.err + printed.out
        assert printed.out == ""
        return printed.err

    return run
