"""Log-probs and entropies computed in chunks, compared with a full log softmax in float64; the memory and the
compilation of the chunks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from roll.config.plan.memory import LOGITS, head_tokens
from roll.models import packed as head
from roll.models.logits import FinalLogits
from roll.models.packed import LogProbHead, chunked_log_probs, logit_gradient, logits_of, token_statistics

VOCABULARY, WIDTH = 61, 12


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator)
    targets = torch.randint(VOCABULARY, (tokens,), generator=generator)
    return hidden.to(dtype), weight.to(dtype), targets


def formula(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, factor: float = 1.0, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropies in float64 from the full log softmax."""
    logits = hidden.double() @ weight.double().t() * factor
    logits = logits if cap is None else cap * (logits / cap).tanh()
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.fixture(params=[1, 4, 7, 1024], ids=lambda size: f"chunks of {size}")
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(head, "head_tokens", lambda vocabulary: request.param)
    return request.param


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("tokens", [0, 1, 7, 13])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_log_probs_and_entropy_in_float64(tokens: int, temperature: float) -> None:
    given = inputs(tokens)
    log_probs, entropy = chunked_log_probs(*given, temperature)
    expected_log_probs, expected_entropy = formula(*given, temperature)
    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), expected_log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("terms", ["log_probs", "entropy", "both"])
def test_gradients_in_float64(terms: str, temperature: float) -> None:
    hidden, weight, targets = inputs(13)
    hidden.requires_grad_()
    weight.requires_grad_()
    directions = torch.randn(2, 13, generator=torch.Generator().manual_seed(5))

    def objective(log_probs: Tensor, entropy: Tensor) -> Tensor:
        parts = {"log_probs": (log_probs * directions[0]).sum(), "entropy": (entropy * directions[1]).sum()}
        return sum(parts.values()) if terms == "both" else parts[terms]  # pyright: ignore[reportReturnType]

    got = torch.autograd.grad(objective(*chunked_log_probs(hidden, weight, targets, temperature)), (hidden, weight))
    expected = torch.autograd.grad(objective(*formula(hidden, weight, targets, temperature)), (hidden, weight))
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize(("factor", "cap"), [(0.25, None), (1.0, 2.0), (0.5, 1.5)])
def test_scaled_and_capped_logits_in_float64(factor: float, cap: float | None) -> None:
    hidden, weight, targets = inputs(13)
    learnt = hidden.requires_grad_(), weight.requires_grad_()
    directions = torch.randn(2, 13, generator=torch.Generator().manual_seed(5))
    got = chunked_log_probs(hidden, weight, targets, 0.7, FinalLogits(factor, cap))
    expected = formula(hidden, weight, targets, 0.7, factor, cap)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
    slopes = (
        torch.autograd.grad((one * directions[0] + two * directions[1]).sum(), learnt) for one, two in (got, expected)
    )
    for mine, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)


def test_the_formula_itself_against_finite_differences() -> None:
    hidden, weight, targets = (part.double() if part.is_floating_point() else part for part in inputs(3))
    assert torch.autograd.gradcheck(
        lambda h, w: formula(h, w, targets, 0.7), (hidden.requires_grad_(), weight.requires_grad_())
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bf16_weights_lose_nothing_beyond_their_own_rounding(device: str) -> None:
    hidden, weight, targets = (part.to(device) for part in inputs(50, torch.bfloat16))
    expected_log_probs, expected_entropy = formula(hidden, weight, targets, 0.9)
    log_probs, entropy = chunked_log_probs(hidden, weight, targets, 0.9)
    # Products of bf16 values are exact in fp32, and sums are in fp32. The result is much more precise than the 3 digits
    # of bf16.
    torch.testing.assert_close(log_probs.double(), expected_log_probs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-4, atol=1e-4)
    hidden.requires_grad_()
    weight.requires_grad_()
    got = torch.autograd.grad(chunked_log_probs(hidden, weight, targets, 0.9)[0].sum(), (hidden, weight))
    expected = torch.autograd.grad(formula(hidden, weight, targets, 0.9)[0].sum(), (hidden, weight))
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine, theirs, rtol=3e-2, atol=6e-2)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_head_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, chunk_tokens = 640, 16
    monkeypatch.setattr(head, "head_tokens", lambda vocabulary: chunk_tokens)
    hidden, weight, targets = inputs(tokens)
    hidden.requires_grad_()
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with Largest() as seen, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        log_probs, entropy = chunked_log_probs(hidden, weight, targets, 0.7)
        (log_probs.sum() + entropy.sum()).backward()
    assert kept
    assert max(kept) == tokens * WIDTH
    assert seen.numel == tokens * WIDTH
    assert tokens * WIDTH < tokens * VOCABULARY // 5
    with Largest() as whole:
        formula(hidden, weight, targets, 0.7)
    assert whole.numel == tokens * VOCABULARY


