"""The auxiliary loss of mixture-of-experts routers, compared with the one in transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from roll.config.schema.model import ModelConfig
from roll.models.layers import checkpoint_first, prepare_checkpointing
from roll.models.load import add_lora
from roll.models.routers import RouterLoss, balanced_routers, expert_blocks, router_modules

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
SHAPE |= {"num_key_value_heads": 1, "pad_token_id": 0}
WEIGHT = 0.3
IDS = torch.randint(0, 64, (1, 23), generator=torch.Generator().manual_seed(0))


def made(kind: str, **values: Any) -> Any:
    """Return a small model of an architecture."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE, **values))


def qwen() -> Any:
    torch.manual_seed(1)
    experts = {"moe_intermediate_size": 8, "num_experts": 6, "num_experts_per_tok": 2, "initializer_range": 0.3}
    model = made("qwen3_moe", head_dim=8, **experts).double()
    model.set_experts_implementation("eager")  # the grouped product does not support float64
    return model


def expected_gradients(model: PreTrainedModel) -> tuple[float, dict[str, Tensor]]:
    """Return the transformers auxiliary loss, averaged over layers, and the gradients of cross-entropy + WEIGHT * this
    loss.
    """
    outputs = model(input_ids=IDS, labels=IDS, output_router_logits=True)
    layers = [load_balancing_loss_func((each,), 6, 2) for each in outputs.router_logits]
    auxiliary = torch.stack([torch.as_tensor(each) for each in layers]).mean()
    plain = torch.nn.functional.cross_entropy(outputs.logits[0, :-1], IDS[0, 1:])
    (plain + WEIGHT * auxiliary).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return auxiliary.item(), gradients


@pytest.mark.parametrize("checkpointed", [0, 2, 3])
def test_router_loss_gradient_is_of_mean_over_layers(checkpointed: int) -> None:
    model = qwen()
    value, gradients = expected_gradients(copy.deepcopy(model))
    router_loss = RouterLoss(balanced_routers(model))
    if checkpointed:
        prepare_checkpointing(model, is_lora=True)
        checkpoint_first(model, checkpointed)
    model.train()
    for _ in range(2):  # no state carries over to the next micro-batch
        model.zero_grad()
        router_loss.begin(torch.tensor(WEIGHT))
        logits = model(input_ids=IDS).logits
        torch.nn.functional.cross_entropy(logits[0, :-1], IDS[0, 1:]).backward()
        metrics = router_loss.end()
        assert metrics["router/aux_loss"].item() == pytest.approx(value, rel=1e-6)
        assert 1 < metrics["router/load_max"].item() <= 3
        assert len(gradients) == len(list(model.parameters()))
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-8)


def test_measured_router_loss_changes_no_gradient() -> None:
    model, watched = qwen(), qwen()
    router_loss = RouterLoss(balanced_routers(watched))
    router_loss.begin(None)
    with torch.no_grad():
        watched(input_ids=IDS)
    for one in (model, watched):
        one(input_ids=IDS, labels=IDS).loss.backward()
    assert router_loss.end()["router/aux_loss"].item() > 0
    for plain, seen in zip(model.parameters(), watched.parameters(), strict=True):
        assert plain.grad is not None and seen.grad is not None and torch.equal(plain.grad, seen.grad)


def test_routers_beneath_an_adapter() -> None:
    model = qwen().float()
    chosen = ModelConfig.model_validate({"lora_target": "all-linear", "lora_rank": 2, "dtype": "fp32"})
    adapted = add_lora(model, chosen, seed=0)
    router_loss = RouterLoss(balanced_routers(model))
    router_loss.begin(torch.tensor(WEIGHT))
    adapted(input_ids=IDS).logits.sum().mul(0.0).backward()
    gradients = {name: parameter.grad for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert {type(block).__name__ for block in [*model.modules()] if type(block) in expert_blocks(model)} == {
        "Qwen3MoeSparseMoeBlock"
    }
    routers = [gradient for name, gradient in gradients.items() if ".gate.lora_B" in name]
    assert len(routers) == 3 and all(gradient is not None and gradient.abs().max() > 0 for gradient in routers)


@pytest.mark.parametrize(
    ("kind", "values", "block", "balanced"),
    [
        ("qwen2", {}, None, False),
        ("mixtral", {"num_local_experts": 4}, "MixtralSparseMoeBlock", True),
        ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, "OlmoeSparseMoeBlock", True),
        (
            "deepseek_v3",
            {"n_routed_experts": 8, "first_k_dense_replace": 0, "n_group": 2, "topk_group": 1},
            "DeepseekV3MoE",
            False,
        ),
    ],
)
def test_families(kind: str, values: dict[str, Any], block: str | None, balanced: bool) -> None:
    with torch.device("meta"):
        model = made(kind, **values)
    assert {found.__name__ for found in expert_blocks(model)} == ({block} if block else set())
    assert len(router_modules(model)) == (3 if block else 0)
    assert len(balanced_routers(model)) == (3 if balanced else 0)
