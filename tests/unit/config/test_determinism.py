"""`deterministic: true`: its requirements on other keys, and its settings in the worker processes."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from roll.pipeline import main
from roll.runs.early_processes import worker_environment
from tests import limits

GPUS = ("--config-name", "rlvr_zero3", "dry_run=true", "deterministic=true")
INVARIANT = "actor_infer.strategy_args.strategy_config.batch_invariant=true"
EAGER = ("actor_train.model_args.compile_layers=false", "reference.model_args.compile_layers=false")
WITHOUT_ONE = """
import torch
from roll.backend_settings import choose_algorithms
choose_algorithms(True)
assert torch.are_deterministic_algorithms_enabled()
assert torch.backends.cudnn.conv.fp32_precision != "tf32"
assert not torch.backends.cudnn.allow_tf32
torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2))
"""


def test_deterministic_run_refuses_compiled_layers_with_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(GPUS) == 2
    said = capsys.readouterr().err
    for role in ("actor_train", "reference"):
        assert f'{role}.model_args.compile_layers: "auto", ' in said
        assert f"set {role}.model_args.compile_layers=false" in said
    assert main([*GPUS, *EAGER, "async_generation_ratio=1", "actor_infer.device_mapping=[16,17]"]) == 0
    said = capsys.readouterr().err
    warned = [line.rpartition("; set ")[2] for line in said.splitlines() if line.startswith("warning: deterministic: ")]
    assert warned == ["actor_infer.generating_args.seeded=true", INVARIANT, "async_generation_ratio=0"]
    assert main([*GPUS, *EAGER, "actor_infer.generating_args.seeded=true", INVARIANT]) == 0
    assert "deterministic" not in capsys.readouterr().err


def test_deterministic_cpu_dry_run_succeeds() -> None:
    assert main(["--config-name", "tiny/tiny_sft", "dry_run=true", "deterministic=true"]) == 0


def test_deterministic_processes_get_cublas_workspace_variable() -> None:
    plan: Any = SimpleNamespace(environment={})
    config: Any = SimpleNamespace(deterministic=True, system_envs={})
    assert worker_environment(plan, config, {}) == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert worker_environment(plan, config, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}) == {
        "CUBLAS_WORKSPACE_CONFIG": ":16:8"
    }
    config.deterministic = False
    assert worker_environment(plan, config, {}) == {}


def test_an_operation_without_a_deterministic_algorithm_is_named() -> None:
    command = [sys.executable, "-c", WITHOUT_ONE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limits.PROCESS, check=False)
    assert done.returncode != 0 and re.search("put_ .* deterministic", done.stderr)