@pytest.mark.parametrize(("tokens", "products"), [(0, 0), (7, 1), (16, 1), (40, 5)])
def test_the_last_chunks_logits_are_formed_once(tokens: int, products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    formed: list[int] = []

    def count(hidden: Tensor, weight: Tensor) -> Tensor:
        formed.append(len(hidden))
        return logits_of(hidden, weight)

    monkeypatch.setattr(head, "head_tokens", lambda vocabulary: 16)
    monkeypatch.setattr(head, "logits_of", count)
    hidden, weight, targets = inputs(tokens)
    log_probs, _ = chunked_log_probs(hidden.requires_grad_(), weight, targets)
    log_probs.sum().backward()
    assert len(formed) == products
    assert formed.count(8) == 2 * (tokens == 40), (
        "the logits of the incomplete chunk should not be kept for the backward pass"
    )


def test_a_frozen_weight_gets_no_gradient() -> None:
    hidden, weight, targets = inputs(5)
    chunked_log_probs(hidden.requires_grad_(), weight, targets)[0].sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None and hidden.grad.any()


def test_micro_batch_without_responses_has_zero_gradient() -> None:
    hidden, weight, targets = inputs(0)
    log_probs, entropy = chunked_log_probs(hidden.requires_grad_(), weight.requires_grad_(), targets)
    (log_probs.sum() + entropy.sum()).backward()
    assert weight.grad is not None and not weight.grad.any()


def test_head_shares_its_weight_and_returns_logits() -> None:
    linear = nn.Linear(WIDTH, VOCABULARY, bias=False)
    log_prob_head = LogProbHead(linear)
    assert log_prob_head.weight is linear.weight
    hidden, _, targets = inputs(5)
    torch.testing.assert_close(log_prob_head(hidden), linear(hidden))
    expected = formula(hidden, linear.weight, targets, 0.5)
    for mine, theirs in zip(log_prob_head(hidden, targets, 0.5), expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


def test_a_head_with_a_bias_is_refused() -> None:
    with pytest.raises(ValueError, match="bias"):
        LogProbHead(nn.Linear(WIDTH, VOCABULARY))


@pytest.mark.parametrize("entropy_learns", [False, True])
def test_one_compiled_graph_serves_chunks_of_any_size(entropy_learns: bool) -> None:
    counter = CompileCounter()
    forward = torch.compile(token_statistics, backend=counter, fullgraph=True)
    backward = torch.compile(logit_gradient, backend=counter, fullgraph=True)
    for tokens in (13, 40, 7, 128):
        hidden, weight, targets = inputs(tokens)
        logits, slopes = hidden @ weight.t(), torch.ones(tokens)
        for tensor in (logits, targets, slopes):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        log_probs, log_z, entropy = forward(logits, targets, 0.7)
        torch.testing.assert_close(log_probs, token_statistics(logits, targets, 0.7)[0])
        for tensor in (log_z, entropy):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        backward(logits, targets, log_z, entropy, slopes, slopes if entropy_learns else None, 0.7, torch.bfloat16)
    assert counter.frame_count == 2


def test_planned_memory_matches_chunks_of_head() -> None:
    assert head_tokens(152_064) == 3456
    assert head_tokens(2 * 152_064) == 1664
    assert head_tokens(10**7) == 128
    assert all(head_tokens(size) * size <= LOGITS for size in (256, 32_000, 152_064, 10**6))
