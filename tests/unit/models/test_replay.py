"""Router replay, compared with transformers whose choice of experts is forced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from roll.config.schema.model import ModelConfig
from roll.models.layers import checkpoint_first, compile_layers, prepare_checkpointing
from roll.models.load import add_lora, load_causal_model
from roll.models.packed import PackedPolicy, filled_up, packed_inputs
from roll.models.replay import RouteReplay
from roll.models.routers import RouterLoss, balanced_routers, router_modules
from roll.types import Routes, Sequences
from tests.unit.models.test_families import SHAPE
from tests.unit.models.test_policy import FP32, sequences

EXPERTS, CHOSEN, LAYERS = 6, 2, 4
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 16, "norm_topk_prob": True, "head_dim": 8},
    "qwen2_moe": {
        "num_experts": EXPERTS,
        "moe_intermediate_size": 16,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 16,
    },
    "olmoe": {"num_experts": EXPERTS},
    "mixtral": {"num_local_experts": EXPERTS},
}


def written(kind: str, folder: Path, **more: Any) -> Path:
    torch.manual_seed(0)
    values = SHAPE | FAMILIES[kind] | {"num_experts_per_tok": CHOSEN} | more
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values))
    for router in router_modules(model).values():
        for parameter in router.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write a small model of a family, and return its folder."""
    return written(request.param, tmp_path)


def random_routes(batch: Sequences, unknown: float = 0.0) -> Routes:
    """Return routes [T, layers, k] of different experts, with a share of tokens without any."""
    generator = np.random.default_rng(5)
    count = len(batch.token_ids)
    order = generator.random((count, LAYERS, EXPERTS)).argsort(-1)[..., :CHOSEN].astype(np.int16)
    order[generator.random(count) < unknown] = -1
    return order


