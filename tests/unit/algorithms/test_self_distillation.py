"""The signal of a self-teacher: values by hand, and its expected gradient against that of the KL divergence, from
autograd in float64 on a small transformers model that reads the longer prompt.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from roll.algorithms.losses import LossInputs
from roll.algorithms.objectives import PolicyGradient, PolicyLoss
from roll.algorithms.self_distillation import TokenGains, blended, token_gains

PROMPT, HINTED = [3, 1, 4], [7, 7, 2, 3, 1, 4]
TOKENS = 11


def test_gain_is_the_log_ratio_to_the_policy() -> None:
    teacher, student = np.array([-1, -4, -0.5], np.float32), np.array([-2, -1, -0.5], np.float32)
    assert token_gains(teacher, student).tolist() == [1, -3, 0]
    assert token_gains(teacher, student, clip=2.0).tolist() == [1, -2, 0]


def test_weight_divides_between_estimator_and_teacher() -> None:
    taught = TokenGains(np.array([0, 4, -8, 0], np.float32), np.array([False, True, True, False]))
    advantages = np.array([0, 2, 2, 2], np.float32)
    assert blended(advantages, taught, 0.25).tolist() == [0, 2.5, -0.5, 1.5]
    assert blended(advantages, taught, 1.0).tolist() == [0, 4, -8, 0]


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(3)
    shape = Qwen2Config(
        vocab_size=TOKENS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.4,
    )
    return Qwen2ForCausalLM(shape).double().eval()


def next_log_probs(model: Qwen2ForCausalLM, before: list[int]) -> Tensor:
    """Return the log-probs of all tokens after `before`, [TOKENS]."""
    return model(input_ids=torch.tensor([before])).logits[0, -1].log_softmax(-1)


def gradient(model: Qwen2ForCausalLM, value: Tensor) -> Tensor:
    model.zero_grad()
    value.backward()
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


def test_expected_gradient_is_that_of_the_divergence(model: Qwen2ForCausalLM) -> None:
    with torch.no_grad():
        teacher = next_log_probs(model, HINTED)
    student = next_log_probs(model, PROMPT)
    gains = token_gains(teacher.numpy(), student.detach().numpy())
    inputs = LossInputs(torch.from_numpy(gains), torch.ones(TOKENS, dtype=torch.int64))
    loss = PolicyLoss(objective=PolicyGradient(), on_policy=True)
    # One response for every token that the policy may sample, weighted by its probability: the expectation itself.
    expected = (loss(student, torch.zeros(TOKENS), inputs).losses * student.detach().exp()).sum()
    found = gradient(model, expected)
    student = next_log_probs(model, PROMPT)
    exact = gradient(model, (student.exp() * (student - teacher)).sum())
    assert exact.abs().max() > 0.1
    # The gains are fp32, and so are the rounding errors.
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
