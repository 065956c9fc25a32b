"""Detection of non-finite losses and gradients in one process. tests/engines/test_finite.py tests it with DeepSpeed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from roll.backend import MicroBatch, Rank
from roll.data import packing
from roll.errors import NonFiniteError
from roll.training.deepspeed.finite import FiniteWatch
from roll.types import TrainBatch
from tests import limits

RANK = Rank("actor_train", 0, 1, "127.0.0.1", 0, "cpu", limits.START)


def micro_batch(*samples: int) -> MicroBatch:
    """Return a micro-batch of these samples. Its contents do not matter."""
    sequences = packing.concatenate(
        [np.zeros(2, np.int32)] * max(1, len(samples)), [np.ones(2, bool)] * max(1, len(samples))
    )
    numbers = np.zeros(len(sequences.token_ids), np.float32)
    return MicroBatch(TrainBatch(sequences, numbers, None, np.zeros(len(numbers), np.int32)), numbers, samples)


class Model(nn.Module):
    """Two trained weights, one of which is multiplied by the input under a square root, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.root = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.slope * x + (self.root * x).sqrt() + self.frozen).sum()


def run(watch: FiniteWatch, model: Model, x: list[float], shift: float = 0.0, samples: tuple[int, ...] = (0,)) -> None:
    watch.loss(model(torch.tensor(x)) + shift).backward()
    watch.ran(micro_batch(*samples))


def test_finite_loss_keeps_its_gradients_unchanged() -> None:
    plain, watched = Model(), Model()
    plain(torch.tensor([4.0, 9.0])).backward()
    watch = FiniteWatch(watched, RANK, 1)
    run(watch, watched, [4.0, 9.0])
    watch.settle(skipped=False)
    watch.check()
    for mine, other in zip(watched.parameters(), plain.parameters(), strict=True):
        assert mine.grad is other.grad is None or (
            mine.grad is not None and other.grad is not None and torch.equal(mine.grad, other.grad)
        )


def test_infinite_loss_makes_every_gradient_nan() -> None:
    model = Model()
    run(FiniteWatch(model, RANK, 1), model, [4.0, 9.0], shift=torch.inf)
    for parameter in (model.slope, model.root):
        assert parameter.grad is not None and parameter.grad.isnan().all()


def test_first_non_finite_micro_batch_is_named() -> None:
    model = Model()
    watch = FiniteWatch(model, RANK, 1)
    run(watch, model, [4.0, 9.0], samples=(3,))
    run(watch, model, [0.0, 9.0], samples=(5, 8))  # the gradient of root is 0 times infinity
    run(watch, model, [4.0, 9.0], shift=torch.nan, samples=(6,))
    with pytest.raises(NonFiniteError, match=r"1 updates .* of root .* micro-batch 1 of rank 0 \(samples 5, 8"):
        watch.settle(skipped=True)


def test_first_skip_in_a_row_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Model()
    watch = FiniteWatch(model, RANK, 2)
    for skipped, sample in ((True, 1), (False, 2), (True, 3)):
        run(watch, model, [4.0, 9.0], shift=torch.nan if skipped else 0.0, samples=(sample,))
        watch.settle(skipped)
    run(watch, model, [4.0, 9.0], shift=torch.nan, samples=(4,))
    with pytest.raises(NonFiniteError, match=r"2 updates .* the loss .*samples 3 of"):
        watch.settle(skipped=True)
    assert [record.getMessage().partition("(")[2] for record in caplog.records] == [
        f"samples {n} of the step)" for n in (1, 3, 4)
    ]


def test_skip_log_describes_overflowing_sums_and_fillers(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    watch = FiniteWatch(model, RANK, 0)
    run(watch, model, [4.0, 9.0])
    watch.settle(skipped=True)
    run(watch, model, [4.0, torch.nan], samples=())
    watch.settle(skipped=True)
    first, second = (record.getMessage() for record in caplog.records)
    assert "the sum of" in first and "rank 0" not in first
    assert "rank 0 (a filler" in second


def test_update_with_non_finite_gradient_raises() -> None:
    model = Model()
    watch = FiniteWatch(model, RANK, 1)
    run(watch, model, [4.0, 9.0], shift=torch.nan)
    watch.settle(skipped=False)
    run(watch, model, [4.0, 9.0])
    watch.settle(skipped=False)
    with pytest.raises(NonFiniteError, match="made an update"):
        watch.check()
    watch.check()
