"""Every shipped experiment composes, loads and plans, and its dry run is light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig

from roll.config.compose import compose
from roll.config.loader import load_config
from roll.config.plan import Plan, make_plan
from roll.config.schema import Config, RlvrConfig
from roll.config.shipped import examples_folder, experiments, preset_names
from tests import limits

HEAVY = ("torch", "ray", "transformers", "vllm", "deepspeed", "datasets", "numpy")
DRY_RUN = f"""
import sys
from roll.pipeline.__main__ import main
status = main(sys.argv[1:])
print("heavy:", [name for name in {HEAVY} if name in sys.modules])
sys.exit(status)
"""


def planned(*words: str) -> tuple[Config, Plan]:
    jobs: list[tuple[Config, Plan]] = []

    def check(composed: DictConfig, presets: set[str]) -> None:
        config = load_config(composed, presets)
        jobs.append((config, make_plan(config)))

    compose(["--config-name", *words, "dry_run=true"], check)
    (job,) = jobs
    return job


@pytest.mark.parametrize("name", experiments())
def test_an_example_plans_without_a_warning_about_its_keys(name: str, recwarn: pytest.WarningsRecorder) -> None:
    config, plan = planned(name)
    assert [str(warning.message) for warning in recwarn] == []
    assert plan.roles
    step, update = plan.batch.sequences_per_step, plan.batch.sequences_per_update
    assert step % update == 0
    assert not any("unknown" in warning for warning in plan.warnings)
    assert config.output_dir


@pytest.mark.parametrize("name", experiments())
def test_a_dry_run_imports_nothing_heavy_and_writes_nothing(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", DRY_RUN, "--config-name", name, "dry_run=true"]
    package = str(examples_folder().parent)
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=limits.PROCESS, env={"PYTHONPATH": package, "PATH": ""}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "heavy: []" in done.stdout
    assert "Roles" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_presets_are_root_keys_named_as_their_files() -> None:
    from omegaconf import OmegaConf

    for name in preset_names():
        file = examples_folder() / "config" / f"{name}.yaml"
        assert list(OmegaConf.load(file)) == [name]
        assert ": auto" not in file.read_text(), "a key that is auto says nothing"
    assert {"deepspeed_zero", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "deepspeed_zero3_cpuoffload"} <= preset_names()


def test_the_main_example_runs_one_update_on_sixteen_devices() -> None:
    config, plan = planned("rlvr_lora_zero3")
    assert isinstance(config, RlvrConfig)
    assert (plan.batch.sequences_per_step, plan.batch.sequences_per_update, plan.batch.updates_per_step) == (512, 512, 1)
    assert plan.roles["actor_train"].ranks == 16
    assert plan.roles["actor_infer"].all_devices == frozenset(range(12))
    assert plan.nodes == 2
    assert plan.reference == "unused"
    assert "reference" not in plan.roles


def test_a_variant_holds_what_differs() -> None:
    config, plan = planned("rlvr_zero3_cpuoffload")
    assert isinstance(config, RlvrConfig)
    assert config.actor_train.model_args.lora_target is None
    offload = config.actor_train.strategy_args.strategy_config.zero_optimization.offload_optimizer
    assert offload is not None
    assert offload.device == "cpu"
    assert config.rollout_batch_size == 64
    assert plan.reference == "role"
