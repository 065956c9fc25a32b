"""Routes that vLLM returns on a GPU, replayed by the trainer in bf16, with layers of Qwen3-30B-A3B's shape."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import models
from roll.backend import Rank
from roll.config.schema.model import ModelConfig
from roll.engines.vllm.settings import VllmConfig, VllmSettings
from roll.models.load import load_tokenizer
from roll.types import Completion, Ints, Sampling
from tests import limits
from tests.engines.replaying import compared, kl
from tests.streams import whole

pytestmark = pytest.mark.gpu
SHAPE = "30b-a3b-4"
PROMPTS, PROMPT_TOKENS = 32, 64
SAMPLING = Sampling(128, samples=2, ignore_eos=True)


def generated(model: Path, prompts: list[Ints]) -> list[tuple[Ints, Completion]]:
    """Return prompts with responses and their routes."""
    block = {"enforce_eager": True, "gpu_memory_utilization": 0.4, "max_num_seqs": 64}
    settings = VllmSettings(
        str(model),
        ModelConfig.model_validate({"dtype": "bf16"}),
        VllmConfig.model_validate(block),
        512,
        adapter_rank=None,
        seed=0,
        takes_turns=False,
        keeps_kv_cache=True,
        returns_routes=True,
    )
    engine = settings.build(Rank("actor_infer", 0, 1, "127.0.0.1", 0, "cuda", limits.START))

    async def run() -> list[list[Completion]]:
        await asyncio.wait_for(engine.start(), limits.START)
        try:
            return await asyncio.gather(*(whole(engine.generate(prompt, SAMPLING, None)) for prompt in prompts))
        finally:
            await engine.close()

    return [(prompt, one) for prompt, several in zip(prompts, asyncio.run(run()), strict=True) for one in several]


def test_replayed_routes_bring_engine_and_trainer_closer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # this process uses the GPU too
    models.write(tmp_path, SHAPE, PROMPTS, PROMPT_TOKENS, dtype="bfloat16")
    tokenizer = load_tokenizer(str(tmp_path), False)
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    prompts = [np.array(tokenizer.encode(row["prompt"]), np.int32) for row in rows]
    found = compared(tmp_path, "bf16", generated(tmp_path, prompts), device="cuda")
    print(f"{len(found.before):,} tokens: {found}")
    assert found.same_routes < 1
    assert kl(found.after) < kl(found.before)
