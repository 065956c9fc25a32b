"""Exit status and last line of stderr, when the run succeeds and when it fails."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from roll.config.plan.plan import Plan
from roll.config.schema.pipelines import Config
from roll.errors import DataError, Fault, WorkerFailed
from roll.pipeline import main
from roll.tracking.life import ActivityDisplay

ENDS = [
    (None, 0, ""),
    (WorkerFailed("actor_train", 1, "CUDA out of memory"), 3, "actor_train rank 1: CUDA out of memory"),
    (DataError(Fault("train.jsonl:3", "no prompt", "add it", "missing")), 2, "    add it"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (ZeroDivisionError("a bug"), 3, "ZeroDivisionError: a bug"),
]


@pytest.mark.parametrize(("end", "status", "last_line"), ENDS, ids=[repr(end[0]) for end in ENDS])
def test_exit_status_and_last_line(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    end: BaseException | None,
    status: int,
    last_line: str,
) -> None:
    started: list[str] = []

    def run(config: Config, plan: Plan, life: ActivityDisplay) -> None:
        started.extend(plan.roles)
        if end:
            raise end

    assemble = ModuleType("roll.runs.assemble")
    assemble.run_experiment = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "roll.runs.assemble", assemble)
    assert main(["--config-path", "exp", "--config-name", "sound"]) == status
    assert started == ["actor_train", "actor_infer", "rewards.math_rule"]
    printed = capsys.readouterr()
    assert printed.err.rstrip("\n").split("\n")[-1] == last_line
    assert "actor_train" in printed.out
