"""PPO with a critic on GPUs: on the policy's GPU, where all roles take turns, and on a separate GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import ROOT, Runs, need_devices
from tests.gpu.test_rlvr_gpu import CASES, STEPS, check, overrides

pytestmark = pytest.mark.gpu
(ADAPTER,) = [case for case in CASES if case.name == "adapter"]
EXPERIMENT = ("--config-dir", str(ROOT / "benchmarks" / "config"), "--config-name", ADAPTER.config)


def critic_keys(model: Path, device: int) -> dict[str, Any]:
    """Return overrides that place policy and engine on GPU 0, and a critic with an adapter on GPU `device`."""
    return overrides(ADAPTER, model, 0, 0) | {
        "time_sharing": "true",
        "adv_estimator": "gae",
        "whiten_advantages": "true",
        "value_clip": 0.2,
        "critic.model_args": "{dtype: bf16, lora_target: all-linear, lora_rank: 8}",
        "critic.training_args": "{learning_rate: 1.0e-3, per_device_train_batch_size: 64, "
        "gradient_accumulation_steps: "
        "1}",
        "critic.strategy_args": "{strategy_name: deepspeed_train, strategy_config: {zero_optimization: {stage: 3}}}",
        "critic.device_mapping": f"[{device}]",
        "critic.max_tokens_per_microbatch": 4096,
    }


@pytest.mark.parametrize("device", [0, 1])
def test_a_critic_learns_beside_the_policy(device: int, runs: Runs, models_by_dtype: dict[str, Path]) -> None:
    need_devices(device + 1)
    lines = runs.run(f"critic-{device}", EXPERIMENT, critic_keys(models_by_dtype[ADAPTER.dtype], device))
    check(lines, ADAPTER)
    steps = lines[-STEPS:]
    assert steps[0]["critic/value_mean"] == 0
    assert steps[2]["critic/value_mean"] != 0
    assert all(line["critic/grad_norm"] > 0 for line in steps)
    assert all(line["time/onload"] > 0 for line in steps)
    # On its own GPU, the critic is never offloaded.
    assert device == 0 or "memory/critic/resident_bytes" not in steps[2]
