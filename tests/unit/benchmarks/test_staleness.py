"""The benchmark of staleness: the accuracy that it reports for a run, the table, and the plans of its variants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.intervals import Sample
from benchmarks.staleness import ON_GPU, VARIANTS, arguments, figure, figures, run_folder, table_of
from roll.config.derived.placement import interrupting
from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.plan.plan import make_plan
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig


def write(folder: Path, accuracies: dict[int, float], steps: int) -> None:
    folder.mkdir(parents=True)
    lines = [
        {"step": step} | ({"val/heldout/pass@1": accuracies[step]} if step in accuracies else {})
        for step in range(steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_staleness_run_is_judged_by_last_three_validations(tmp_path: Path) -> None:
    write(tmp_path / "run", {0: 0.1, 5: 0.2, 10: 0.5, 15: 0.6, 20: 0.7}, 20)
    assert figure(tmp_path / "run", 20) == pytest.approx(60.0)
    assert figure(tmp_path / "run", 25) is None
    assert figure(tmp_path / "nowhere", 20) is None


def test_the_table_compares_with_synchronous_runs_by_intervals(tmp_path: Path) -> None:
    for name, seed, accuracy in (
        ("synchronous", 0, 0.8),
        ("synchronous", 10, 0.7),
        ("ratio_1", 0, 0.75),
        ("ratio_1_corrected", 0, 0.65),
    ):
        write(run_folder(tmp_path, name, seed, None), {5: accuracy, 10: accuracy, 15: accuracy}, 15)
    found = figures(tmp_path, 15, None)
    assert {name: [round(value) for value in values] for name, values in found.items()} == {
        "synchronous": [80, 70],
        "ratio_1": [75],
        "ratio_1_corrected": [65],
    }
    lines = table_of({name: Sample.of(values) for name, values in found.items()}).splitlines()[2:]
    # Two values 10 apart: standard deviation sqrt(50), interval 12.706 * 5.
    assert lines == [
        "| `synchronous` | 75.0 [11.5, 138.5] | 7.1 | 2 |  |",
        "| `ratio_1` | 75.0, no interval |  | 1 | +0.0, no interval |",
        "| `ratio_1_corrected` | 65.0, no interval |  | 1 | -10.0, no interval |",
    ]
    assert figures(tmp_path, 15, device=0) == {}


@pytest.mark.parametrize("name", VARIANTS)
def test_staleness_variants_plan_equal_numbers_of_samples(name: str) -> None:
    device = 0 if name in ON_GPU else None
    module, command, *words = arguments(name, 3, 30, Path("run"), Path("world"), device)
    assert (module, command) == ("-m", "roll.pipeline")
    loaded: list[Config] = []
    compose([*words, "dry_run=true"], lambda composed, presets: loaded.append(checked_config(composed, presets)))
    [config] = loaded
    assert isinstance(config, RlvrConfig)
    plan = make_plan(config)
    assert plan.batch.sequences_per_step == 512 and plan.batch.updates == 2
    assert bool(interrupting(config)) == (name in ON_GPU)
    assert ("actor_infer" in plan.turns) == (name == "partial_turns")
