"""`deterministic: true` on a GPU: fine-tuning repeats bit for bit, and with a batch-invariant engine a whole RLVR run
does.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from examples.tiny.make_problems import write_problems
from tests.gpu.conftest import ROOT, Runs, need_devices
from tests.gpu.test_rlvr_gpu import CASES, overrides, run

pytestmark = pytest.mark.gpu

STEPS = 3
MEASURED = ("time/", "throughput/", "memory/", "engine/", "sampling/")
INVARIANT = "actor_infer.strategy_args.strategy_config.batch_invariant"


def computed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics without those of clocks and memory."""
    return [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in lines]


def digests(export: Path) -> dict[str, str]:
    """Return a digest of each weight file."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in export.glob("*.safetensors")}


def rollouts(folder: Path) -> list[dict[str, Any]]:
    """Return all rollouts of a run, with tokens and log-probs, without their times."""
    rows = [row for file in sorted((folder / "rollouts").iterdir()) for row in parquet.read_table(file).to_pylist()]
    return [{name: value for name, value in row.items() if name not in ("began", "ended")} for row in rows]


def test_fine_tuning_repeats_bit_for_bit(runs: Runs, models_by_dtype: dict[str, Path]) -> None:
    write_problems(runs.folder / "sft-problems", seed=0)
    keys = {
        "pretrain": models_by_dtype["bf16"],
        "max_steps": STEPS,
        "eval_steps": STEPS,
        "track_with": "none",
        "deterministic": "true",
        "sft_train.data_args.file_name": runs.folder / "sft-problems" / "train.jsonl",
        "sft_train.device_mapping": "[0]",
        "sft_train.world_size": "null",
        "sft_train.model_args.dtype": "bf16",
        "sft_train.model_args.attn_implementation": "auto",
        "sft_train.model_args.compile_layers": "false",
    }
    one, two = runs.run_twice(("sft-one", "sft-two"), ("--config-name", "tiny/tiny_sft"), keys)
    assert len(one) == STEPS + 1 and computed(one) == computed(two)
    assert one[1]["sft/loss"] != one[-1]["sft/loss"], "it trains"
    weights, others = (digests(runs.folder / name / "export") for name in ("sft-one", "sft-two"))
    assert weights and weights == others


def test_a_whole_run_repeats_bit_for_bit(runs: Runs, models_by_dtype: dict[str, Path]) -> None:
    [case] = [case for case in CASES if case.name == "full"]
    keys = overrides(case, models_by_dtype["bf16"], 0, 0) | {
        "deterministic": "true",
        "actor_infer.generating_args.seeded": "true",
        INVARIANT: "true",
        "actor_train.model_args.compile_layers": "false",
        "reference.model_args.compile_layers": "false",
        "keep_rollouts": "true",
    }
    experiment = ("--config-dir", str(ROOT / "benchmarks" / "config"), "--config-name", case.config)
    one, two = runs.run_twice(("rlvr-one", "rlvr-two"), experiment, keys)
    assert [line["step"] for line in one][-STEPS:] == list(range(1, STEPS + 1))
    assert computed(one) == computed(two)
    rows, others = (rollouts(runs.folder / name) for name in ("rlvr-one", "rlvr-two"))
    assert rows == others and len(rows) >= STEPS * 16
    print("engine and trainer:", [line["mismatch/logprob_abs_diff_mean"] for line in one if line["step"]])


@pytest.mark.parametrize(("name", "engine_device"), [("adapter", 0), ("full", 1)])
def test_batch_invariant_engine_gets_weights(
    name: str, engine_device: int, runs: Runs, models_by_dtype: dict[str, Path]
) -> None:
    """As an adapter on the trainer's GPU, and by a broadcast, for which vLLM pins variables of NCCL on one side."""
    need_devices(engine_device + 1)
    [case] = [case for case in CASES if case.name == name]
    keys = {**case.keys, INVARIANT: "true"}
    run(
        replace(case, name=f"{name}_invariant", keys=keys),
        runs,
        models_by_dtype,
        f"on-{engine_device}",
        (0, engine_device),
    )
