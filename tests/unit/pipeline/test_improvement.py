"""The best checkpoint by a metric of the held-out sets, and the early end of a run."""

from __future__ import annotations

import asyncio
from math import nan
from pathlib import Path
from typing import Any

import pytest

from roll.config.derived.held_out import held_out_metrics
from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.plan.plan import make_plan
from roll.config.schema.pipelines import Config
from roll.errors import ConfigError
from roll.runs.checkpoint.store import CheckpointStore
from roll.runs.checkpointer import Checkpointer
from roll.runs.position import Position
from tests.faults import coded
from tests.unit.pipeline.test_checkpointer import Trainer

LOSS = "val/heldout/loss"
KEEP = f"keep_best={{metric: {LOSS}}}"
STOP = f"early_stopping={{metric: {LOSS}, patience: 2, min_delta: 0.1}}"


def configured(*words: str) -> Config:
    loaded: list[Config] = []
    own = ["eval_steps=1", "++validation.name=heldout", *words]
    if not any(word.startswith("--config-name") for word in words):
        own = ["--config-name", "tiny/tiny_warm_up", "max_steps=50", *own]
    compose(own, lambda composed, presets: loaded.append(checked_config(composed, presets)))
    return loaded[0]


class Run:
    """A run of which only checkpoints and validations happen."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.trainer = Trainer()
        config = configured(f"output_dir={folder}", *words)
        self.checkpointer = Checkpointer(config, CheckpointStore(folder / "checkpoints", keep=1))
        self.step = asyncio.run(self.checkpointer.restore(self.trainer, self.trainer)).step
        self.folder = folder

    def go(self, *losses: float) -> None:
        """Take a step with each held-out loss. Nan is a step without a validation."""
        for loss in losses:
            self.step += 1
            self.checkpointer.observe(self.step, {} if loss != loss else {LOSS: loss, "reward/mean": 1.0})
            asyncio.run(self.checkpointer.save_if_due(Position(self.step, self.step)))

    def finish(self) -> None:
        asyncio.run(self.checkpointer.finish(Position(self.step, self.step)))

    @property
    def kept(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in (self.folder / "checkpoints").glob("step_*"))


def test_best_checkpoint_is_kept_beside_the_newest(tmp_path: Path) -> None:
    run = Run(tmp_path, KEEP, "save_steps=2")
    run.go(3.0, 2.0, 1.0)
    assert run.kept == [3], "a better one is written although it is not due, and replaces the others"
    run.go(1.5, nan, 1.5, 1.2)
    assert run.kept == [3, 6]
    assert run.checkpointer.best == f"{LOSS} 1 after step 3, {tmp_path}/checkpoints/step_3"
    run.finish()
    assert run.kept == [3, 7]


def test_best_checkpoint_survives_a_resumed_run(tmp_path: Path) -> None:
    first = Run(tmp_path, KEEP, "save_steps=2")
    first.go(1.0, 2.0, 2.0, 2.0)
    again = Run(tmp_path, KEEP, "save_steps=2")
    assert again.step == 4
    again.go(1.5, 1.5)
    assert again.kept == [1, 6]
    again.go(0.5)
    assert again.kept == [7]


def test_validation_before_training_has_no_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, KEEP)
    run.checkpointer.observe(0, {LOSS: 0.1})
    assert run.checkpointer.best == ""
    run.go(2.0)
    assert run.kept == [1]


def test_run_stops_after_validations_without_improvement(tmp_path: Path) -> None:
    run = Run(tmp_path, STOP)
    run.checkpointer.observe(0, {LOSS: 3.0})
    run.go(2.0, nan, 1.95)
    assert run.checkpointer.stopped_early == "", "one validation without an improvement by min_delta"
    run.go(nan, 2.0)
    assert run.checkpointer.stopped_early.startswith(f"stopped early at step 5: {LOSS} ")
    assert run.checkpointer.stopped_early.endswith("2 after step 1")
    run.finish()
    assert (tmp_path / "export" / "weights").is_file(), "the policy is exported as after the last step"


def test_an_improvement_begins_the_count_anew(tmp_path: Path) -> None:
    run = Run(tmp_path, STOP)
    run.go(2.0, 2.0, 1.0, 1.0, nan)
    assert run.checkpointer.stopped_early == ""
    run.go(1.0)
    assert run.checkpointer.stopped_early


def test_count_of_validations_survives_a_resumed_run(tmp_path: Path) -> None:
    first = Run(tmp_path, STOP, "save_steps=1")
    first.go(1.0, 1.0)
    again = Run(tmp_path, STOP, "save_steps=1")
    again.go(1.0)
    assert again.checkpointer.stopped_early
    assert not Run(tmp_path, STOP).checkpointer.is_finished(50), "it was killed before its export"
    again.finish()
    assert Run(tmp_path, STOP).checkpointer.is_finished(50)
    patient = Run(tmp_path, STOP.replace("patience: 2", "patience: 3"))
    assert not patient.checkpointer.is_finished(50)
    assert not Run(tmp_path, STOP.replace("loss", "perplexity")).checkpointer.stopped_early, "another metric"


def test_larger_values_are_better_for_rates(tmp_path: Path) -> None:
    run = Run(tmp_path, KEEP.replace("}", ", mode: max}"))
    run.go(1.0, 2.0, 1.5)
    assert run.kept == [2]


def test_first_validation_without_the_metric_ends_the_run(tmp_path: Path) -> None:
    checkpointer = Run(tmp_path, KEEP).checkpointer
    with pytest.raises(ConfigError) as caught:
        checkpointer.observe(1, {"val/heldout/perplexity": 1.0})
    assert coded(caught.value.faults) == [("not_found", "keep_best.metric")]
    assert "val/heldout/perplexity" in caught.value.faults[0].remedy
    checkpointer.observe(1, {LOSS: 1.0})
    checkpointer.observe(2, {"val/heldout/perplexity": 1.0})
    assert " after step 1," in checkpointer.best, "a later one is only no better"


@pytest.mark.parametrize("block", ["keep_best", "early_stopping"])
@pytest.mark.parametrize(
    ("words", "place", "code"),
    [(("eval_steps=0",), "", "no_effect"), (("validation.name=other",), ".metric", "unknown_name")],
)
def test_unknown_metric_is_a_fault_before_the_run(block: str, words: tuple[str, ...], place: str, code: Any) -> None:
    given = {"keep_best": KEEP, "early_stopping": STOP}[block]
    with pytest.raises(ConfigError) as caught:
        make_plan(configured("dry_run=true", given, *words))
    assert (code, f"{block}{place}") in coded(caught.value.faults)


def test_known_metrics_are_those_of_a_validation() -> None:
    config = configured("--config-name", "tiny/tiny_agent", "validation.generating_args.num_return_sequences=4")
    parts = "+rewards.arithmetic.parts={last_number: {}, length_penalty: {weight: 0.5}}"
    summed = configured("--config-name", "tiny/tiny_rlvr_lora_zero3", "eval_steps=1", parts)
    assert [name for name in held_out_metrics(summed) if "/mean" in name] == [
        "val/heldout/last_number/mean",
        "val/heldout/length_penalty/mean",
    ]
    assert set(held_out_metrics(config)) == {
        f"val/heldout/{name}"
        for name in (
            *("pass@1", "pass@2", "pass@4", "maj@2", "maj@4", "avg@4"),
            *("no_verdict_fraction", "length_mean", "length_max", "at_limit_fraction", "truncated_fraction"),
        )
    }
