"""Routes that vLLM returns, replayed by the trainer: both choose the same experts, and their log-probs are closer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.backend import Rank
from roll.config.schema.model import ModelConfig
from roll.data.packing import concatenate
from roll.engines.vllm.settings import VllmConfig, VllmSettings
from roll.models.load import load_causal_model
from roll.models.packed import PackedPolicy, packed_inputs
from roll.models.replay import RouteReplay
from roll.models.routers import router_modules
from roll.types import Completion, Ints, Sampling
from tests import limits
from tests.engines.generating import MAX_MODEL_LEN, PROMPTS, Running, engine_log_probs, policy, running

pytestmark = pytest.mark.full
TOLERANCE = 1e-5
"""Largest allowed difference in fp32, in nats per token."""
SAMPLING = Sampling(40, samples=8, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Set the environment variables that the worker layer sets for an engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def engine(
    request: pytest.FixtureRequest, expert_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Running]]:
    """Return the precision, and an engine that returns routes."""
    config = VllmConfig.model_validate({"enforce_eager": True, "kv_cache_gib": 0.25, "max_num_seqs": 64})
    model_args = ModelConfig.model_validate({"dtype": request.param})
    settings = VllmSettings(
        str(expert_model), model_args, config, MAX_MODEL_LEN, None, 0, takes_turns=False, keeps_kv_cache=True
    )
    built = replace(settings, returns_routes=True).build(Rank("actor_infer", 0, 1, "127.0.0.1", 0, "cpu", limits.START))
    with ExitStack() as stack:
        yield request.param, stack.enter_context(running("vllm", expert_model, tmp_path_factory.mktemp("r3"), built))


@dataclass(frozen=True)
class Compared:
    """The trainer beside the engine, over all sampled tokens."""

    same_routes: float
    """Share of tokens for which the trainer's routers choose the engine's experts in every layer."""
    before: Tensor
    """Log-prob of the trainer minus that of the engine, [S], without replay."""
    after: Tensor
    """The same with replay."""


@torch.no_grad()
def compared(model: Path, dtype: str, pairs: Sequence[tuple[Ints, Completion]], weights_of: PackedPolicy) -> Compared:
    trainer = PackedPolicy(load_causal_model(str(model), ModelConfig.model_validate({"dtype": dtype})))
    trainer.load_state_dict(weights_of.state_dict())
    trainer.replay = RouteReplay(trainer.causal)
    seen: list[Tensor] = []
    for router in router_modules(trainer.causal).values():
        router.register_forward_hook(lambda router, inputs, outputs: seen.append(outputs[2]))
    ids = [np.concatenate([prompt, completion.token_ids]) for prompt, completion in pairs]
    batch = concatenate(ids, [np.arange(len(one)) >= len(prompt) for one, (prompt, _) in zip(ids, pairs, strict=True)])
    given = np.concatenate([completion.routes for _, completion in pairs if completion.routes is not None])
    engine = torch.from_numpy(np.concatenate([engine_log_probs(completion) for _, completion in pairs]))
    before = trainer(packed_inputs(batch, "cpu"))[0] - engine
    own = torch.stack(seen, 1).sort(-1).values
    seen.clear()
    after = trainer(packed_inputs(replace(batch, routes=given), "cpu"))[0] - engine
    known = torch.from_numpy((given >= 0).all((1, 2)))
    assert int((~known).sum()) == len(pairs), "only the last token of each sequence may lack routes"
    theirs = torch.from_numpy(given).long().sort(-1).values
    assert torch.equal(torch.stack(seen, 1).sort(-1).values[known], theirs[known])
    return Compared((own == theirs).flatten(1).all(1)[known].float().mean().item(), before, after)


def kl(difference: Tensor) -> float:
    """Return the k3 estimate of KL(engine, trainer) in nats per token."""
    return (difference.double().exp() - 1 - difference.double()).mean().item()


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
    print(f"{dtype}: {found.same_routes:.4f} of the tokens have the engine's routes without replay")
    for when, difference in (("without", found.before), ("with", found.after)):
        print(f"{when} replay: KL {kl(difference):.3g}, largest difference {difference.abs().max():.3g}")
    if dtype == "fp32":
        assert found.same_routes > 0.999
        assert found.after.abs().max() < TOLERANCE
    else:
        assert 0.8 < found.same_routes < 1
        assert kl(found.after) < kl(found.before)


def test_replayed_routes_are_the_engines(engine: tuple[str, Running], expert_model: Path) -> None:
    dtype, one = engine
    check(one, dtype, expert_model)
    one.push(policy(expert_model, seed=1))
    check(one, dtype, expert_model)
