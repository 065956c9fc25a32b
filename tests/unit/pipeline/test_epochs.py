"""Steps and epochs, compared with counting single rows."""

from __future__ import annotations

import pytest

from roll.runs.position import Epochs


@pytest.mark.parametrize(("rows", "batch_size"), [(10, 4), (12, 4), (3, 7), (1, 1), (100, 1)])
def test_epoch_ends_in_step_of_its_last_row(rows: int, batch_size: int) -> None:
    epochs, steps = Epochs(rows, batch_size), 40
    for step in range(1, steps + 1):
        drawn = range((step - 1) * batch_size, step * batch_size)
        assert epochs.end_in(step) == any(number % rows == rows - 1 for number in drawn)
        assert epochs.passed(step) == step * batch_size / rows


@pytest.mark.parametrize(("epochs", "most", "steps"), [(1, None, 3), (2, None, 5), (2, 4, 4), (1, 100, 3)])
def test_run_ends_with_last_epoch_or_max_steps(epochs: int, most: int | None, steps: int) -> None:
    assert Epochs(rows=10, batch_size=4).steps(epochs, most) == steps
