"""A judge and a reward model that take turns on one GPU with the policy's engine, trainer and reference."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests import limits
from tests.gpu.conftest import ROOT, Runs

pytestmark = pytest.mark.gpu

ENGINE = {"gpu_memory_utilization": 0.3, "enforce_eager": "true", "engine_args": "{kv_cache_memory_bytes: 1073741824}"}
ROLES = ("actor_train", "actor_infer", "reference")
COMPILE = "model_args.compile_layers"
"""Key that is set to false in all runs, because compiling takes longer than their few steps."""
JUDGED_STEPS, SCORED_STEPS = 24, 3
RISE = 0.1
"""Required rise of the mean reward from the first four steps to the last four."""


@pytest.fixture(scope="module")
def tiny(runs: Runs) -> Runs:
    """Return the tiny world with a warmed-up policy and training data for the judge."""
    written = {
        "make_model.py": ("output/tiny/model",),
        "make_problems.py": ("output/tiny/problems",),
        "make_judgements.py": ("output/tiny/problems/train.jsonl", "output/tiny/judgements"),
    }
    for script, arguments in written.items():
        command = [sys.executable, str(ROOT / "examples" / "tiny" / script), *arguments]
        subprocess.run(command, cwd=runs.folder, check=True, timeout=limits.RUN)
    supervised(runs, "warm-for-judges", "tiny_warm_up")
    return runs


def supervised(runs: Runs, name: str, experiment: str) -> None:
    """Run an SFT experiment on one rank instead of two, with the same number of sequences per update."""
    keys = {
        "world_size": "null",
        "device_mapping": "[0]",
        "training_args.per_device_train_batch_size": 128,
        COMPILE: "false",
    }
    runs.run(
        name,
        ("--config-name", f"tiny/{experiment}"),
        {f"sft_train.{key}": value for key, value in keys.items()} | {"eval_steps": 0},
    )


def rewarded(
    tiny: Runs, name: str, experiment: str, model: str, steps: int, keys: dict[str, Any]
) -> list[dict[str, Any]]:
    """Make a run whose roles share one GPU, and return the metrics of its steps."""
    values: dict[str, Any] = {f"{role}.device_mapping": "[0]" for role in (*ROLES, "rewards.arithmetic")}
    values |= {f"{role}.world_size": "null" for role in ROLES} | {
        f"{role}.{COMPILE}": "false" for role in ("actor_train", "reference")
    }
    values |= {f"actor_infer.strategy_args.strategy_config.{key}": value for key, value in ENGINE.items()}
    values |= {
        "weight_sync.lora": "merged",  # vLLM does not support fp32 adapters on a GPU
        "pretrain": "warm-for-judges/export",
        "rewards.arithmetic.model_args.model_name_or_path": model,
    }
    values |= {"save_at_end": "false", "eval_steps": 0, "max_steps": steps}
    lines = tiny.run(name, ("--config-name", f"tiny/{experiment}"), values | keys)[1:]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert all(line["reward/scored_fraction"] == 1.0 and line["time/onload"] > 0 for line in lines)
    return lines


def responses(tiny: Runs, name: str, step: int) -> list[tuple[str, str, float]]:
    """Return prompt, response and reward of each sample of a step."""
    groups = [json.loads(line) for line in (tiny.folder / name / "samples.jsonl").read_text().splitlines()]
    found = [
        (group["prompt"], one["text"], one["reward"])
        for group in groups
        if group["step"] == step
        for one in group["responses"]
    ]
    assert found
    return found


def test_a_judge_takes_turns_with_the_engine(tiny: Runs) -> None:
    supervised(tiny, "judge", "tiny_judge")
    engine = {f"rewards.arithmetic.strategy_args.strategy_config.{key}": value for key, value in ENGINE.items()}
    lines = rewarded(tiny, "judged", "tiny_llm_judge", "judge/export", JUDGED_STEPS, engine)
    for step in (1, JUDGED_STEPS):
        found = responses(tiny, "judged", step)
        right = [reward == float(text == str(sum(map(int, prompt[:-1].split("+"))))) for prompt, text, reward in found]
        assert sum(right) > 0.9 * len(right), "most verdicts must be right, even after many turns on the GPU"
    means = [line["reward/arithmetic/mean"] for line in lines]
    assert sum(means[-4:]) / 4 > sum(means[:4]) / 4 + RISE


@pytest.fixture(scope="module")
def classifier(tiny: Runs) -> Path:
    """Return a reward model with random weights. Its scores need not be meaningful here."""
    source, folder = tiny.folder / "output" / "tiny" / "model", tiny.folder / "classifier"
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(source, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("strategy", ["hf_infer", "vllm"])
def test_a_reward_model_takes_turns_with_the_engine(tiny: Runs, classifier: Path, strategy: str) -> None:
    settings = ", ".join(f"{key}: {value}" for key, value in ENGINE.items())
    served = (
        f"{{strategy_name: vllm, strategy_config: {{{settings}}}}}"
        if strategy == "vllm"
        else "{strategy_name: hf_infer}"
    )
    keys = {"rewards.arithmetic.strategy_args": served}
    rewarded(tiny, f"preferred-{strategy}", "tiny_rlvr_reward_model", str(classifier), SCORED_STEPS, keys)
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(classifier),
        AutoTokenizer.from_pretrained(classifier),
    )
    for step in (1, SCORED_STEPS):
        for prompt, text, reward in responses(tiny, f"preferred-{strategy}", step)[:64]:
            tokens = tokenizer.encode(f"{prompt}{text}") + [tokenizer.eos_token_id]
            with torch.no_grad():
                assert reward == pytest.approx(model(torch.tensor([tokens])).logits.item(), abs=1e-3)
