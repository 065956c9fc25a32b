"""The comparison of recipes: its commands, how it recognises finished runs, and its table."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from benchmarks import algorithms
from benchmarks.algorithms import Run
from roll.algorithms.methods import ESTIMATORS
from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.plan.plan import make_plan
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig

FOLDER = Path("comparison")


@cache
def load(recipe: str) -> Config:
    """Return the configuration of the comparison's run of a recipe, with seed 3 and 30 steps."""
    module, name, *words = algorithms.arguments(recipe, 3, 30, FOLDER / recipe, FOLDER)
    assert (module, name) == ("-m", "roll.pipeline")
    loaded: list[Config] = []
    compose([*words, "dry_run=true"], lambda composed, presets: loaded.append(checked_config(composed, presets)))
    return loaded[0]


@pytest.mark.parametrize("recipe", algorithms.recipes())
def test_recipes_plan_equal_numbers_of_samples_per_step(recipe: str) -> None:
    config = load(recipe)
    assert isinstance(config, RlvrConfig)
    assert make_plan(config).batch.sequences_per_step == 512
    assert (config.exp_name, config.seed, config.max_steps, config.eval_steps) == (recipe, 3, 30, 30)
    assert config.pretrain == str(FOLDER / "warm-up" / "export")


def test_every_advantage_estimator_has_a_recipe() -> None:
    """Except for estimators that compare states of an environment: the tiny task has none, and `tiny_agent_gigpo`
    covers them.
    """
    configs = [load(recipe) for recipe in algorithms.recipes()]
    covered = {config.adv_estimator.name for config in configs if isinstance(config, RlvrConfig)}
    assert covered == {name for name, method in ESTIMATORS.items() if not method.traits.needs_states}


def write(folder: Path, *lines: dict[str, float]) -> None:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_run_is_finished_after_its_last_step(tmp_path: Path) -> None:
    first, second = {"step": 0, algorithms.ACCURACY: 0.5}, {"step": 1, "time/step": 2.0}
    write(tmp_path / "whole", first, second, {"step": 2, algorithms.ACCURACY: 0.75, "time/step": 3.0})
    write(tmp_path / "half", first, second)
    assert algorithms.finished(tmp_path / "whole", 2) == (0.5, 0.75, 5.0)
    assert algorithms.finished(tmp_path / "half", 2) is None
    assert algorithms.finished(tmp_path / "none", 2) is None


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    assert len(algorithms.preparation(tmp_path)) == 3
    (tmp_path / "model").mkdir()
    (tmp_path / "warm-up" / "export").mkdir(parents=True)
    [command] = algorithms.preparation(tmp_path)
    assert command[0].endswith("make_problems.py")


RUNS = [Run("grpo", 0, 0.5, 0.6, 10), Run("grpo", 1, 0.5, 0.7, 20), Run("b", 0, 0.5, 0.9, 30)]


def test_the_table_by_hand() -> None:
    # Runs of grpo: mean 65, sample standard deviation sqrt(50) = 7.07. The interval's half is 12.706 * 5 = 63.5.
    head, _, best, other = algorithms.table_of(RUNS, 30).splitlines()
    assert "after 30 steps" in head
    assert best == "| `b` | 50.0 | 90.0 | 40.0, no interval | +25.0, no interval | 1 | 30 |"
    assert other == "| `grpo` | 50.0 ± 0.0 | 65.0 ± 7.1 | 15.0 [-48.5, 78.5] |  | 2 | 15 |"
    assert "minus" not in algorithms.table_of(RUNS[2:], 30).splitlines()[2]


def test_the_page_has_the_marks() -> None:
    page = (algorithms.EXAMPLES.parent / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert page.count(algorithms.PLACE.begin) == page.count(algorithms.PLACE.end) == 1
