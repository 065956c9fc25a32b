"""Routes that vLLM returns, replayed by the trainer: both choose the same experts, and their log-probs are closer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.backend import Rank
from roll.config.schema.model import ModelConfig
from roll.data.packing import concatenate
from roll.engines.vllm.settings import VllmConfig, VllmSettings
from roll.models.packed import PackedPolicy, packed_inputs
from roll.models.routers import router_modules
from roll.system.sizes import GIB
from roll.types import Completion, Ints, Routes, Sampling
from tests import limits
from tests.engines.generating import (
    MAX_MODEL_LEN,
    PROMPTS,
    Running,
    generate_across_an_update,
    policy,
    running,
)
from tests.engines.interpreted_triton import interpreted_triton
from tests.engines.replaying import compared, kl

pytestmark = pytest.mark.full
TOLERANCE = 1e-5
"""Largest allowed difference in fp32, in nats per token."""
TOKEN_BYTES = 1024
"""Keys and values of a token of the model: 2 layers, 2 heads of 32 numbers of 4 bytes."""
SAMPLING = Sampling(24, samples=6, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set the environment variables that the worker layer sets for an engine, and those that interpret Triton."""
    with pytest.MonkeyPatch.context() as patch, interpreted_triton(tmp_path_factory.mktemp("triton")):
        patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
        patch.setenv("OMP_NUM_THREADS", "1")
        # This process has Triton without the backend already, and only checks the engine's settings.
        patch.setattr("vllm.config.vllm.HAS_TRITON", True)
        yield


@contextmanager
def routing(
    model: Path, folder: Path, dtype: str, keeps_kv_cache: bool = True, cached_tokens: int = 1 << 18
) -> Iterator[Running]:
    """Start an engine that returns routes, with room for this number of tokens in its KV cache in fp32."""
    keys = {"enforce_eager": True, "kv_cache_gib": cached_tokens * TOKEN_BYTES / GIB, "block_size": 32}
    settings = VllmSettings(
        str(model),
        ModelConfig.model_validate({"dtype": dtype}),
        VllmConfig.model_validate(keys | {"max_num_seqs": 64}),
        min(MAX_MODEL_LEN, cached_tokens // 2),
        adapter_rank=None,
        seed=0,
        takes_turns=False,
        keeps_kv_cache=keeps_kv_cache,
        returns_routes=True,
    )
    rank = Rank("actor_infer", 0, 1, "127.0.0.1", 0, "cpu", limits.START)
    with running("vllm", model, folder, settings.build(rank)) as one:
        yield one


def sampled_pairs(one: Running) -> list[tuple[Ints, Completion]]:
    """Generate twice, so that the second time the prompts are in the engine's cache."""
    pairs = []
    prompts = [*PROMPTS, np.arange(10, 110, dtype=np.int32)]
    for _ in range(2):
        for prompt, completions in zip(prompts, one.generate(prompts, SAMPLING), strict=True):
            pairs += [(prompt, completion) for completion in completions]
    for prompt, completion in pairs:
        assert completion.routes is not None
        assert completion.routes.shape == (len(prompt) + len(completion.token_ids), 2, 2)
    return pairs


def check(one: Running, dtype: str, model: Path) -> None:
    found = compared(model, dtype, sampled_pairs(one), one.policy)
    print(f"{dtype}: {found}")
    if dtype == "fp32":
        assert found.same_routes > 0.999
        assert found.after.abs().max() < TOLERANCE
    else:
        assert 0.8 < found.same_routes < 1
        assert kl(found.after) < kl(found.before)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_replayed_routes_are_the_engines(dtype: str, expert_model: Path, tmp_path: Path) -> None:
    with routing(expert_model, tmp_path, dtype) as one:
        check(one, dtype, expert_model)
        one.push(policy(expert_model, seed=1))
        check(one, dtype, expert_model)


def test_preempted_responses_have_their_routes(expert_model: Path, tmp_path: Path) -> None:
    sampling, prompt, room = Sampling(90, samples=8, ignore_eos=True), PROMPTS[2], 320
    with routing(expert_model, tmp_path, "fp32", cached_tokens=room) as one:
        [completions] = one.generate([prompt], sampling)
        found = compared(expert_model, "fp32", [(prompt, each) for each in completions], one.policy)
    assert sum(len(each.token_ids) for each in completions) > 2 * room, "the cache cannot hold all at once"
    assert found.same_routes > 0.999
    assert found.after.abs().max() < TOLERANCE


@pytest.mark.parametrize("keeps", [True, False], ids=["kept cache", "recomputed"])
def test_an_update_leaves_earlier_routes(keeps: bool, expert_model: Path, tmp_path: Path) -> None:
    prompt = PROMPTS[2]
    with routing(expert_model, tmp_path, "fp32", keeps) as one:
        before, completions, old = generate_across_an_update(one, expert_model, prompt, seed=5, tokens=48)
    assert old.any() and not old.all()
    for completion, earlier in zip(completions, old, strict=True):
        read = len(prompt) + int(earlier.sum()) - 1  # the engine had not read the last token
        assert completion.routes is not None and (completion.routes[:-1] >= 0).all()
        own = own_routes(before, np.concatenate([prompt, completion.token_ids]))
        assert (own[:read] == np.sort(completion.routes[:read], -1)).all(-1).mean() > 0.999
        later = (own[read:-1] == np.sort(completion.routes[read:-1], -1)).all(-1).mean()
        assert later < 0.9, "the new weights choose otherwise"


@torch.no_grad()
def own_routes(current: PackedPolicy, ids: Ints) -> Routes:
    """Return the routes [T, layers, k] that the policy chooses by itself, each sorted."""
    seen: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda router, inputs, outputs: seen.append(outputs[2]))
        for router in router_modules(current.causal).values()
    ]
    current(packed_inputs(concatenate([ids], [np.arange(len(ids)) > 0]), "cpu"))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).sort(-1).values.numpy().astype(np.int16)
