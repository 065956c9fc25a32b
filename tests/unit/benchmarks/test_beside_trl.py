"""The comparison with TRL: what counts as reached, what is read of a run, and the ratio's interval."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from argparse import Namespace
from math import exp, log, sqrt
from pathlib import Path

import pytest

from benchmarks.beside_trl import (
    Lane,
    Place,
    Side,
    Validation,
    micro_batch_of,
    ratio_with_interval,
    reached,
    table,
)
from tests import limits

PLACE = Place("0", frozenset(os.sched_getaffinity(0)))


def curve(*accuracies: float) -> list[Validation]:
    return [Validation(5 * n, accuracy, 10.0 * n, 100 + 10.0 * n) for n, accuracy in enumerate(accuracies)]


def test_three_validations_in_a_row_count() -> None:
    assert reached(curve(0.1, 0.5, 0.3, 0.39, 0.52, 0.5), 0.4) == curve(0, 0, 0, 0, 0.52)[4]
    assert reached(curve(0.9, 0.1, 0.1, 0.9), 0.4) is None


def test_seconds_of_training_leave_out_validations(tmp_path: Path) -> None:
    lines = [
        {"step": 0, "val/sums/pass@1": 0.1, "time/evaluate": 9.0},
        {"step": 1, "time/step": 2.0},
        {"step": 2, "time/step": 5.0, "time/evaluate": 4.0, "val/sums/pass@1": 0.3},
    ]
    said = tmp_path / "metrics.jsonl"
    others = "{'loss': 0.1}\n"  # TRL's own lines
    said.write_text(others + "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3')
    side = Side("roll", [sys.executable, "-c", ""], PLACE, tmp_path, said)
    side.process.wait(limits.PROCESS)
    side.read()
    side.read()
    assert [(one.step, one.accuracy, one.training_seconds) for one in side.curve] == [(0, 0.1, 0.0), (2, 0.3, 3.0)]


class SmallPrograms(Lane):
    """A lane whose programs validate once and end; that of seed 9 fails. They say which cores they may use."""

    def start(self, seed: int) -> Side:
        said = {"step": 0, "training_seconds": 1.0}
        cores = "len(__import__('os').sched_getaffinity(0))"
        says = f"import json; print(json.dumps({said} | {{'accuracy': {cores}}})); raise SystemExit({int(seed == 9)})"
        return Side("TRL", [sys.executable, "-c", says], self.place, self.folder, self.folder / f"{seed}.out")


def advanced(seeds: list[int], folder: Path) -> Lane:
    lane = SmallPrograms("TRL", Place("0", frozenset([min(os.sched_getaffinity(0))])), Namespace(seeds=seeds), folder)
    for _ in range(int(50 * limits.PROCESS)):
        if not lane.advance():
            return lane
        time.sleep(0.02)
    raise AssertionError("the programs do not end")


def test_seeds_run_one_after_another_on_their_cores(tmp_path: Path) -> None:
    lane = advanced([7, 8], tmp_path)
    assert {seed: [point.accuracy for point in curve] for seed, curve in lane.curves.items()} == {7: [1], 8: [1]}
    assert not lane.advance()


def test_a_failed_program_ends_the_comparison(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="TRL ended with status 1"):
        advanced([7, 9, 8], tmp_path)


def test_interval_of_a_ratio_by_hand() -> None:
    assert ratio_with_interval([0.5]) == "0.50, no interval"
    half = 12.706204736 * abs(log(0.4) - log(0.5)) / 2  # Student's quantile with one degree of freedom
    low, high = sqrt(0.2) * exp(-half), sqrt(0.2) * exp(half)
    assert ratio_with_interval([0.4, 0.5]) == f"0.45 [{low:.2f}, {high:.2f}]"


def test_a_threshold_that_is_not_reached_is_said() -> None:
    curves = {"roll": [one.__dict__ for one in curve(0.5, 0.5, 0.5)], "TRL": [one.__dict__ for one in curve(0.1, 0.1)]}
    found = table([{"seed": 7, "threshold": 0.4, "curves": curves}])
    assert "| 7 | 20 | not reached |  | 120 | not reached |  | unequal steps | unequal steps |  |" in found
    assert found.count("none") == 3
    curves["TRL"] += [one.__dict__ for one in curve(0.1, 0.1, 0.2)[2:]]
    curves["TRL"][-1] = curves["TRL"][-1] | {"training_seconds": 40.0}
    found = table([{"seed": 7, "threshold": 0.4, "curves": curves}])
    assert "|  | 20 | 40 | 0.50 |" in found and found.endswith(": 0.50, no interval")


@pytest.mark.parametrize("until", [0.4, None])
def test_a_program_ends_at_the_threshold(until: float | None, tmp_path: Path) -> None:
    line = json.dumps({"step": 0, "accuracy": 0.5, "training_seconds": 1.0})
    says = f"import time; print('{line}\\n' * 3, flush=True); time.sleep({limits.PROCESS if until else 0})"
    side = Side("TRL", [sys.executable, "-c", says], PLACE, tmp_path, tmp_path / "TRL.out", until)
    for _ in range(int(20 * limits.PROCESS)):
        side.read()
        if len(side.curve) == 3:
            break
        time.sleep(0.05)
    assert side.process.wait(limits.PROCESS) == (-signal.SIGTERM if until else 0)
    assert side.ended is bool(until) and not side.failed


@pytest.mark.parametrize(("text", "score"), [("so 5", 1.0), ("5, or 6", 0.0), ("five", 0.0)])
def test_both_sides_score_alike(text: str, score: float) -> None:
    from benchmarks import trl_grpo

    assert trl_grpo.score(text, "5.0") == score


@pytest.mark.parametrize(("tokens", "responses"), [(65536, 128), (384, 1), (10**6, 512)])
def test_both_sides_have_as_large_micro_batches(tokens: int, responses: int) -> None:
    assert micro_batch_of(512, 384, tokens) == responses
