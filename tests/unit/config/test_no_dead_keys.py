"""Every key of the configuration is read somewhere in the package, so that none is silently without effect."""

from __future__ import annotations

import ast
from typing import get_args

import pytest

from roll.algorithms.methods import ESTIMATORS, POLICY_LOSSES, PREFERENCE_LOSSES, readers
from roll.config.schema import model, offline, rlvr, roles
from roll.config.schema.base import StrictConfig
from roll.config.shipped import PACKAGE
from roll.training.deepspeed.settings import DeepSpeedConfig

MODULES = (model, offline, rlvr, roles)
SECTIONS = {
    kind.__name__: kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, StrictConfig)
}
COMPARED = {"bf16", "fp16", "gradient_clipping", "train_micro_batch_size_per_gpu", "train_batch_size"}
"""Keys that `roll/training/deepspeed/checks.py` reads by name, to compare them with the role's other keys."""
FIXED = {"zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"}
"""Keys that have only one allowed value, the one that roll uses."""
GO_THROUGH = {"wall_clock_breakdown", "communication_data_type", "data_types", "activation_checkpointing", "aio"}
"""Keys that DeepSpeed itself reads: `roll/training/deepspeed/setup.py` passes the whole `strategy_config` on to
DeepSpeed.
"""
EXCEPTIONS = {
    "DeepSpeedConfig": COMPARED | FIXED | GO_THROUGH,
    "ExperimentConfig": {"roll_defaults"},  # Read before the schema sees the values.
    "ZeroOffloadConfig": {"pin_memory", "buffer_count", "fast_init", "ratio"},  # Also passed on to DeepSpeed.
}


def tree_of(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def attributes_read() -> set[str]:
    """Return the attribute names that the package reads outside the schema, and the keys that methods declare."""
    files = [file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py") if file.parent.name != "schema"]
    nodes = (node for file in files for node in ast.walk(tree_of(file)))
    declared = {key for table in (ESTIMATORS, POLICY_LOSSES, PREFERENCE_LOSSES) for key in readers(table)}
    return declared | {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_is_read(name: str, attributes_read: set[str]) -> None:
    unread = set(SECTIONS[name].model_fields) - attributes_read
    inherited = set().union(
        *(parent.model_fields for parent in SECTIONS[name].__mro__[1:] if issubclass(parent, StrictConfig))
    )
    assert unread - inherited == EXCEPTIONS.get(name, set())


def test_dead_key_exceptions_hold_as_documented() -> None:
    compared = {
        node.value for node in ast.walk(tree_of("training/deepspeed/checks.py")) if isinstance(node, ast.Constant)
    }
    assert compared >= COMPARED
    for key in FIXED:
        literal, nothing = get_args(DeepSpeedConfig.model_fields[key].annotation)
        assert len(get_args(literal)) == 1 and nothing is type(None)
    setup = [node for node in tree_of("training/deepspeed/setup.py").body if isinstance(node, ast.FunctionDef)]
    (whole,) = [node for node in setup if node.name == "engine_config"]
    assert "config.model_dump(exclude_none=True)" in ast.unparse(whole)
