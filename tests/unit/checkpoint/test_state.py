"""The state of the training loop in a checkpoint: it is read back exactly, or the read fails with an error that names
its path.
"""

from pathlib import Path

import pytest

from roll.errors import CheckpointError
from roll.runs.checkpoint.manifest import LOOP_FILE, LoopState

SAMPLER = {"epoch": 1, "cursors": {"math": [3, 4]}, "share": 0.1 + 0.2}
STATE = LoopState(step=12, policy_version=48, sampler=SAMPLER, basis={"seed": "42"}, seconds=1234.567890123)


def test_the_loop_state_comes_back_exactly(tmp_path: Path) -> None:
    STATE.write(tmp_path)
    assert LoopState.read(tmp_path) == STATE


@pytest.mark.parametrize(
    "text", [None, "", "{}", '{"step": "12", "policy_version": 1, "sampler": {}, "basis": {}, "seconds": 1.0}']
)
def test_unreadable_loop_state_raises_with_its_path(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / LOOP_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=str(tmp_path / LOOP_FILE)):
        LoopState.read(tmp_path)
