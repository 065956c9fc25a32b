"""LoRA variants, compared with PEFT alone: log-probs, gradients and updates, merged weights, and exported adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from roll.config.schema.model import ModelConfig, TrainingConfig
from roll.data.packing import concatenate
from roll.models.export import adapter_config, write_adapter_folder
from roll.models.layers import compile_layers, disable_noise
from roll.models.load import add_lora, load_causal_model, load_tokenizer
from roll.models.lora_variants import adapted_layers
from roll.models.packed import PackedPolicy, packed_inputs
from roll.models.weights import WeightView
from roll.training.deepspeed.setup import parameter_groups

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "pissa_niter": {"init_lora_weights": "pissa_niter_8"},
    "pissa and rslora": {"init_lora_weights": "pissa", "use_rslora": True},
    "qlora": {"quantized_base": "nf4"},
    "qlora, double": {"quantized_base": "nf4_double"},
}
TOKENS = [np.random.default_rng(number).integers(0, 250, length) for number, length in enumerate((12, 18))]
CHANGED = {"lora_rank": 4, "lora_alpha": 12.0, "lora_target": "all-linear", "dtype": "fp32"}
COMPILES = pytest.mark.full  # compiling takes a minute; `.ci/run` runs it


def settings(variant: str, **more: Any) -> ModelConfig:
    return ModelConfig.model_validate(CHANGED | VARIANTS[variant] | more)


def ours(folder: Path, variant: str, **more: Any) -> PeftModel:
    given = settings(variant, **more)
    return add_lora(load_causal_model(str(folder), given), given, seed=3)


def base_of(folder: Path, variant: str) -> Any:
    """Return the model under the adapter by transformers alone."""
    more: dict[str, Any] = {}
    if kind := VARIANTS[variant].get("quantized_base"):
        more["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=kind == "nf4_double",
            bnb_4bit_compute_dtype=torch.float32,
        )
    # In evaluation mode bitsandbytes computes in bf16 on some CPUs.
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).train()


def of_peft(folder: Path, variant: str) -> PeftModel:
    """Return the same adapter, made by PEFT alone, on the model of transformers."""
    keys = {key: value for key, value in VARIANTS[variant].items() if key != "quantized_base"}
    torch.manual_seed(3)
    wish = LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM", **keys)
    made = get_peft_model(base_of(folder, variant), wish)
    assert isinstance(made, PeftModel)
    return made


def log_probs(model: PeftModel) -> Tensor:
    """Return the log-probs of all tokens but the first of each sequence, packed."""
    batch = concatenate([ids.astype(np.int32) for ids in TOKENS], [np.arange(len(ids)) > 0 for ids in TOKENS])
    return PackedPolicy(model)(packed_inputs(batch, "cpu"))[0]


def alone(model: PeftModel) -> Tensor:
    """Return the same log-probs by transformers, each sequence by itself."""
    parts = []
    for ids in (torch.from_numpy(ids) for ids in TOKENS):
        scores = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)
        parts.append(scores.gather(1, ids[1:, None])[:, 0])
    return torch.cat(parts)


def by_name(model: PeftModel) -> dict[str, Tensor]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def optimizer(model: PeftModel, ratio: float | None = None) -> torch.optim.Optimizer:
    training = TrainingConfig.model_validate({"learning_rate": 0.01, "loraplus_lr_ratio": ratio})
    return torch.optim.AdamW(parameter_groups(model, training))


def three_updates(model: PeftModel, scores: Any, optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """Train on the log-probs three times. Return the gradients of each update, by name."""
    gradients = []
    for _ in range(3):
        optimizer.zero_grad()
        (-scores(model).mean()).backward()
        found = {name: each.grad.clone() for name, each in by_name(model).items() if each.grad is not None}
        gradients.append(found)
        optimizer.step()
    return gradients


@pytest.mark.parametrize(
    ("variant", "compiled"),
    [
        *((name, False) for name in VARIANTS),
        *(pytest.param(name, True, marks=COMPILES) for name in ("dora", "pissa", "qlora, double")),
    ],
)
def test_gradients_and_updates_are_pefts(variant: str, compiled: bool, tiny_model: Path) -> None:
    model, peft = ours(tiny_model, variant), of_peft(tiny_model, variant)
    model.train()
    disable_noise(model.get_base_model())  # pyright: ignore[reportArgumentType]
    if compiled:
        compile_layers(model.get_base_model())  # pyright: ignore[reportArgumentType]
    peft.train()
    if "niter" in variant:  # the randomised SVD of PEFT depends on the order of its layers
        for mine, other in zip(adapted_layers(model), adapted_layers(peft), strict=True):
            base = mine.base_layer.weight - mine.scaling["default"] * mine.initial_B @ mine.initial_A
            other.base_layer.weight.data = base.detach().clone()
            for part in ("lora_A", "lora_B"):
                getattr(other, part)["default"].weight.data = getattr(mine, part)["default"].weight.data.clone()
    torch.testing.assert_close(log_probs(model), alone(peft), rtol=0, atol=2e-5)
    theirs = three_updates(peft, alone, torch.optim.AdamW(peft.parameters(), lr=0.01, weight_decay=0.0))
    for number, found in enumerate(three_updates(model, log_probs, optimizer(model))):
        assert found.keys() == theirs[number].keys() and found
        for name, gradient in found.items():
            off = torch.linalg.vector_norm(gradient - theirs[number][name])
            assert off <= 2e-3 * torch.linalg.vector_norm(theirs[number][name]) + 1e-7, f"{number} {name}"
    torch.testing.assert_close(log_probs(model), alone(peft), rtol=0, atol=5e-3)
    assert (log_probs(model) - log_probs(ours(tiny_model, variant))).abs().max() > 0.02


@pytest.mark.parametrize(
    ("variant", "rate", "ratio"),
    [
        ("rslora", 0.01, None),
        ("dora", 0.01, None),
        ("pissa", 0.01, None),
        ("plain", 0.001, 16.0),
        ("qlora", 0.01, None),
    ],
)
@pytest.mark.full
def test_each_variant_learns_two_sequences(variant: str, rate: float, ratio: float | None, tiny_model: Path) -> None:
    model = ours(tiny_model, variant, lora_rank=8)
    training = {"learning_rate": rate, "loraplus_lr_ratio": ratio}
    updates = torch.optim.AdamW(parameter_groups(model, TrainingConfig.model_validate(training)))
    losses = []
    for _ in range(30):
        updates.zero_grad()
        loss = -log_probs(model).mean()
        loss.backward()
        updates.step()
        losses.append(loss.item())
    print(variant, [round(loss, 2) for loss in losses[::10]], losses[-1])
    assert losses[0] > 5 and losses[-1] < 1


def test_plus_trains_as_pefts_optimizer(tiny_model: Path) -> None:
    model, peft = ours(tiny_model, "dora"), of_peft(tiny_model, "dora")
    theirs = create_loraplus_optimizer(peft, torch.optim.AdamW, lr=0.002, loraplus_lr_ratio=16.0)
    training = TrainingConfig.model_validate({"learning_rate": 0.002, "loraplus_lr_ratio": 16.0})
    three_updates(model, log_probs, torch.optim.AdamW(parameter_groups(model, training)))
    three_updates(peft, alone, theirs)
    for name, trained in by_name(model).items():
        torch.testing.assert_close(trained, by_name(peft)[name], rtol=0, atol=2e-3, msg=lambda text, name=name: name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_and_exported_adapter_are_the_trained_policy(variant: str, tiny_model: Path, tmp_path: Path) -> None:
    model = ours(tiny_model, variant)
    three_updates(model, log_probs, optimizer(model))
    expected = log_probs(model).detach()
    view = WeightView(model)
    merged = view.model_tensors([spec.name for spec in view.model_specs()])
    whole: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    whole.load_state_dict(merged, strict=False)
    torch.testing.assert_close(alone(whole), expected, rtol=0, atol=1e-5 if "qlora" in variant else 2e-4)
    specs = {spec.name: spec for spec in view.adapter_specs()}
    tensors = view.adapter_tensors(list(specs))
    assert {name: (tuple(each.shape), each.nbytes) for name, each in tensors.items()} == {
        name: (spec.shape, spec.nbytes) for name, spec in specs.items()
    }
    write_adapter_folder(tmp_path / "adapter", tensors, model, load_tokenizer(str(tiny_model)))
    loaded = PeftModel.from_pretrained(base_of(tiny_model, variant), str(tmp_path / "adapter")).train()
    torch.testing.assert_close(alone(loaded), expected, rtol=0, atol=2e-4)
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert described["r"] == settings(variant).sent_rank and described["init_lora_weights"] is True


@pytest.mark.parametrize("variant", ["pissa", "dora"])
def test_without_its_adapter_it_is_the_base_model(variant: str, tiny_model: Path) -> None:
    model = ours(tiny_model, variant)
    base = PackedPolicy(load_causal_model(str(tiny_model), settings(variant)))
    plain = log_probs(base.model)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(log_probs(model), plain, rtol=0, atol=2e-5)
    three_updates(model, log_probs, optimizer(model))
    with model.disable_adapter():
        assert torch.equal(log_probs(model), plain)
    assert all(each.requires_grad == (".lora_" in name) for name, each in model.named_parameters())


def test_start_of_pissa_depends_on_the_weights_only(tiny_model: Path) -> None:
    """In bf16 too, where an exact export computes it from fp32 copies of the same weights."""
    first = ours(tiny_model, "pissa_niter", dtype="bf16")
    given = settings("pissa_niter", dtype="bf16")
    torch.manual_seed(9)
    second = add_lora(load_causal_model(str(tiny_model), given).float(), given, seed=8)
    layers = list(zip(adapted_layers(first), adapted_layers(second), strict=True))
    for one, other in layers:
        assert torch.equal(one.initial_A, other.initial_A) and torch.equal(one.initial_B, other.initial_B)
        assert torch.equal(one.initial_A.bfloat16().float(), one.initial_A.float())
    assert len(layers) == 28


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_adapter_of_dora_drops_only_if_asked(dropout: float, tiny_model: Path) -> None:
    model = ours(tiny_model, "dora", lora_dropout=dropout)
    for name, each in model.named_parameters():
        if ".lora_B." in name:
            each.data.fill_(0.05)
    model.train()
    disable_noise(model.get_base_model())  # pyright: ignore[reportArgumentType]
    assert torch.equal(log_probs(model), log_probs(model)) == (dropout == 0.0)


def test_adapter_config_says_the_scale_of_pissa(tiny_model: Path) -> None:
    plain = json.loads(adapter_config(ours(tiny_model, "pissa")))
    stable = json.loads(adapter_config(ours(tiny_model, "pissa and rslora")))
    assert plain["lora_alpha"] / plain["r"] == 3.0
    assert stable["lora_alpha"] / stable["r"] ** 0.5 == pytest.approx(6.0) and stable["use_rslora"]
