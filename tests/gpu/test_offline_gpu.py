"""DPO with a separate reference model on the policy's GPU: time sharing changes the use of memory but not the
result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.tiny.make_problems import write_problems
from tests.gpu.conftest import Runs

pytestmark = pytest.mark.gpu
STEPS = 3


def overrides(model: Path, problems: Path) -> dict[str, Any]:
    """Return overrides that run `tiny_dpo` on one GPU, training all parameters against a frozen copy of the model."""
    learner, reference = "actor_train", "reference"
    keys: dict[str, Any] = {
        "pretrain": model,
        "max_steps": STEPS,
        "eval_steps": 2,
        "save_at_end": "false",
        "track_with": "none",
    }
    keys |= {f"{learner}.model_args.lora_target": "null"}
    keys |= {
        f"{learner}.data_args.file_name": problems / "train.jsonl",
        f"{reference}.strategy_args.strategy_name": "hf_infer",
    }
    for role in (learner, reference):
        keys |= {f"{role}.device_mapping": "[0]", f"{role}.world_size": "null", f"{role}.model_args.dtype": "fp32"}
        keys |= {f"{role}.max_tokens_per_microbatch": 4096}
    return keys


def test_time_shared_reference_trains_like_separate_one(runs: Runs, models_by_dtype: dict[str, Path]) -> None:
    write_problems(runs.folder / "problems", seed=0)
    experiment = (
        "--config-name",
        "tiny/tiny_dpo",
        "~actor_train.model_args.lora_rank",
        "~actor_train.model_args.lora_alpha",
    )
    keys = overrides(models_by_dtype["fp32"], runs.folder / "problems")
    shared, apart = (runs.run(f"dpo-{way}", experiment, {**keys, "time_sharing": way}) for way in ("true", "false"))
    assert len(shared) == len(apart) == STEPS + 1
    for one, other in zip(shared[1:], apart[1:], strict=True):
        assert one["dpo/loss"] == pytest.approx(other["dpo/loss"], abs=1e-4)
        assert one["time/onload"] > other["time/onload"]
    resident = "memory/reference/resident_bytes"
    assert resident not in apart[-1] and shared[-1][resident] > 0
    before = runs.run("dpo-before", experiment, {**keys, "reference_log_probs": "precomputed", "eval_steps": 0})
    assert [line["dpo/loss"] for line in before] == pytest.approx([line["dpo/loss"] for line in shared[1:]], abs=1e-4)
    assert resident not in before[-1], "the process of the reference has ended"
