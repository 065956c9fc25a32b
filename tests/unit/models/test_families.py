"""Families of models that change their logits or their attention, compared with transformers on each sequence alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from roll.algorithms.divergence import Divergence
from roll.data.packing import concatenate
from roll.models.load import load_causal_model
from roll.models.packed import PackedPolicy, packed_inputs
from roll.models.student import PackedStudent, PackedTeacher, PackedTopTeacher, TeacherTop
from tests.unit.models.test_policy import FP32, one_by_one, sequences

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "granite": {
        "logits_scaling": 4.0,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
    },
    "granitemoe": {"logits_scaling": 4.0, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 6,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "cohere": {"logit_scale": 0.25},
    "mistral": {"sliding_window": 6},
    "gpt_oss": {"head_dim": 8, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write a small model of a family, and return its folder."""
    return written(request.param, tmp_path)


def written(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE, **FAMILIES[kind]))
    for name, parameter in model.named_parameters():
        if "sinks" in name or "bias" in name or "router" in name:
            nn.init.normal_(parameter, std=0.5)  # transformers' initial values are all equal
    model.save_pretrained(folder)
    return folder


def eager(folder: Path) -> PreTrainedModel:
    """Load the model with transformers' own attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def test_log_probs_and_gradients_are_of_transformers(family: Path) -> None:
    batch, temperature = sequences([9, 3, 20, 2, 5]), 0.8
    reference, policy = eager(family), PackedPolicy(load_causal_model(str(family), FP32))
    expected, got = one_by_one(reference, batch, temperature), policy(packed_inputs(batch, "cpu", temperature))
    weights = torch.linspace(-1, 1, int(batch.response_mask.sum()))
    for log_probs, entropies in (expected, got):
        ((log_probs * weights).sum() + 0.1 * entropies.sum()).backward()
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=2e-5)
    theirs = dict(reference.named_parameters())
    for name, parameter in policy.causal.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name
        torch.testing.assert_close(
            parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@torch.no_grad()
def test_neighbours_do_not_change_a_sequence(family: Path) -> None:
    policy = PackedPolicy(load_causal_model(str(family), FP32))
    alone, beside = sequences([12], seed=1), sequences([30], seed=2)
    together = concatenate([beside.token_ids, alone.token_ids], [beside.response_mask, alone.response_mask])
    expected, _ = policy(packed_inputs(alone, "cpu"))
    got, _ = policy(packed_inputs(together, "cpu"))
    torch.testing.assert_close(got[-len(expected) :], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "change"),
    [("granite", lambda products: products / 4), ("gemma2", lambda products: 3 * (products / 3).tanh())],
    ids=["granite", "gemma2"],
)
@torch.no_grad()
def test_teacher_and_student_compare_final_logits(
    kind: str, change: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    batch, model = sequences([9, 7]), load_causal_model(str(written(kind, tmp_path)), FP32)
    policy, top = PackedPolicy(model), TeacherTop(3, 256, 1.0)
    states = PackedTeacher(model)(packed_inputs(batch, "cpu"))[0]
    own, others = ((change(each @ policy.head.weight.t())).double().log_softmax(-1) for each in (states, states / 2))
    student = PackedStudent(model, policy.head.weight, Divergence("forward_kl", 0.5, 1.0), policy.head.final)
    found = student(packed_inputs(batch, "cpu", teacher_states=(states / 2).numpy()))
    expected = (others.exp() * (others - own)).sum(-1)
    assert expected.min() > 1e-3
    torch.testing.assert_close(found[2].double(), expected, rtol=1e-4, atol=1e-5)
    log_probs, _ = top.decode(PackedTopTeacher(model, top)(packed_inputs(batch, "cpu"))[0])
    torch.testing.assert_close(log_probs[:, :3].double(), own.topk(3).values, rtol=1e-4, atol=1e-5)
