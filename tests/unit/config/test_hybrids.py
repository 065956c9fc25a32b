"""Hybrid models such as Qwen3.5 in the plan: parameters, states, refused settings, and missing kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from roll.config.derived.model_shape import ModelShape, shape_of
from roll.config.derived.placement import place
from roll.config.plan.memory import estimate
from roll.config.schema.model import ModelConfig
from roll.config.schema.roles import ActorInferConfig
from roll.errors import ConfigError
from roll.models.load import add_lora
from tests.hybrids import SHAPE, write_hybrid
from tests.unit.config.test_examples import planned

TARGETS = ["all-linear", "q_proj,o_proj,in_proj_qkv,out_proj"]
TINY = ("tiny/tiny_rlvr_lora_zero3", "~validation", "eval_steps=0")
BF16 = ("actor_infer.model_args.dtype=bf16", "weight_sync.lora=merged")
NO_PREFIXES = "+actor_infer.strategy_args.strategy_config.enable_prefix_caching=false"


def counted(model: torch.nn.Module, part: str = "") -> int:
    return sum(parameter.numel() for name, parameter in model.named_parameters() if part in name)


def published(kind: str) -> PreTrainedModel:
    """Return a model of transformers' default sizes (those of Qwen3.5-9B or Qwen3.5-35B-A3B) on the meta device,
    without memory.
    """
    with torch.device("meta"):
        if kind == "dense":
            return Qwen3_5ForCausalLM(Qwen3_5TextConfig())
        return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig())


def shape(model: PreTrainedModel) -> ModelShape:
    found = shape_of(model.config.to_dict())
    assert found
    return found


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("target", TARGETS)
def test_parameters_are_those_of_transformers_and_peft(kind: str, target: str) -> None:
    model = published(kind)
    assert shape(model).parameters == counted(model)
    with torch.device("meta"):
        adapted = add_lora(model, ModelConfig.model_validate({"lora_target": target, "lora_rank": 4}), seed=0)
    assert shape(model).adapter_parameters(target, 4) == counted(adapted, "lora_")


def test_multimodal_model_has_shape_of_text_model() -> None:
    text: dict[str, Any] = SHAPE | {"intermediate_size": 128}
    seeing = Qwen3_5Config(text_config=text, tie_word_embeddings=True).to_dict()
    plain = Qwen3_5TextConfig(**text).to_dict()
    assert shape_of(seeing) == shape_of(plain | {"tie_word_embeddings": seeing["text_config"]["tie_word_embeddings"]})


def test_hybrid_kv_cache_and_states_are_estimated_separately() -> None:
    found = shape(published("dense"))
    assert (found.attention_layers, found.delta and found.delta.layers) == (8, 24)
    keys = 2 * 2 * 8 * 4 * 256
    assert found.kv_bytes(2, 1) == keys
    # In each of 24 layers: 32 heads of 128 x 128 in fp32, and 3 tokens of 2 x 16 x 128 + 32 x 128 channels in bf16.
    states = 24 * (4 * 32 * 128 * 128 + 2 * 3 * 8192)
    assert found.delta and found.delta.state_bytes(2, 1) == states
    role = ActorInferConfig.model_validate(
        {"strategy_args": {"strategy_name": "vllm", "strategy_config": {}}, "device_mapping": (0,)}
    )
    assert estimate(place("actor_infer", role, 2048), role, found, 2048).device["kv_cache"] == 2048 * keys + states
    assert found.attending_flops == 4 * 8 * 16 * 256


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"pretrain={write_hybrid(tmp_path_factory.mktemp('hybrid') / 'model')}"


@pytest.mark.parametrize(
    ("words", "place_of_it", "said", "remedy"),
    [
        (
            ["++deepspeed_zero3.sequence_parallel_size=2"],
            "actor_train.strategy_args.strategy_config.sequence_parallel_size",
            "2, but 3 of the model's 4 layers",
            "remove it",
        ),
        (
            ["++deepspeed_zero3.tensor_parallel.autotp_size=2", "deepspeed_zero3.zero_optimization.stage=2"],
            "actor_train.strategy_args.strategy_config.tensor_parallel.autotp_size",
            "3 of the model's 4 layers",
            "remove it: ZeRO-3",
        ),
        ([NO_PREFIXES], "actor_infer.model_args.dtype", "fp32, but on the CPU", "hf_infer"),
        ([NO_PREFIXES], "weight_sync.lora", "adapter, but on the CPU", "merged"),
        (
            [*BF16],
            "actor_infer.strategy_args.strategy_config.enable_prefix_caching",
            "true, but",
            "set it to false",
        ),
    ],
)
def test_hybrid_refuses_unsupported_settings(
    hybrid: str, words: list[str], place_of_it: str, said: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(*TINY, hybrid, *words)
    (fault,) = [fault for fault in refused.value.faults if fault.place == place_of_it and said in fault.problem]
    assert fault.code == "not_supported" and remedy in fault.remedy


def said(words: list[Any]) -> str:
    return " ".join([*planned(*words)[1].notes, *planned(*words)[1].warnings])


def test_plan_warns_of_missing_kernels_and_packages(hybrid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*TINY, hybrid, *BF16, NO_PREFIXES]
    there: set[str] = set()
    for module in ("roll.config.load.on_disk", "roll.engines.vllm.checks"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: name if name in there else None)
    slow = "actor_train, reference: transformers runs the gated-delta layers"
    assert slow in said(words) and "install flash-linear-attention" in said(words)
    assert "strategy_name: vllm, but" in said(words) and "package torchvision" in said(words)
    there |= {"fla", "torchvision"}
    assert "set device_mapping, and dtype bf16" in said(words) and "torchvision" not in said(words)
    on_gpus = ["actor_train", "reference"]
    devices = [f"++{name}.device_mapping=[0]" for name in [*on_gpus, "actor_infer"]]
    sizes = [f"~{name}.world_size" for name in [*on_gpus, "actor_infer"]]
    bf16 = [f"{name}.model_args.dtype=bf16" for name in on_gpus]
    assert "gated-delta layers" not in said(
        [*words, *devices, *sizes, *bf16, "actor_train.training_args.per_device_train_batch_size=256"]
    )


def test_plain_models_need_none_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 320,
        "intermediate_size": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(plain | {"num_attention_heads": 2}))
    monkeypatch.setattr("roll.config.load.on_disk.find_spec", lambda name: None)
    assert "gated-delta layers" not in said([*TINY, f"pretrain={tmp_path}"])
