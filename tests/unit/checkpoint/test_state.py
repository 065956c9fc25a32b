import random
from pathlib import Path

import numpy as np
import pytest
import torch

from roll.checkpoint.random_state import RANDOM_FILE, restore_random_state, write_random_state
from roll.checkpoint.state import LOOP_FILE, LoopState
from roll.errors import CheckpointError

SAMPLER = {"epoch": 1, "cursors": {"math": [3, 4]}, "share": 0.1 + 0.2}
STATE = LoopState("run", step=12, policy_version=48, sampler=SAMPLER, seconds=1234.567890123)


def test_the_loop_state_comes_back_exactly(tmp_path: Path) -> None:
    STATE.write(tmp_path)
    assert LoopState.read(tmp_path) == STATE


@pytest.mark.parametrize("text", [None, "", "{}", '{"exp_name": "run", "step": "12", "policy_version": 1, "sampler": {}, "seconds": 1.0}'])
def test_a_loop_state_that_cannot_be_read_is_an_error_with_its_path(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / LOOP_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=str(tmp_path / LOOP_FILE)):
        LoopState.read(tmp_path)


def draw() -> tuple[list[float], list[float], list[float]]:
    return [random.gauss(0, 1) for _ in range(3)], np.random.standard_normal(3).tolist(), torch.randn(3).tolist()


def test_the_generators_continue_where_they_stood(tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    # An odd number of normal draws leaves the second of a pair in Python's and NumPy's state.
    draw()
    write_random_state(tmp_path)
    expected = draw()
    assert draw() != expected
    restore_random_state(tmp_path)
    assert draw() == expected


@pytest.mark.parametrize("text", [None, "{", "{}", '{"python": [3, [1], null], "numpy": {"state": {"key": []}}, "torch": ""}'])
def test_a_random_state_that_cannot_be_read_is_an_error_with_its_path(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / RANDOM_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=str(tmp_path / RANDOM_FILE)):
        restore_random_state(tmp_path)
