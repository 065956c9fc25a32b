"""Invalid or unsupported keys for mixtures of experts: exit status 2, with place, value and remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

KEY = "actor_train.training_args.router_aux_loss_coef"
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("overrides", "place", "value", "remedy"),
    [
        ([f"+{KEY}=0.001"], KEY, "0.001, but the model has no experts", "remove it"),
        ([f"+{KEY}=-1"], KEY, "-1", "at least 0"),
        (
            [f"+{KEY}=0.001", "actor_train.model_args.dtype=fp16"],
            KEY,
            "dtype is fp16",
            "actor_train.model_args.dtype to bf16",
        ),
        (
            [f"+{KEY}=0", "+deepspeed_zero3.sequence_parallel_size=2", "+actor_train.world_size=2"],
            KEY,
            "sequence_parallel_size is 2",
            "set only one of the two",
        ),
    ],
)
def test_the_routers_loss(
    refused: Callable[..., str], overrides: list[str], place: str, value: str, remedy: str
) -> None:
    message = refused(*overrides)
    lines = message.split("\n  ")
    said = ["\n".join(lines[index : index + 2]) for index, line in enumerate(lines) if f"{place}:" in line]
    assert any(value in one and remedy in one for one in said), message


@pytest.fixture
def experts(tiny_model: Path, tmp_path: Path) -> Path:
    """Return a copy of the tiny model's folder whose configuration is that of a mixture of experts."""
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | EXPERTS))
    return tmp_path


def test_adapters_that_the_engine_cannot_take(refused: Callable[..., str], experts: Path) -> None:
    message = refused(
        f"pretrain={experts}", "+actor_train.model_args.lora_target='q_proj,v_proj'", "+weight_sync.lora=adapter"
    )
    assert "weight_sync.lora: adapter, but" in message and "mixture of experts" in message
    assert "set it to merged" in message


def test_dropout_of_an_adapter_on_experts(refused: Callable[..., str], experts: Path) -> None:
    adapter = ["+actor_train.model_args.lora_target=all-linear", "+actor_train.model_args.lora_dropout=0.1"]
    message = refused(f"pretrain={experts}", *adapter)
    assert "actor_train.model_args.lora_dropout: 0.1, but lora_target all-linear" in message
    assert "lora_target to q_proj,k_proj,v_proj,o_proj" in message
