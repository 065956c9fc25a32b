"""A further engine is one folder and one line, and is planned by its own traits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from roll.config.schema.backend import EngineMemory, StrategyConfig
from roll.config.schema.strategies import strategies
from tests import limits

ROOT = Path(__file__).parents[3]
SETTINGS = """
from typing import Literal

from roll.config.schema.backend import BackendTraits, EngineMemory, StrategyConfig
from roll.config.schema.base import Fraction, PositiveInt, StrictConfig


class ThirdConfig(StrictConfig):
    tensor_parallel_size: PositiveInt = 1
    memory_fraction: Fraction | None = 0.8

    def build(self, rank):
        from third_engine.strategy import ThirdGenerate

        return ThirdGenerate()


class ThirdStrategyConfig(StrategyConfig):
    strategy_name: Literal["third"]
    strategy_config: ThirdConfig

    @property
    def traits(self):
        keys = self.strategy_config
        return BackendTraits(
            batches_by_tokens=False,
            own_kernels=True,
            devices_per_rank=keys.tensor_parallel_size,
            most_requests=64,
            memory=EngineMemory(keys.memory_fraction, "memory_fraction", cpu_cache=2**20)
            if keys.memory_fraction
            else None,
        )

    def generate_settings(self, model, context, adapter_rank, keeps_kv_cache):
        return self.strategy_config
"""
STRATEGY = "class ThirdGenerate:\n    pass\n"
PROGRAM = """
import json, sys

from roll.config.schema.backend import BACKENDS

BACKENDS.append("third_engine.settings")  # the one line

from roll.config.plan.plan import make_plan
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import ConfigError

config = RlvrConfig.model_validate_json(sys.argv[1])
try:
    plan = make_plan(config)
except ConfigError as error:
    print(json.dumps([fault.place for fault in error.faults]))
else:
    role, memory = plan.roles["actor_infer"], plan.memory["actor_infer"]
    settings = config.actor_infer.strategy_args.generate_settings(None, 64, None, False)
    found = (role.devices, role.tokens_per_microbatch, memory.device, memory.reserved_fraction, memory.host)
    print(json.dumps([*found, type(settings.build(None)).__name__]))
"""
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 320,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
PARAMETERS = 2 * 320 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64
"""Embedding and head: 2 x 320 x 64. Each of 2 layers: q and o 2 x 64 x 64, k and v 2 x 64 x 32, MLP 3 x 64 x 128, norms
2 x 64. Last norm: 64.
"""


def planned(folder: Path, infer: list[int], train: list[int], **keys: Any) -> Any:
    """Return what the program prints for an `actor_infer` on a third engine with 4 devices per rank.

    `engine` has further keys of the engine, `trained` further keys of the trained role.
    """
    engine, model = folder / "third_engine", folder / "model"
    for made in (engine, model):
        made.mkdir()
    (engine / "settings.py").write_text(SETTINGS, encoding="utf-8")
    (engine / "strategy.py").write_text(STRATEGY, encoding="utf-8")
    (model / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    zero = {"strategy_name": "deepspeed_train", "strategy_config": {"zero_optimization": {"stage": 3}}}
    third = {"strategy_name": "third", "strategy_config": {"tensor_parallel_size": 4, **keys.pop("engine", {})}}
    rows = {"file_name": "x.jsonl", "prompt": "p"}
    values = {
        "exp_name": "e",
        "output_dir": str(folder / "run"),
        "pretrain": str(model),
        "max_steps": 1,
        "dry_run": True,
        "num_return_sequences_in_group": 8,
        "num_gpus_per_node": 12,
        "prompt_length": 16,
        "response_length": 48,
        "rewards": {"math_rule": {}},
        "actor_train": {"strategy_args": zero, "device_mapping": train, "data_args": rows, **keys.pop("trained", {})},
        "actor_infer": {"strategy_args": third, "device_mapping": infer},
    }
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))), "PYTHONSAFEPATH": "1"}
    words = [sys.executable, "-c", PROGRAM, json.dumps(values | keys)]
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, check=False, timeout=limits.PROCESS, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_third_engine_is_planned_by_its_traits(tmp_path: Path) -> None:
    devices, budget, memory, reserved, host, strategy = planned(tmp_path, list(range(12)), list(range(12)))
    assert devices == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert budget is None
    # Two bytes each, over 4 devices.
    # 64 tokens of keys and values in 2 layers: one of the 2 heads of size 16 on each device, as heads are not split.
    assert memory == {"weights": PARAMETERS * 2 // 4, "kv_cache": 64 * 2 * 2 * 16 * 2}
    assert reserved == 0.8
    # It does not discard weights, so they move to host memory while the trainer uses its devices.
    assert host == 4 * PARAMETERS * 2 // 4
    assert strategy == "ThirdGenerate"


def test_engine_without_reserved_memory_shards_its_weights(tmp_path: Path) -> None:
    found = planned(tmp_path, list(range(12)), list(range(12)), engine={"memory_fraction": None})
    _, budget, memory, reserved, host, _ = found
    assert (budget, reserved) == (None, 0)
    assert memory["weights"] == PARAMETERS * 2 // 4
    assert host == 4 * memory["weights"]


@pytest.mark.parametrize("block", strategies("generate_settings"), ids=lambda block: block.__name__)
def test_traits_name_keys_of_the_backend(block: type[StrategyConfig]) -> None:
    keys: Any = block.model_fields["strategy_config"].annotation
    (name,) = get_args(block.model_fields["strategy_name"].annotation)
    traits = block(strategy_name=name, strategy_config=keys()).traits
    if traits.devices_per_rank > 1 or isinstance(traits.memory, EngineMemory):
        assert traits.devices_key in keys.model_fields
    if isinstance(traits.memory, EngineMemory):
        assert traits.memory.fraction_key in keys.model_fields


def test_devices_that_are_no_whole_engines_are_refused(tmp_path: Path) -> None:
    assert planned(tmp_path, list(range(10)), [10, 11]) == ["actor_infer.device_mapping"]


def test_engine_that_cannot_pause_refuses_interruption(tmp_path: Path) -> None:
    assert planned(tmp_path, [0, 1, 2, 3], [0, 1, 2, 3], async_generation_ratio=1.0) == ["async_generation_ratio"]


def test_engine_without_adapters_takes_whole_weights(tmp_path: Path) -> None:
    adapter = {"model_args": {"lora_target": "all-linear", "lora_rank": 8}}
    assert planned(tmp_path, [0, 1, 2, 3], [4], trained=adapter) == ["weight_sync.lora"]


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("train_settings", {"DeepSpeedTrainStrategyConfig"}),
        ("score_settings", {"HfInferStrategyConfig", "DeepSpeedInferStrategyConfig"}),
        ("generate_settings", {"VllmStrategyConfig", "VllmServerStrategyConfig", "HfInferStrategyConfig"}),
        ("reward_settings", {"VllmStrategyConfig", "HfInferStrategyConfig"}),
    ],
)
def test_a_role_takes_strategies_with_its_method(method: str, names: set[str]) -> None:
    assert {block.__name__ for block in strategies(method)} == names
    assert all(issubclass(block, StrategyConfig) for block in strategies())
