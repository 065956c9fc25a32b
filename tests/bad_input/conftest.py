"""A small sound experiment on the CPU, to be spoilt in one way at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from roll.pipeline.__main__ import main

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
  training_args: {per_device_train_batch_size: 8}
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
    "max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the experiment: `exp/sound.yaml`, a model's config.json and a data file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "sound.yaml").write_text(EXPERIMENT)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "tag": "math_rule"}\n')
    return tmp_path


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command line in this process and hands over what it printed as an error; asserts that it ends with status 2."""

    def run(*overrides: str, name: str = "sound") -> str:
        status = main(["--config-path", str(folder / "exp"), "--config-name", name, *overrides])
        printed = capsys.readouterr()
        assert status == 2, printed.err
        assert "Traceback" not in printed.err + printed.out
        assert printed.out == ""
        return printed.err

    return run
