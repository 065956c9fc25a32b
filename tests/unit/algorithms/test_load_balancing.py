"""The load-balancing loss of routers: by hand, against transformers, and in low precision."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from roll.algorithms.losses import load_balancing


def logits(tokens: int, experts: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(tokens, experts, generator=generator, dtype=torch.float64)).requires_grad_()


def test_by_hand() -> None:
    # Two tokens, three experts, top 1: both choose the first expert. Mean probabilities (0.625, ...), loads (1, 0, 0).
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.75, 0.05, 0.2]], dtype=torch.float64)
    loss, load_max = load_balancing(probabilities.log(), 1)
    assert loss.item() == pytest.approx(3 * 0.625, abs=1e-12)
    assert load_max.item() == 3.0
    # With even loads and probabilities, the loss is top_k.
    even = torch.tensor([[3.0, 3.0, -3.0, -3.0], [-3.0, -3.0, 3.0, 3.0]], dtype=torch.float64)
    loss, load_max = load_balancing(even, 2)
    assert loss.item() == pytest.approx(2.0, abs=1e-12)
    assert load_max.item() == 1.0


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "scale"), [(1, 4, 1, 1.0), (37, 8, 2, 1.0), (64, 16, 4, 5.0), (20, 6, 2, 200.0)]
)
def test_loss_and_gradient_are_those_of_transformers(tokens: int, experts: int, top_k: int, scale: float) -> None:
    ours, theirs = logits(tokens, experts, 1, scale), logits(tokens, experts, 1, scale)
    loss, load_max = load_balancing(ours, top_k)
    expected = load_balancing_loss_func((theirs,), experts, top_k)
    assert isinstance(expected, torch.Tensor)
    # transformers sums in fp32, whatever the type of its inputs.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8)
    assert torch.isfinite(ours.grad).all() and top_k * load_max <= experts


def test_load_balancing_gradient_matches_finite_differences() -> None:
    given = logits(12, 5, 3)
    assert torch.autograd.gradcheck(lambda one: load_balancing(one, 2)[0], (given,), eps=1e-7, atol=1e-7)


def test_sixteen_bits_are_summed_in_fp32() -> None:
    given = logits(4096, 8, 5).detach()
    half, _ = load_balancing(given.bfloat16(), 2)
    exact, _ = load_balancing(given.bfloat16().double(), 2)
    assert half.dtype == torch.float32 and half.item() == pytest.approx(exact.item(), rel=1e-6)
