"""A judge and a reward model that take turns on one GPU with the policy's engine, its trainer and its reference."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests import limits
from tests.gpu.conftest import ROOT, Runs

pytestmark = pytest.mark.gpu

ENGINE = {"gpu_memory_utilization": 0.3, "engine_args": "{kv_cache_memory_bytes: 1073741824}"}
ROLES = ("actor_train", "actor_infer", "reference", "rewards.arithmetic")
RISE = 0.1
"""Of the mean verdict, from the first four steps to the last four."""


@pytest.fixture(scope="module")
def tiny(runs: Runs) -> Runs:
    """The tiny world, its policy warmed up, with what its judges learn from."""
    written = {
        "make_model.py": ("output/tiny/model",),
        "make_problems.py": ("output/tiny/problems",),
        "make_judgements.py": ("output/tiny/problems/train.jsonl", "output/tiny/judgements"),
    }
    for script, arguments in written.items():
        command = [sys.executable, str(ROOT / "examples" / "tiny" / script), *arguments]
        subprocess.run(command, cwd=runs.folder, check=True, timeout=limits.RUN)
    runs.run("warm-for-judges", ("--config-name", "tiny/tiny_warm_up"), on_one("sft_train", 128))
    return runs


def on_one(role: str, batch: int) -> dict[str, Any]:
    """One rank in place of two: the sequences of an update stay the same."""
    return {
        f"{role}.world_size": "null",
        f"{role}.device_mapping": "[0]",
        f"{role}.training_args.per_device_train_batch_size": batch,
    }


def rewarded(tiny: Runs, name: str, experiment: str, model: str, **keys: Any) -> list[dict[str, Any]]:
    """The metrics of a run whose roles are all on one GPU."""
    values: dict[str, Any] = {f"{role}.device_mapping": "[0]" for role in ROLES}
    values |= {f"{role}.world_size": "null" for role in ROLES[:3]}
    values |= {f"actor_infer.strategy_args.strategy_config.{key}": value for key, value in ENGINE.items()}
    values |= {
        "weight_sync.lora": "merged",
        "pretrain": "warm-for-judges/export",
        "rewards.arithmetic.model_args.model_name_or_path": model,
    }
    values |= {"actor_train.training_args.per_device_train_batch_size": 256, "save_at_end": "false", "eval_steps": 0, "max_steps": 24}
    lines = tiny.run(name, ("--config-name", f"tiny/{experiment}"), values | keys)[1:]
    assert all(line["reward/scored_fraction"] == 1.0 and line["time/onload"] > 0 for line in lines)
    assert all(line["memory/rewards.arithmetic/peak_bytes"] > 0 for line in lines)
    return lines


def test_a_judge_takes_turns_with_the_engine(tiny: Runs) -> None:
    tiny.run("judge", ("--config-name", "tiny/tiny_judge"), on_one("sft_train", 128) | {"eval_steps": 0})
    engine = {f"rewards.arithmetic.strategy_args.strategy_config.{key}": value for key, value in ENGINE.items()}
    lines = rewarded(tiny, "judged", "tiny_llm_judge", "judge/export", **engine)
    means = [line["reward/arithmetic/mean"] for line in lines]
    assert sum(means[-4:]) / 4 > sum(means[:4]) / 4 + RISE


@pytest.mark.parametrize("strategy", ["hf_infer", "vllm"])
def test_a_reward_model_takes_turns_with_the_engine(tiny: Runs, strategy: str) -> None:
    if not (tiny.folder / "preferring").exists():
        keys = {"pretrain": "warm-for-judges/export", "eval_steps": 0, "save_steps": 0}
        keys |= {"reward_train.data_args.file_name": "output/tiny/judgements/pairs.jsonl"}
        tiny.run("preferring", ("--config-name", "tiny/tiny_reward_model"), on_one("reward_train", 64) | keys)
    settings = f", strategy_config: {{gpu_memory_utilization: 0.3, engine_args: {ENGINE['engine_args']}}}" if strategy == "vllm" else ""
    served = {"rewards.arithmetic.strategy_args": f"{{strategy_name: {strategy}{settings}}}", "max_steps": 4}
    rewarded(tiny, f"preferred-{strategy}", "tiny_rlvr_reward_model", "preferring/export", **served)
