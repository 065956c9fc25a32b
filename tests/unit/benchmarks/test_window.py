"""The simulation of the window: known waiting times, and what a wider window gains."""

from __future__ import annotations

import pytest

from benchmarks.window import SETTINGS, main, parse, simulated
from roll.config.derived.batch import age_limit

ALIKE = ["--tokens", "100", "--deviation", "0", "--steps", "100"]
"""Each group takes one second."""


def test_groups_of_one_length() -> None:
    slow, fast = (parse([*ALIKE, "--train-seconds", seconds]) for seconds in ("3", "0.5"))
    assert simulated(slow, 0.0, 1, 0).step == pytest.approx(4.0), "the trainer waits for each group"
    assert simulated(slow, 1.0, 1, 0).wait == pytest.approx(0.01), "only the first step waits"
    assert simulated(fast, 1.0, 1, 0).step == pytest.approx(0.75, abs=0.01), "two steps in the time of one of ratio 0"


def test_a_wider_window_waits_less() -> None:
    options = parse(["--steps", "100", "--batch", "16"])
    found = {setting: simulated(options, *setting, seed=0) for setting in SETTINGS}
    assert found[1.0, 2].wait < 0.7 * found[1.0, 1].wait and found[2.0, 3].wait < 0.7 * found[2.0, 1].wait
    for (ratio, batches), run in found.items():
        assert run.oldest <= age_limit(ratio, batches)
        assert run.age == pytest.approx(ratio, abs=0.1), "as many steps as batches are ahead"


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ALIKE, "--seeds", "2", "--train-seconds", "3"]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()]
    assert [cell.strip() for cell in rows[2]] == ["0", "1", "4.0", "1.0", "0.00", "0"]
    assert len(rows) == 2 + len(SETTINGS)
