"""DeepSpeed's own file, with comments, fp16, an optimizer in host memory and a schedule, trains on one GPU."""

from __future__ import annotations

from math import log
from pathlib import Path

import pytest

from examples.tiny.make_problems import write_problems
from tests.gpu.conftest import Runs

pytestmark = pytest.mark.gpu
STEPS = 10
FILE = """{
    "train_batch_size": 64,                 // of all GPUs
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "fp16": {                               // with a dynamic loss scale
        "enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
        "hysteresis": 2, "min_loss_scale": 1
    },
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2, "allgather_partitions": true, "allgather_bucket_size": 2e8, "reduce_scatter": true,
        "reduce_bucket_size": 2e8, "overlap_comm": true, "contiguous_gradients": true,
        "offload_optimizer": {"device": "cpu", "pin_memory": true}
    },
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": "auto"}
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}
    },
    "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true},
    "tensorboard": {"enabled": true, "output_path": "log/", "job_name": "tiny"}
}
"""


def test_a_commented_file_trains_as_it_says(runs: Runs, models_by_dtype: dict[str, Path]) -> None:
    write_problems(runs.folder / "guide", seed=0)
    (runs.folder / "ds_config.json").write_text(FILE)
    keys = {
        "pretrain": models_by_dtype["fp32"],
        "max_steps": STEPS,
        "save_at_end": "false",
        "sft_train.data_args.file_name": runs.folder / "guide" / "train.jsonl",
        "sft_train.strategy_args.strategy_config": "ds_config.json",
        "sft_train.device_mapping": "[0]",
        "sft_train.world_size": "null",
        "sft_train.model_args.gradient_checkpointing": "auto",
    }
    without = ("~sft_train.training_args", "~sft_train.model_args.dtype", "~sft_train.max_tokens_per_microbatch")
    experiment = ("--config-name", "tiny/tiny_warm_up", *without)
    lines = [line for line in runs.run("ds-file", experiment, keys) if line["step"]]
    assert len(lines) == STEPS
    rates = [0.001 * log(max(step - 1, 1)) / log(1000) for step in range(1, STEPS + 1)]  # DeepSpeed's WarmupLR
    made = [line for line in lines if not line.get("policy/skipped_updates")]
    assert len(made) >= STEPS - 2, "a dynamic loss scale of 2^16 skips a few updates at most"
    assert [line["policy/lr"] for line in made] == pytest.approx(rates[: len(made)], rel=1e-6, abs=1e-12)
    assert made[-1]["sft/loss"] < made[0]["sft/loss"]
