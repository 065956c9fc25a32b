"""A key that nothing reads would be a promise that nothing keeps."""

from __future__ import annotations

import ast

import pytest

from roll.config import schema
from roll.config.schema import Section
from roll.config.shipped import PACKAGE

SECTIONS = {name: kind for name, kind in vars(schema).items() if isinstance(kind, type) and issubclass(kind, Section) and kind is not Section}
GO_THROUGH = {
    "DeepSpeedConfig": {
        "wall_clock_breakdown",
        "communication_data_type",
        "data_types",
        "activation_checkpointing",
        "aio",
        "bf16",  # Merged with model_args.dtype in the dictionary, and compared by name, like the next five.
        "fp16",
        "gradient_clipping",
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
    },
    "ZeroOffload": {"pin_memory", "buffer_count", "fast_init", "ratio"},
}
"""Keys that DeepSpeed reads, from the dictionary that `model_dump` makes of its block (`roll/strategies/deepspeed_setup.py`)."""


def attributes_read() -> set[str]:
    """Names behind a dot, where a value is read, anywhere in the package but in the schema."""
    files = [file for file in PACKAGE.rglob("*.py") if file.name != "schema.py"]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_is_read(name: str) -> None:
    unread = set(SECTIONS[name].model_fields) - attributes_read()
    inherited = set().union(*(parent.model_fields for parent in SECTIONS[name].__mro__[1:] if issubclass(parent, Section)))
    assert unread - inherited == GO_THROUGH.get(name, set())


def test_what_goes_through_reaches_deepspeed() -> None:
    tree = ast.parse((PACKAGE / "strategies" / "deepspeed_setup.py").read_text(encoding="utf-8"))
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "deepspeed_config"]
    assert any(isinstance(node, ast.Attribute) and node.attr == "model_dump" for node in ast.walk(function))
