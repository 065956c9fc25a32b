"""The moving average of a rank's weights, on a plain module: its values by hand, and its files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from roll.errors import CheckpointError
from roll.training.deepspeed.averaged import AveragedWeights, averaged_file


def module(*values: float, dtype: torch.dtype = torch.float32) -> nn.Linear:
    made = nn.Linear(len(values), 1).to(dtype)
    made.weight.data.copy_(torch.tensor([values]))
    made.bias.requires_grad_(False)
    return made


def values_in(model: nn.Linear) -> list[float]:
    return model.weight.detach().flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_average_is_in_place_only_inside_its_context(dtype: torch.dtype) -> None:
    model = module(1.0, -2.0, dtype=dtype)
    averaged = AveragedWeights(model, 0.25)
    for newer in ([5.0, 2.0], [9.0, 4.0]):
        model.weight.data.copy_(torch.tensor([newer]))
        averaged.update()
    # 1 -> 0.75 + 1.25 = 2 -> 1.5 + 2.25 = 3.75, and -2 -> -1.5 + 0.5 = -1 -> -0.75 + 1 = 0.25.
    with averaged.in_place():
        assert values_in(model) == [3.75, 0.25]
    assert values_in(model) == [9.0, 4.0]


def test_average_keeps_what_its_dtype_would_lose() -> None:
    model = module(1.0, dtype=torch.bfloat16)
    averaged = AveragedWeights(model, 0.01)
    model.weight.data.fill_(1.125)
    for _ in range(400):  # each step alone rounds to nothing in bf16
        averaged.update()
    with averaged.in_place():
        assert values_in(model) == pytest.approx([1 + 0.125 * (1 - 0.99**400)], abs=4e-3)


def test_weights_return_when_scoring_fails() -> None:
    model = module(1.0)
    averaged = AveragedWeights(model, 1.0)
    model.weight.data.fill_(3.0)
    with pytest.raises(ZeroDivisionError), averaged.in_place():
        assert values_in(model) == [1.0]
        raise ZeroDivisionError
    assert values_in(model) == [3.0]


def test_saved_average_goes_on(tmp_path: Path) -> None:
    model = module(1.0, 2.0)
    averaged = AveragedWeights(model, 0.5)
    averaged.save(tmp_path, 3)
    model.weight.data.fill_(7.0)
    resumed = AveragedWeights(model, 0.5)
    resumed.load(tmp_path, 3)
    resumed.update()
    with resumed.in_place():
        assert values_in(model) == [4.0, 4.5]


def test_checkpoint_without_this_average_is_refused(tmp_path: Path) -> None:
    averaged = AveragedWeights(module(1.0), 0.5)
    with pytest.raises(CheckpointError, match="rank 0"):
        averaged.load(tmp_path, 0)
    AveragedWeights(module(1.0, 2.0), 0.5).save(tmp_path, 0)
    with pytest.raises(CheckpointError, match=averaged_file(tmp_path, 0).name):
        averaged.load(tmp_path, 0)
