"""Shapes of the models that come with roll: parameter counts, against transformers' own models and against published
counts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from roll.config.derived.model_shape import Experts, ModelShape, config_file, read_shape, shape_of
from roll.config.derived.placement import place
from roll.config.plan.memory import estimate, layer_activations
from roll.config.schema.model import ModelConfig
from roll.config.schema.roles import ActorInferConfig
from roll.config.shipped import MODELS, examples_folder
from roll.models.load import add_lora

FOLDER = examples_folder() / MODELS
NAMES = sorted(file.parent.relative_to(FOLDER).as_posix() for file in FOLDER.rglob("config.json"))
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
}
"""Parameter counts that the Hugging Face Hub shows for the models' files."""


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty cache, so that shapes only come from the shipped files."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))


def shape(name: str) -> ModelShape:
    file = config_file(name)
    found = read_shape(file) if file else None
    assert found
    return found


def small(name: str) -> tuple[ModelShape, torch.nn.Module]:
    """Return a model with two layers: its shape in roll, and the model that transformers builds, without memory for its
    weights.
    """
    values = json.loads((FOLDER / name / "config.json").read_text()) | {"num_hidden_layers": 2}
    kind = values.pop("model_type")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values))
    found = shape_of(values | {"model_type": kind})
    assert found
    return found, model


@pytest.mark.parametrize("name", NAMES)
def test_the_parameters_are_those_of_transformers(name: str) -> None:
    found, model = small(name)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameters_are_those_published(name: str) -> None:
    assert shape(name).parameters == PUBLISHED[name]


def test_the_families_are_there() -> None:
    families = {name.rpartition("/")[2].split("-")[0] for name in NAMES}
    assert families == {"Qwen2.5", "Qwen3", "Llama", "Meta"} and len(NAMES) > 40


@pytest.mark.parametrize(
    ("kind", "values", "experts"),
    [
        (
            "qwen2_moe",
            {"num_experts": 4, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2},
            Experts(4, 2, 16, 48, 2, has_shared_gate=True, are_replayed=True),
        ),
        ("qwen3_moe", {"num_experts": 4, "mlp_only_layers": [1]}, Experts(4, 2, 16, 0, 3, are_replayed=True)),
        ("mixtral", {"num_local_experts": 4}, Experts(4, 2, 64, 0, 4, are_replayed=True)),
    ],
)
def test_mixtures_of_experts_of_other_families(kind: str, values: dict[str, object], experts: Experts) -> None:
    plain = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    plain |= {"head_dim": 8, "vocab_size": 128, "tie_word_embeddings": False, "num_experts_per_tok": 2}
    plain |= {} if kind == "mixtral" else {"moe_intermediate_size": 16}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **plain, **values))
    found = shape_of(plain | values | {"model_type": kind})
    assert found and found.experts == experts
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_expert_adapter_has_parameter_count_of_peft() -> None:
    found, model = small("Qwen/Qwen3-30B-A3B")
    adapted = add_lora(model, ModelConfig.model_validate({"lora_target": "all-linear", "lora_rank": 4}), seed=0)  # pyright: ignore[reportArgumentType]
    made = sum(parameter.numel() for name, parameter in adapted.named_parameters() if "lora_" in name)
    assert made == found.adapter_parameters("all-linear", 4)


def test_qwen3_30b_a3b_engine_holds_all_experts() -> None:
    found = shape("Qwen/Qwen3-30B-A3B")
    role = ActorInferConfig.model_validate(
        {"strategy_args": {"strategy_name": "vllm", "strategy_config": {}}, "device_mapping": (0,)}
    )
    assert (
        estimate(place("actor_infer", role, 2048), role, found, 2048).device["weights"]
        == 2 * PUBLISHED["Qwen/Qwen3-30B-A3B"]
    )
    # A token uses 8 of 128 experts: in each of 48 layers, 120 experts x 3 x 2048 x 768 parameters are not active.
    assert found.active_parameters == 30_532_122_624 - 48 * 120 * 3 * 2048 * 768 == 3_353_032_704
    assert found.widest_mlp == 8 * 768
    assert layer_activations(found, 1, 2, compiled=True) == 2 * (2 * 2048 + 2 * 4096 + 2 * 512 + 2 * 6144)
