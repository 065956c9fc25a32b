"""Whole RLVR runs on GPUs: after every sync, the engine's log-probs equal the trainer's, on the same GPU and on
different ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.config.derived.flops import gpu_rates
from tests.gpu.conftest import PROMPT_TOKENS, ROOT, Runs, need_devices

pytestmark = pytest.mark.gpu

STEPS = 3
KV_CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class Case:
    """One way to send weights to the engine."""

    name: str
    config: str
    dtype: str
    bound: float
    """Upper bound of a step's mean absolute difference between the log-probs of trainer and engine, in nats, and of
    |mean ratio - 1|.
    """
    keys: dict[str, Any]


CASES = (
    Case(
        "adapter",
        "step_lora",
        "bf16",
        0.02,
        {"weight_sync.lora": "adapter", "actor_train.training_args.learning_rate": 3e-3},
    ),
    Case(
        "merged",
        "step_lora",
        "bf16",
        0.02,
        {"weight_sync.lora": "merged", "actor_train.training_args.learning_rate": 3e-3},
    ),
    Case("full", "step_full", "bf16", 0.02, {"actor_train.training_args.learning_rate": 5e-4}),
    Case(
        "full_fp8",
        "step_full",
        "bf16",
        0.06,  # 0.014 on the CPU; with 0.1, the first update would have to move the policy farther than it does
        {
            "actor_infer.strategy_args.strategy_config.quantization": "fp8",
            "behaviour_log_probs": "trainer",
            "mismatch_correction": "tis",
            "actor_train.training_args.learning_rate": 5e-4,
        },
    ),
    Case("full_fp32", "step_full", "fp32", 1e-4, {"actor_train.training_args.learning_rate": 5e-4}),
)


def overrides(case: Case, model: Path, train_device: int | None, infer_device: int | None) -> dict[str, Any]:
    """Return the overrides of a small run. A device of None means the CPU."""
    engine = "actor_infer.strategy_args.strategy_config"
    keys: dict[str, Any] = {
        "pretrain": model,
        "max_steps": STEPS,
        "rollout_batch_size": 16,
        "prompt_length": PROMPT_TOKENS,
        "response_length": 64,
        "rewards.benchmark.world_size": 1,
        f"{engine}.enforce_eager": "true",
        f"{engine}.engine_args": f"{{kv_cache_memory_bytes: {KV_CACHE_BYTES}}}",
    }
    roles = {"actor_train": train_device, "actor_infer": infer_device}
    if case.config == "step_full":
        roles["reference"] = train_device
    for role, device in roles.items():
        keys[f"{role}.model_args.dtype"] = case.dtype
        keys[f"{role}.device_mapping"] = "null" if device is None else f"[{device}]"
        if role != "actor_infer":
            keys[f"{role}.max_tokens_per_microbatch"] = 4096
    return keys | case.keys


def check(lines: list[dict[str, Any]], case: Case) -> None:
    """Check that engine and trainer agree in every step. An engine that missed a sync would fail the check."""
    steps = lines[-STEPS:]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    for line in steps:
        assert line["mismatch/logprob_abs_diff_mean"] <= case.bound, line["step"]
        assert abs(line["policy/ratio"] - 1) <= case.bound, line["step"]
        measured = case.dtype != "fp32" and gpu_rates(torch.cuda.get_device_name()) is not None
        assert (0 < line["throughput/mfu"] < 1) if measured else "throughput/mfu" not in line
        assert 0 <= line["engine/idle_fraction"] < 1 and 0 < line["engine/kv_cache_use"] <= 1
    # The policy moves so far that an engine with the initial weights, or one update behind, would differ by more than
    # twice the bound: the k3 estimate of the KL is about half the mean square of the difference in log-probs.
    assert steps[0]["policy/kl_ref"] < steps[1]["policy/kl_ref"] < steps[2]["policy/kl_ref"]
    assert steps[1]["policy/kl_ref"] > (2 * case.bound) ** 2 / 2


def run(
    case: Case, runs: Runs, models_by_dtype: dict[str, Path], place: str, devices: tuple[int | None, int | None]
) -> None:
    """Make a run for the case and check its metrics."""
    experiment = ("--config-dir", str(ROOT / "benchmarks" / "config"), "--config-name", case.config)
    keys = overrides(case, models_by_dtype[case.dtype], *devices)
    check(runs.run(f"{case.name}-{place}", experiment, keys), case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_engine_and_trainer_agree_on_one_gpu(case: Case, runs: Runs, models_by_dtype: dict[str, Path]) -> None:
    run(case, runs, models_by_dtype, "colocated", (0, 0))


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=lambda case: case.name)
def test_two_engines_on_one_gpu_agree_with_trainer(case: Case, runs: Runs, models_by_dtype: dict[str, Path]) -> None:
    shared = {**case.keys, "actor_infer.device_mapping": "[0,0]"}
    run(replace(case, name=f"{case.name}_twice", keys=shared), runs, models_by_dtype, "colocated", (0, 0))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_engine_and_trainer_agree_on_two_gpus(case: Case, runs: Runs, models_by_dtype: dict[str, Path]) -> None:
    need_devices(2)
    run(case, runs, models_by_dtype, "disjoint", (0, 1))
