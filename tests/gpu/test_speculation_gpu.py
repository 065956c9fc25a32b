"""Speculative decoding on a GPU: samples keep the model's distribution, and their log-probs are the model's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks import models
from roll.backend import EngineActivity, Rank
from roll.config.schema.model import ModelConfig
from roll.engines.vllm.settings import VllmConfig, VllmSettings
from roll.types import Completion, Sampling
from tests import limits
from tests.gpu.conftest import ROOT, Runs
from tests.gpu.test_rlvr_gpu import CASES, check, overrides
from tests.streams import whole

pytestmark = pytest.mark.gpu
PROMPTS = [np.array(ids, np.int32) for ids in ([5, 6, 7, 5, 6], [100, 200], [40, 41, 42], [9, 9])]
SAMPLES, TOKENS, TEMPERATURE = 64, 48, 0.8
PEAKED = 14.0
"""Factor of the head's random weights. The entropy of a token is then about 3 nats instead of 7.6."""
METHODS = ("ngram", "draft_model", "eagle3")


def write_peaked(folder: Path) -> Path:
    """Write a small model whose next token depends mostly on the last one."""
    models.write(folder, "tiny", 1, 8, dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.lm_head.weight.data *= PEAKED
    model.save_pretrained(folder)
    return folder


def write_draft(folder: Path, method: str, model: Path) -> Path:
    """Write the model with noise in its weights, or an EAGLE-3 head with random weights."""
    if method == "draft_model":
        models.write(folder, "tiny", 1, 8, dtype="bfloat16")
        noisy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(1)
        for parameter in noisy.parameters():
            parameter.data += 0.2 * parameter.std() * torch.randn(parameter.shape, generator=generator)
        noisy.save_pretrained(folder)
        return folder
    shape = AutoModelForCausalLM.from_pretrained(model).config
    hidden, inner, vocabulary = shape.hidden_size, shape.intermediate_size, shape.vocab_size
    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    width = hidden // heads
    of_head: dict[str, Any] = {"draft_vocab_size": vocabulary, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    LlamaConfig(
        architectures=["LlamaForCausalLMEagle3"],
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocabulary,
        max_position_embeddings=shape.max_position_embeddings,
        **of_head,
    ).save_pretrained(folder)
    matrices = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (heads * width, 2 * hidden),
        "midlayer.self_attn.k_proj": (groups * width, 2 * hidden),
        "midlayer.self_attn.v_proj": (groups * width, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * width),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (vocabulary, hidden),
    }
    generator = torch.Generator().manual_seed(0)
    weights = {f"{name}.weight": 0.02 * torch.randn(size, generator=generator) for name, size in matrices.items()}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    weights |= {f"midlayer.{name}.weight": torch.ones(hidden) for name in norms} | {"norm.weight": torch.ones(hidden)}
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def block_of(method: str, model: Path, folder: Path) -> dict[str, Any]:
    """Return the block `speculative`, and write its draft."""
    if method == "ngram":
        return {"method": method, "tokens": 3, "longest_match": 1}
    return {"method": method, "tokens": 3, "draft": str(write_draft(folder / method, method, model))}


def sampled(model: Path, block: dict[str, Any]) -> tuple[list[list[Completion]], EngineActivity]:
    """Return samples for each prompt, and what the engine did."""
    from roll.engines.vllm.strategy import VllmGenerate

    engine = {"enforce_eager": True, "gpu_memory_utilization": 0.2, "max_num_seqs": 64, "speculative": block}
    # Otherwise vLLM measures the memory that other processes leave free.
    engine |= {"engine_args": {"kv_cache_memory_bytes": 1 << 29}}
    settings = VllmSettings(
        str(model),
        ModelConfig.model_validate({"dtype": "bf16"}),
        VllmConfig.model_validate(engine),
        512,
        None,
        0,
        takes_turns=False,
        keeps_kv_cache=False,
    )
    strategy = VllmGenerate(settings, Rank("actor_infer", 0, 1, "127.0.0.1", 0, "cuda", limits.START))
    sampling = Sampling(TOKENS, temperature=TEMPERATURE, samples=SAMPLES, ignore_eos=True)

    async def run() -> tuple[list[list[Completion]], EngineActivity]:
        await strategy.start()
        try:
            asked = (whole(strategy.generate(prompt, sampling, None)) for prompt in PROMPTS)
            return await asyncio.gather(*asked), await strategy.activity()
        finally:
            await strategy.close()

    return asyncio.run(run())


def deviations(
    log_probs: torch.Tensor, ids: torch.Tensor, begin: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return sums of deviations and of variances, [2] each: of a token's log-prob from its expectation, and of
    "the token followed the last one earlier in the sequence", which is what n-grams propose.

    Args:
        log_probs: of all tokens at each position, [T, V]; those of `ids[t]` stand at t - 1.
    """
    apart, variance = np.zeros(2), np.zeros(2)
    for at in range(begin, len(ids)):
        here, token = log_probs[at - 1].double(), int(ids[at])
        chance = here.exp()
        mean = (chance * here).sum()
        apart[0] += float(here[token] - mean)
        variance[0] += float((chance * (here - mean) ** 2).sum())
        followers = torch.unique(ids[1:at][ids[: at - 1] == ids[at - 1]])
        share = float(chance[followers].sum())
        apart[1] += (token in followers.tolist()) - share
        variance[1] += share * (1 - share)
    return apart, variance


@pytest.mark.parametrize("method", METHODS)
def test_samples_keep_the_distribution_of_the_model(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # this process uses the GPU too
    model = write_peaked(tmp_path / "model")
    samples, activity = sampled(model, block_of(method, model, tmp_path))
    assert activity.proposed_tokens and (activity.accepted_tokens or method == "eagle3")
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    plain = loaded.cuda().eval()  # pyright: ignore[reportCallIssue]
    apart, variance, differences = np.zeros(2), np.zeros(2), []
    for prompt, completions in zip(PROMPTS, samples, strict=True):
        for completion in completions:
            ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids])).long()
            with torch.no_grad():
                logits = plain(ids[None].cuda()).logits[0].float().cpu() / TEMPERATURE
            log_probs = logits.log_softmax(-1)
            said = log_probs[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0].numpy()
            differences.append(np.abs(said - completion.log_probs).mean())
            found = deviations(log_probs, ids, len(prompt))
            apart, variance = apart + found[0], variance + found[1]
    print(method, activity.proposed_tokens, activity.accepted_tokens, apart / np.sqrt(variance), np.mean(differences))
    assert np.abs(apart / np.sqrt(variance)).max() < 4
    assert np.mean(differences) < 0.05


@pytest.mark.parametrize("method", METHODS)
def test_verified_tokens_have_the_trainers_log_probs(
    method: str, tmp_path: Path, runs: Runs, models_by_dtype: dict[str, Path]
) -> None:
    case, model = CASES[2], models_by_dtype["bf16"]
    block = block_of(method, model, tmp_path)
    engine = "actor_infer.strategy_args.strategy_config"
    keys = overrides(case, model, 0, 0) | {
        f"{engine}.speculative": "{" + ", ".join(f"{key}: {value}" for key, value in block.items()) + "}",
        f"{engine}.gpu_memory_utilization": 0.3,
        "time_sharing": "false",
    }
    experiment = ("--config-dir", str(ROOT / "benchmarks" / "config"), "--config-name", case.config)
    lines = runs.run(f"speculative-{method}", experiment, keys)
    check(lines, case)
    assert all(line["engine/accepted_tokens"] <= line["engine/proposed_tokens"] for line in lines if line["step"])
    assert sum(line["engine/proposed_tokens"] for line in lines if line["step"]) > 0
