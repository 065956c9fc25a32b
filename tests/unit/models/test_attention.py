"""Attention over packed sequences, compared with each sequence alone in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roll.models.attention import packed_attention

HEADS, KEY_HEADS, WIDTH = 4, 2, 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def packed(lengths: list[int], device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """Return random query, key and value of packed sequences, and the offsets of the sequences."""
    generator = torch.Generator().manual_seed(sum(lengths))
    parts = [torch.randn(1, heads, sum(lengths), WIDTH, generator=generator) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    return [part.to(device, dtype) for part in parts], offsets.to(device)


def run(parts: list[Tensor], offsets: Tensor, scaling: float | None = None, **more: Any) -> Tensor:
    """Return the output of packed attention, [T, heads, width]."""
    given = {"cu_seq_lens_q": offsets, "max_length_q": int(offsets.diff().max()), "scaling": scaling}
    out, weights = packed_attention(nn.Identity(), parts[0], parts[1], parts[2], None, **given, **more)
    assert weights is None
    assert out.shape[0] == 1
    return out[0]


def one_by_one(
    parts: list[Tensor],
    offsets: Tensor,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Compute softmax(cap(q k' scale) + mask) v for each sequence alone, in float64. A sink adds to the sum."""
    out = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        query, key, value = (part[0, :, begin:end].double() for part in parts)
        key, value = (part.repeat_interleave(HEADS // KEY_HEADS, 0) for part in (key, value))
        scores = query @ key.transpose(1, 2) * scaling
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        hidden = torch.ones(end - begin, end - begin, dtype=torch.bool, device=scores.device).triu(1)
        if sliding_window is not None:
            hidden = hidden | torch.ones_like(hidden).tril(-sliding_window)
        exponentials = scores.masked_fill(hidden, -torch.inf).exp()
        total = exponentials.sum(-1, keepdim=True)
        if s_aux is not None:
            total = total + s_aux.double().exp()[:, None, None]
        out.append((exponentials / total @ value).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [[1], [7], [3, 1, 9, 2], [5, 5, 5]], ids=str)
@pytest.mark.parametrize("scaling", [WIDTH**-0.5, 0.1])
def test_packed_is_each_sequence_alone(lengths: list[int], scaling: float, device: str) -> None:
    parts, offsets = packed(lengths, device)
    expected = one_by_one(parts, offsets, scaling)
    torch.testing.assert_close(run(parts, offsets, scaling).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [[7], [3, 1, 9, 2], [300, 20]], ids=str)
def test_packed_is_each_sequence_alone_in_bf16(lengths: list[int], device: str) -> None:
    parts, offsets = packed(lengths, device, torch.bfloat16)
    expected = one_by_one(parts, offsets, WIDTH**-0.5)
    torch.testing.assert_close(run(parts, offsets).double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def test_gradients_are_those_of_each_sequence_alone(dtype: torch.dtype) -> None:
    parts, offsets = packed([3, 1, 9], "cuda" if dtype == torch.bfloat16 else "cpu", dtype)
    for part in parts:
        part.requires_grad_()
    direction = torch.randn(13, HEADS, WIDTH, generator=torch.Generator().manual_seed(1)).to(parts[0].device).double()
    expected = torch.autograd.grad((one_by_one(parts, offsets, 0.25) * direction).sum(), parts)
    got = torch.autograd.grad((run(parts, offsets, 0.25).double() * direction).sum(), parts)
    tolerance = 1e-4 if dtype == torch.float32 else 6e-2
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_no_token_sees_its_future_or_another_sequence() -> None:
    parts, offsets = packed([4, 6, 3])
    before = run(parts, offsets)
    changed = [part.clone() for part in parts]
    for part in changed:
        part[:, :, 7] += 1.0
    after = run(changed, offsets)
    same = (before == after).all(dim=-1).all(dim=-1)
    assert same.tolist() == [True] * 7 + [False] * 3 + [True] * 3


SINKS = torch.tensor([-1.0, 0.5, 2.0, 0.0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
def test_windows_caps_and_sinks_against_formula(
    window: int | None, softcap: float | None, sinks: Tensor | None, device: str
) -> None:
    parts, offsets = packed([3, 1, 9, 2], device)
    learnt = [part.requires_grad_() for part in parts]
    learnt += [] if sinks is None else [sinks.clone().to(device).requires_grad_()]
    changes = {"sliding_window": window, "softcap": softcap, "s_aux": None if sinks is None else learnt[-1]}
    expected, got = one_by_one(parts, offsets, 0.25, **changes), run(parts, offsets, 0.25, **changes)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    direction = torch.randn(15, HEADS, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    slopes = torch.autograd.grad((expected * direction).sum(), learnt)
    for mine, theirs in zip(torch.autograd.grad((got * direction).sum(), learnt), slopes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 3, 9, 40])
@pytest.mark.parametrize("changes", [{}, {"softcap": 0.7}, {"s_aux": SINKS}], ids=["plain", "cap", "sinks"])
def test_windows_caps_and_sinks_in_bf16(window: int | None, changes: dict[str, Any]) -> None:
    parts, offsets = packed([3, 1, 70, 2], "cuda", torch.bfloat16)
    learnt = [part.requires_grad_() for part in parts]
    changes = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in changes.items()}
    expected = one_by_one(parts, offsets, 0.25, window, **changes)
    got = run(parts, offsets, 0.25, sliding_window=window, **changes)
    torch.testing.assert_close(got.double(), expected, rtol=2e-2, atol=2e-2)
    slopes = torch.autograd.grad(expected.sum(), learnt)
    for mine, theirs in zip(torch.autograd.grad(got.sum(), learnt), slopes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=6e-2, atol=6e-2)
