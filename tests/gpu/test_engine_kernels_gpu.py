"""`engine_kernels` on a GPU: log-probs equal a batch-invariant engine's to the last bit, gradients are near the plain
ones, and in a whole run engine and trainer do not differ at all.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import models
from roll.backend import Rank
from roll.config.schema.model import ModelConfig
from roll.data.packing import concatenate
from roll.engines.vllm.settings import VllmConfig, VllmSettings
from roll.models.load import load_policy
from roll.models.packed import packed_inputs, score
from roll.types import Completion, Sampling, Sequences
from tests import limits
from tests.gpu.conftest import ROOT, Runs
from tests.gpu.test_rlvr_gpu import CASES, STEPS, overrides
from tests.streams import whole

pytestmark = pytest.mark.gpu

VOCABULARY, TOKENS = 2048, 80
SHAPE = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4, "vocab_size": VOCABULARY}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rope_theta": 100_000.0}
SHAPE |= {"max_position_embeddings": 1024}
KEYS = {"qwen2": {}, "qwen3": {"head_dim": 128}, "llama": {"tie_word_embeddings": True}}
"""Further keys of the configuration by type of the model."""
ENGINE = {"batch_invariant": True, "compile_model": False, "engine_args": {"kv_cache_memory_bytes": 1 << 30}}
ENGINE |= {"max_num_batched_tokens": 64, "max_num_seqs": 8}  # prompts are read while other requests generate


@pytest.fixture(scope="module", params=KEYS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(request.param)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(request.param, **(SHAPE | KEYS[request.param]))
        )
        for parameter in model.parameters():
            parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.1)
    model.to(torch.bfloat16).save_pretrained(out)
    models.build_tokenizer(VOCABULARY).save_pretrained(out)
    return out


def prompts() -> list[Any]:
    """Return ragged prompts, two of them with the same beginning."""
    generator = np.random.default_rng(0)
    drawn = [generator.integers(0, VOCABULARY, length).astype(np.int32) for length in (3, 17, 64, 65, 200, 150)]
    return [*drawn, np.concatenate([drawn[-1][:100], drawn[0]])]


async def generated(folder: Path, temperature: float) -> list[Completion]:
    """Return a response to each prompt, all at the same time."""
    rank = Rank("actor_infer", 0, 1, "127.0.0.1", 0, "cuda", limits.START)
    engine, model_args = VllmConfig.model_validate(ENGINE), ModelConfig.model_validate({})
    strategy = VllmSettings(str(folder), model_args, engine, 512, None, 0, False, False).build(rank)
    await strategy.start()
    try:
        sampling = Sampling(TOKENS, temperature=temperature, ignore_eos=True)
        streams = [strategy.generate(prompt, sampling, seed) for seed, prompt in enumerate(prompts())]
        found = await asyncio.gather(*(whole(stream) for stream in streams))
    finally:
        await strategy.close()
    return [completion for [completion] in found]


def joined(completions: list[Completion]) -> Sequences:
    ids = [np.concatenate([prompt, one.token_ids]) for prompt, one in zip(prompts(), completions, strict=True)]
    masks = [np.arange(len(one)) >= len(prompt) for one, prompt in zip(ids, prompts(), strict=True)]
    return concatenate(ids, masks)


def gradients(folder: Path, part: Sequences, **keys: Any) -> dict[str, Tensor]:
    policy = load_policy(str(folder), ModelConfig.model_validate(keys), seed=0).cuda()
    log_probs, entropy = policy(packed_inputs(part, "cuda"))
    (log_probs @ torch.linspace(-1, 1, len(log_probs), device="cuda") + entropy.mean()).backward()
    return {name: one.grad.float() for name, one in policy.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_engine_s(folder: Path, temperature: float) -> None:
    completions = asyncio.run(generated(folder, temperature))
    part = joined(completions)
    rank = Rank("actor_train", 0, 1, "127.0.0.1", 0, "cuda", limits.START)
    policy = load_policy(str(folder), ModelConfig.model_validate({"engine_kernels": True}), seed=0).cuda().eval()
    with torch.no_grad():
        [together] = score(policy, [part], temperature, rank)
        alone = [
            score(policy, [joined_one], temperature, rank)[0][joined_one.response_mask]
            for joined_one in (
                concatenate([np.concatenate([prompt, one.token_ids])], [np.arange(len(prompt) + TOKENS) >= len(prompt)])
                for prompt, one in zip(prompts(), completions, strict=True)
            )
        ]
    engine = np.concatenate([one.log_probs for one in completions if one.log_probs is not None])
    assert len(engine) == TOKENS * len(completions) and engine.std() > 0.5
    for found in (together[part.response_mask], np.concatenate(alone)):
        assert np.array_equal(found, engine), np.abs(found - engine).max()


def test_gradients_are_near_the_plain_ones(folder: Path) -> None:
    generator = np.random.default_rng(1)
    ids = [generator.integers(0, VOCABULARY, length).astype(np.int32) for length in (70, 20, 130)]
    part = concatenate(ids, [np.arange(len(one)) > 3 for one in ids])
    ours, plain = gradients(folder, part, engine_kernels=True), gradients(folder, part)
    assert ours.keys() == plain.keys()
    for name, gradient in plain.items():
        cosine = torch.nn.functional.cosine_similarity(ours[name].flatten(), gradient.flatten(), dim=0)
        assert cosine > 0.99, (name, float(cosine))


def test_engine_and_trainer_agree_in_a_run(runs: Runs, models_by_dtype: dict[str, Path]) -> None:
    [case] = [case for case in CASES if case.name == "full"]
    engine = "actor_infer.strategy_args.strategy_config"
    keys = overrides(case, models_by_dtype["bf16"], 0, 0) | {
        "actor_train.model_args.engine_kernels": "true",
        "reference.model_args.engine_kernels": "true",
        f"{engine}.batch_invariant": "true",
        f"{engine}.compile_model": "false",
        f"{engine}.enforce_eager": "false",
    }
    experiment = ("--config-dir", str(ROOT / "benchmarks" / "config"), "--config-name", case.config)
    lines = runs.run("engine_kernels", experiment, keys)[-STEPS:]
    assert [line["mismatch/logprob_abs_diff_mean"] for line in lines] == [0.0] * STEPS
    kl = [line["policy/kl_ref"] for line in lines]
    assert kl[0] == 0 < kl[1] < kl[2], "it trains"
