"""The critic's loss: by hand, against its formula in float64 token by token, and its gradient against finite
differences.
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll.algorithms.losses import LossInputs, ValueLoss

NUMBERS = st.floats(-10, 10)
TOKENS = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=8)
"""Value, value before the step's first update, and return of each token."""


def tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def inputs_of(old: Tensor, returns: Tensor) -> LossInputs:
    """Return the inputs of one sequence."""
    return LossInputs(torch.zeros_like(old), torch.tensor([len(old)]), values=old, returns=returns)


def by_cases(value: float, old: float, target: float, clip: float | None) -> float:
    """Return half the squared error. Beyond the clip range, it is at least the error at the edge of the range."""
    error = 0.5 * (value - target) ** 2
    if clip is None or abs(value - old) <= clip:
        return error
    edge = old + clip if value > old else old - clip
    return max(error, 0.5 * (edge - target) ** 2)


def test_by_hand() -> None:
    inputs = inputs_of(tensor(0, 0, 0, 1), tensor(1, 1, -1, 2))
    values = tensor(0.1, 0.5, 0.5, 2.5)
    torch.testing.assert_close(ValueLoss()(values, inputs).losses, tensor(0.405, 0.125, 1.125, 0.125))
    # In turn: within the clip; towards the return, clipped at 0.2; away from the return; past the return, clipped at
    # 1.2, which is further from 2 than 2.5 is.
    said = ValueLoss(clip=0.2)(values, inputs)
    torch.testing.assert_close(said.losses, tensor(0.405, 0.32, 1.125, 0.32))
    assert said.metrics["critic/clip_fraction"].tolist() == [0, 1, 0, 1]
    torch.testing.assert_close(said.metrics["critic/loss"], said.losses)


@given(tokens=TOKENS, clip=st.sampled_from([None, 0.1, 0.5, 3.0]))
def test_against_its_formula(tokens: list[tuple[float, float, float]], clip: float | None) -> None:
    values, old, returns = (tensor(*column) for column in zip(*tokens, strict=True))
    got = ValueLoss(clip)(values, inputs_of(old, returns)).losses
    np.testing.assert_allclose(got.numpy(), [by_cases(*token, clip) for token in tokens], rtol=1e-9, atol=1e-12)


@given(tokens=TOKENS, clip=st.floats(0.01, 5), shift=NUMBERS)
def test_its_properties(tokens: list[tuple[float, float, float]], clip: float, shift: float) -> None:
    values, old, returns = (tensor(*column) for column in zip(*tokens, strict=True))
    free, held = ValueLoss()(values, inputs_of(old, returns)), ValueLoss(clip)(values, inputs_of(old, returns))
    assert (held.losses >= free.losses).all()  # the clip never lowers the loss
    same = (values - old).abs() <= clip
    assert torch.allclose(held.losses[same], free.losses[same])
    assert not held.metrics["critic/clip_fraction"][(values - old).abs() <= clip - 1e-9].any()
    moved = ValueLoss(clip)(values + shift, inputs_of(old + shift, returns + shift))
    torch.testing.assert_close(moved.losses, held.losses)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_gradients_against_finite_differences(clip: float | None) -> None:
    generator = torch.Generator().manual_seed(5)
    values, old, returns = torch.randn(3, 80, dtype=torch.float64, generator=generator)
    inputs = inputs_of(old, returns)
    assert torch.autograd.gradcheck(
        lambda values: ValueLoss(clip)(values, inputs).losses, values.requires_grad_(), eps=1e-7, atol=1e-5
    )


def test_clipped_value_has_gradient_only_away_from_return() -> None:
    values = tensor(0.5, 0.5).requires_grad_()
    ValueLoss(clip=0.2)(values, inputs_of(tensor(0, 0), tensor(1, -1))).losses.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0, 1.5]


def test_it_travels_to_workers() -> None:
    assert pickle.loads(pickle.dumps(ValueLoss(0.5))) == ValueLoss(0.5)
