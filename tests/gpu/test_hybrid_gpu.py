"""A hybrid model with Qwen3.5's architecture, with the kernels of flash-linear-attention."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.models import draw_prompts
from roll.config.schema.model import ModelConfig
from roll.data.packing import concatenate
from roll.models.load import load_policy
from roll.models.packed import packed_inputs
from roll.types import Sequences
from tests.gpu.conftest import PROMPT_TOKENS, PROMPTS, ROOT, Runs
from tests.gpu.test_rlvr_gpu import KV_CACHE_BYTES, Case, check, overrides
from tests.hybrids import write_hybrid

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(find_spec("fla") is None, reason="needs flash-linear-attention")]
LENGTHS = [5, 2, 64, 65, 130, 700, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("hybrid") / "model")


def drawn() -> list[Sequences]:
    """Return sequences of random tokens, each as a separate micro-batch."""
    generator = np.random.default_rng(0)
    ids = [generator.integers(0, 250, length).astype(np.int32) for length in LENGTHS]
    return [concatenate([own], [np.arange(len(own)) > 0]) for own in ids]


def whole(parts: list[Sequences]) -> Sequences:
    return concatenate([part.token_ids for part in parts], [part.response_mask for part in parts])


def outcome(
    folder: Path, dtype: str, device: str, micro_batches: list[Sequences]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the log-probs, [S], and the gradients of their sum."""
    policy = load_policy(str(folder), ModelConfig.model_validate({"dtype": dtype}), seed=0).to(device)
    said = torch.cat([policy(packed_inputs(sequences, device))[0] for sequences in micro_batches])
    said.sum().backward()
    grads = {
        name: parameter.grad.float().cpu()
        for name, parameter in policy.named_parameters()
        if parameter.grad is not None
    }
    return said.detach().cpu(), grads


def test_packed_is_alone_by_the_kernels(folder: Path) -> None:
    alone, packed = outcome(folder, "bf16", "cuda", drawn()), outcome(folder, "bf16", "cuda", [whole(drawn())])
    assert (packed[0] - alone[0]).abs().mean() < 5e-3
    for name, grad in packed[1].items():
        assert (grad - alone[1][name]).norm() < 0.05 * alone[1][name].norm() + 1e-3, name


@pytest.mark.parametrize(("dtype", "mean"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_hybrid_log_probs_on_gpu_match_cpu(folder: Path, dtype: str, mean: float) -> None:
    expected, _ = outcome(folder, "fp32", "cpu", drawn())
    said, _ = outcome(folder, dtype, "cuda", [whole(drawn())])
    assert (said - expected).abs().mean() < mean


def test_trainer_and_engine_agree_after_every_sync(folder: Path, runs: Runs) -> None:
    rows = draw_prompts(PROMPTS, PROMPT_TOKENS, seed=0)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    case = Case("hybrid", "step_full", "bf16", 0.01, {"actor_train.training_args.learning_rate": 5e-4})
    experiment = ("--config-dir", str(ROOT / "benchmarks" / "config"), "--config-name", case.config)
    # without FlashInfer
    arguments = f"{{kv_cache_memory_bytes: {KV_CACHE_BYTES}, additional_config: {{gdn_prefill_backend: triton}}}}"
    keys = overrides(case, folder, 0, 0) | {"actor_infer.strategy_args.strategy_config.engine_args": arguments}
    check(runs.run(case.name, experiment, keys), case)
