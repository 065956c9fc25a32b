"""The loss of reward models: by hand, and its gradient."""

from __future__ import annotations

import math

import pytest
import torch

from roll.algorithms.losses import LossInputs
from roll.algorithms.preference import BradleyTerry


def inputs(margins: list[float]) -> LossInputs:
    labels = torch.tensor(margins, dtype=torch.float64).repeat_interleave(2)
    return LossInputs(torch.zeros(len(labels)), torch.ones(len(labels), dtype=torch.int64), labels=labels)


def test_two_pairs_by_hand() -> None:
    scores = torch.tensor([1.0, 0.5, -1.0, 2.0], dtype=torch.float64)
    said = BradleyTerry()(scores, inputs([0.0, 1.0]))
    first, second = -math.log(1 / (1 + math.exp(-0.5))), -math.log(1 / (1 + math.exp(4.0)))
    assert said.losses.tolist() == pytest.approx([first, first, second, second])
    values = {name: one.tolist() for name, (one, _) in said.counted.items()}
    assert values["reward_model/accuracy"] == [1.0, 0.0]
    assert values["reward_model/margin"] == [0.5, -3.0]


def test_gradients_are_those_of_finite_differences() -> None:
    scores = torch.tensor([1.0, 0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda values: BradleyTerry()(values, inputs([0.2, 0.0])).losses, [scores])


def test_the_filler_is_no_pair() -> None:
    said = BradleyTerry()(torch.zeros(0), LossInputs(torch.zeros(0), torch.zeros(1, dtype=torch.int64)))
    assert len(said.losses) == 0 and not said.counted
