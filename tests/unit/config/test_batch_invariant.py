"""The key `batch_invariant` of vLLM: what is refused with it, and what the engine's process gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roll.config.derived.model_shape import read_shape
from roll.engines.vllm.checks import vllm_faults
from tests import limits
from tests.faults import coded
from tests.unit.config.small_shape import write_shape
from tests.unit.config.test_model_rewards import experiment

PLACE = "actor_infer.strategy_args.strategy_config.batch_invariant"
CORRECTED = {"behaviour_log_probs": "trainer", "mismatch_correction": "tis"}
STARTED = """
import os, sys
from importlib import import_module
from roll.engines.vllm import fork_server
from roll.engines.vllm.settings import VllmConfig
fork_server.forkserver.ensure_running = lambda: print(
    os.environ["VLLM_BATCH_INVARIANT"], import_module("torch._inductor.config").deterministic
)
VllmConfig.model_validate({"batch_invariant": sys.argv[1] == "true"}).start_fork_server(on_cpu=False)
"""


def found(tmp_path: Path, engine: dict[str, Any], *, on_gpu: bool = True, **keys: Any) -> Any:
    """Return the faults of the engine, as codes with places."""
    role: dict[str, Any] = {"strategy_args": {"strategy_name": "vllm", "strategy_config": engine}}
    role |= {"device_mapping": range(4)} if on_gpu else {}
    config = experiment({"world_size": 1}, "math_rule", actor_infer=role, **({"time_sharing": False} | keys))
    write_shape(tmp_path)
    shape, infer = read_shape(tmp_path / "config.json"), config.actor_infer
    return coded([*vllm_faults(infer.strategy_args.strategy_config, "actor_infer", infer, config, shape)])


@pytest.mark.parametrize(
    ("engine", "given", "refused"),
    [
        ({}, {}, False),
        ({"tensor_parallel_size": 2}, {}, False),
        ({"quantization": "fp8"}, CORRECTED, True),
        ({"speculative": {"method": "ngram"}}, {}, True),
        ({}, {"on_gpu": False}, True),
    ],
)
def test_what_is_refused(engine: dict[str, Any], given: dict[str, Any], refused: bool, tmp_path: Path) -> None:
    assert found(tmp_path, engine | {"batch_invariant": True}, **given) == (
        [("not_supported", PLACE)] if refused else []
    )
    assert not any(place == PLACE for _, place in found(tmp_path, engine, **given))


def test_other_graphs_are_refused(tmp_path: Path) -> None:
    engine = {"engine_args": {"compilation_config": {"cudagraph_mode": "FULL"}}}
    place = PLACE.replace("batch_invariant", "engine_args.compilation_config")
    assert found(tmp_path, engine) == []
    assert found(tmp_path, engine | {"batch_invariant": True}) == [("not_supported", place)]


@pytest.mark.parametrize("inherited", ["0", "1"])
@pytest.mark.parametrize(("key", "read"), [("true", ["1", "True"]), ("false", ["0", "False"])])
def test_the_key_decides_whatever_the_process_inherited(inherited: str, key: str, read: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTED, key],
        env=os.environ | {"VLLM_BATCH_INVARIANT": inherited},
        capture_output=True,
        text=True,
        timeout=limits.PROCESS,
        check=True,
    )
    assert done.stdout.split() == read