@contextmanager
def forced(model: PreTrainedModel, routes: Routes, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make torch's `topk` return the routes of [T, layers, k] in the routers, called in the order of the layers."""
    topk, layers = torch.topk, iter(range(routes.shape[1]))

    def choose(values: Tensor, k: int, dim: int = -1, **more: Any) -> Any:
        own = topk(values, k, dim=dim, **more)
        given = torch.from_numpy(routes[:, next(layers)]).long()
        chosen = torch.where((given < 0).any(-1, keepdim=True), own.indices, given)
        return values.gather(-1, chosen), chosen

    with monkeypatch.context() as patch:
        patch.setattr(torch, "topk", choose)
        yield
    assert next(layers, None) is None


def expected(model: PreTrainedModel, batch: Sequences, routes: Routes, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return the log-probs [S] of each sequence alone, with forced routes."""
    out = []
    for begin, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        ids = torch.from_numpy(batch.token_ids[begin:end]).long()
        with forced(model, routes[begin:end], monkeypatch):
            log_p = model(input_ids=ids[None]).logits[0].double().log_softmax(-1)
        where = torch.from_numpy(np.flatnonzero(batch.response_mask[begin:end]))
        out.append(log_p[where - 1].gather(1, ids[where][:, None])[:, 0])
    return torch.cat(out)


def replaying(folder: Path) -> PackedPolicy:
    policy = PackedPolicy(load_causal_model(str(folder), FP32))
    policy.replay = RouteReplay(policy.causal)
    return policy


@pytest.mark.parametrize("unknown", [0.0, 0.4])
def test_replayed_gradients_are_of_forced_transformers(
    family: Path, unknown: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = sequences([9, 3, 20, 5])
    routes = random_routes(batch, unknown)
    reference = AutoModelForCausalLM.from_pretrained(family, dtype=torch.float32, attn_implementation="eager")
    policy = replaying(family)
    theirs = expected(reference, batch, routes, monkeypatch)
    own, _ = policy(packed_inputs(batch, "cpu"))
    got, _ = policy(packed_inputs(replace(batch, routes=routes), "cpu"))
    assert (own - got).abs().max() > 0.1
    torch.testing.assert_close(got.double(), theirs, rtol=1e-5, atol=2e-5)
    weights = torch.linspace(-1, 1, len(got))
    (got * weights).sum().backward()
    (theirs * weights).sum().backward()
    for name, parameter in reference.named_parameters():
        mine = policy.causal.get_parameter(name).grad
        assert mine is not None and parameter.grad is not None, name
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-3, atol=1e-4)
    for router in router_modules(policy.causal).values():
        grad = router.get_parameter("weight").grad
        assert grad is not None and grad.any()


def test_routes_of_ones_own_change_nothing(family: Path) -> None:
    policy, batch = replaying(family), sequences([9, 12])
    seen: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda router, inputs, outputs: seen.append(outputs[2]))
        for router in router_modules(policy.causal).values()
    ]
    with torch.no_grad():
        own, _ = policy(packed_inputs(batch, "cpu"))
        routes = torch.stack(seen, 1).short().numpy()
        seen.clear()
        replayed, _ = policy(packed_inputs(replace(batch, routes=routes), "cpu"))
    torch.testing.assert_close(replayed, own, rtol=1e-6, atol=1e-6)
    assert np.array_equal(torch.stack(seen, 1).numpy(), routes)
    assert hooks


@pytest.mark.parametrize("is_lora", [False, True])
def test_recomputed_layers_replay_the_same_routes(is_lora: bool, tmp_path: Path) -> None:
    folder, batch = written("qwen3_moe", tmp_path), sequences([9, 12])
    inputs, gradients = packed_inputs(replace(batch, routes=random_routes(batch)), "cpu"), []
    chosen = ModelConfig.model_validate({"lora_target": "all-linear", "lora_rank": 2, "dtype": "fp32"})
    for recomputed in (0, LAYERS):
        model = load_causal_model(str(folder), FP32)
        policy = PackedPolicy(add_lora(model, chosen, 0) if is_lora else model)
        policy.replay = RouteReplay(policy.causal)
        prepare_checkpointing(policy.causal, is_lora)
        checkpoint_first(policy.causal, recomputed)
        policy.train()
        policy(inputs)[0].sum().backward()
        gradients.append([each.grad for each in policy.parameters() if each.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 10
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_router_loss_beside_replay(tmp_path: Path) -> None:
    policy, batch = replaying(written("qwen3_moe", tmp_path)), sequences([9, 12])
    loss = RouterLoss(balanced_routers(policy.causal))
    loss.begin(torch.tensor(0.5))
    got, _ = policy(packed_inputs(replace(batch, routes=random_routes(batch)), "cpu"))
    got.sum().backward()
    assert loss.end()["router/aux_loss"].item() > 0


def test_routes_count_dense_layers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, batch = written("qwen3_moe", tmp_path, mlp_only_layers=[0, 2]), sequences([9, 12])
    routes = random_routes(batch)
    policy = replaying(folder)
    assert len(router_modules(policy.causal)) == 2
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    theirs = expected(reference, batch, routes[:, [1, 3]], monkeypatch)
    got, _ = policy(packed_inputs(replace(batch, routes=routes), "cpu"))
    torch.testing.assert_close(got.double(), theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.full
def test_compiled_layers_share_the_replay(tmp_path: Path) -> None:
    policy, batch = replaying(written("qwen3_moe", tmp_path)), sequences([9, 12])
    given = [packed_inputs(replace(batch, routes=random_routes(batch, share)), "cpu") for share in (0.0, 0.4)]
    torch.compiler.reset()  # else a compilation in another test, of the same class, makes this one a recompilation
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        plain = [policy(inputs)[0] for inputs in given]
        compile_layers(policy.causal)
        compiled = [policy(inputs)[0] for inputs in given]
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)


def test_padding_for_shared_tokens_has_no_routes() -> None:
    batch = sequences([5])
    padded = filled_up(replace(batch, routes=random_routes(batch)), 4)
    assert padded.routes is not None
    assert padded.routes.shape == (8, LAYERS, CHOSEN)
    assert (padded.routes[5:] == -1).all() and (padded.routes[:5] >= 0).all()


def test_other_families_are_refused() -> None:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("granitemoe", **SHAPE))
    with pytest.raises(ValueError, match="granitemoe cannot be replayed"):
        RouteReplay(model)
