"""Every shipped experiment composes, loads and plans, and its dry run imports no heavy package and writes nothing."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from roll.config.load.compose import compose
from roll.config.load.loader import ConfigWarning, checked_config
from roll.config.plan.plan import Plan, make_plan
from roll.config.schema.foreign_names import VARIABLES
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.shipped import deepspeed_presets, examples_folder, experiments, preset_names
from tests import limits

HEAVY = ("torch", "ray", "transformers", "vllm", "deepspeed", "datasets")
DRY_RUNS = f"""
import contextlib, io, json, os, sys
from roll.pipeline import main
for name in sys.argv[1:]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = main(["--config-name", name, "dry_run=true"])
    heavy = [module for module in {HEAVY} if module in sys.modules]
    print(json.dumps([status, printed.getvalue(), heavy, os.listdir()]))
"""


@dataclass(frozen=True)
class DryRun:
    """Result of a dry run, and its traces in the process and in the working directory."""

    status: int
    printed: str
    heavy: list[str]
    """Modules of `HEAVY` that this dry run, or an earlier one in the same process, had imported."""
    written: list[str]


def planned(*words: str) -> tuple[Config, Plan]:
    jobs: list[tuple[Config, Plan]] = []

    def check(composed: DictConfig, presets: set[str]) -> None:
        config = checked_config(composed, presets)
        jobs.append((config, make_plan(config)))

    compose(["--config-name", *words, "dry_run=true"], check)
    (job,) = jobs
    return job


def texts(value: Any) -> Iterator[str]:
    """Yield every string in nested mappings and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts(item)


def lay_inputs(config: Config) -> None:
    """Write into the working directory the local files that an experiment reads: data files, judge templates, and
    models.
    """
    model = (examples_folder() / "models" / "Qwen" / "Qwen2.5-0.5B" / "config.json").read_text()
    for name in texts(config.model_dump(exclude={"output_dir"})):
        path = Path(name)
        if path.parts[:1] in (("data",), ("output",), ("models",)) and path.parts[1:]:
            file, text = (path, "{response}") if path.suffix else (path / "config.json", model)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)


@cache
def planned_without_inputs(name: str) -> tuple[Config, Plan]:
    """Return an experiment's configuration and plan in an empty folder."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return planned(name)


@pytest.mark.parametrize("name", experiments())
def test_an_example_plans_without_a_warning(
    name: str, recwarn: pytest.WarningsRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its data files and models, the plan only warns about those files; with them, it has no warnings."""
    config, plan = planned_without_inputs(name)
    monkeypatch.chdir(tmp_path)
    assert [warning for warning in plan.warnings if ": there is no f" not in warning] == []
    lay_inputs(config)
    config, plan = planned(name)
    assert plan.warnings == ()
    assert [str(warning.message) for warning in recwarn] == []
    assert plan.roles
    step, update = plan.batch.sequences_per_step, plan.batch.sequences_per_update
    assert step % update == 0
    assert config.output_dir


@pytest.fixture(scope="module")
def dry_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DryRun]:
    """Return the dry run of each experiment. All ran in one process and in one folder, which was empty at the start."""
    command, environment = (
        [sys.executable, "-c", DRY_RUNS, *experiments()],
        {"PYTHONPATH": str(examples_folder().parent), "PATH": ""},
    )
    folder = tmp_path_factory.mktemp("dry_runs")
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=limits.PROCESS, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return {name: DryRun(*json.loads(line)) for name, line in zip(experiments(), done.stdout.splitlines(), strict=True)}


@pytest.mark.parametrize("name", experiments())
def test_dry_run_imports_nothing_heavy_and_writes_nothing(name: str, dry_runs: dict[str, DryRun]) -> None:
    run = dry_runs[name]
    assert (run.status, run.heavy, run.written) == (0, [], [])
    assert "Roles" in run.printed


def test_presets_are_root_keys_named_as_their_files() -> None:
    from omegaconf import OmegaConf

    for name in preset_names():
        file = examples_folder() / "config" / f"{name}.yaml"
        keys = set(OmegaConf.load(file)) - {"defaults"}
        if name in deepspeed_presets():
            assert OmegaConf.load(file) == {"defaults": [f"presets/{name}@{name}"]}
        else:
            assert keys <= set(VARIABLES), "only variables of ROLL may be unused in a file"
        assert ": auto" not in file.read_text(), "a key with the value auto is superfluous"
    assert {
        "deepspeed_zero",
        "deepspeed_zero1",
        "deepspeed_zero2",
        "deepspeed_zero3",
        "deepspeed_zero3_cpuoffload",
    } <= preset_names()


def test_main_example_runs_one_update_on_sixteen_devices() -> None:
    config, plan = planned("rlvr_lora_zero3")
    assert isinstance(config, RlvrConfig)
    assert (plan.batch.sequences_per_step, plan.batch.sequences_per_update, plan.batch.updates) == (512, 512, 1)
    assert plan.roles["actor_train"].ranks == 16
    assert plan.roles["actor_infer"].all_devices == frozenset(range(12))
    assert plan.nodes == 2
    assert plan.reference == "unused"
    assert "reference" not in plan.roles
    assert list(config.rewards) == ["math_rule", "crossthinkqa", "ifeval", "code_sandbox", "llm_judge"]
    assert plan.roles["rewards.llm_judge"].all_devices == frozenset(range(12, 16))
    assert [warning for warning in plan.warnings if "there is no file" not in warning] == []


@pytest.mark.parametrize(
    "name", [name for name in experiments() if name.startswith("qwen2.5") and "offload_all" not in name]
)
def test_a_snippet_of_roll_merges_over_an_example(name: str) -> None:
    """Merges the `actor_train` block of ROLL's DeepSpeed documentation over roll's.

    The `offload_all` examples are left out, because they offload activations, which needs recomputation.
    """
    snippet = ["attn_implementation=sdpa", "disable_gradient_checkpointing=true", "dtype=bf16", "model_type=null"]
    with pytest.warns(ConfigWarning):
        config, _ = planned(
            name, *(f"actor_train.model_args.{key}" for key in snippet), "actor_train.training_args.num_train_epochs=50"
        )
    assert isinstance(config, RlvrConfig)
    assert config.actor_train.model_args.gradient_checkpointing == "none"


def test_a_variant_holds_what_differs() -> None:
    config, plan = planned("rlvr_zero3_cpuoffload")
    assert isinstance(config, RlvrConfig)
    assert config.actor_train.model_args.lora_target is None
    offload = config.actor_train.strategy_args.strategy_config.zero_optimization.offload_optimizer
    assert offload is not None
    assert offload.device == "cpu"
    assert config.rollout_batch_size == 64
    assert plan.reference == "role"
