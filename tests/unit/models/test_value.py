"""Values of packed sequences, compared with the hidden states of transformers for each sequence alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from roll.config.schema.model import ModelConfig
from roll.data.packing import FILLER, concatenate
from roll.errors import DataError
from roll.models.packed import packed_inputs
from roll.models.value import ValueHead, load_value_model, load_values
from roll.types import Sequences

FP32 = ModelConfig.model_validate({"dtype": "fp32"})
LORA = ModelConfig.model_validate({"dtype": "fp32", "lora_target": "all-linear", "lora_rank": 4})


def sequences(lengths: list[int], prompt: int = 2) -> Sequences:
    """Return sequences of random tokens. The first `prompt` tokens of each are the prompt, the others the response."""
    generator = np.random.default_rng(0)
    return concatenate(
        [generator.integers(0, 250, length).astype(np.int32) for length in lengths],
        [np.arange(length) >= prompt for length in lengths],
    )


@pytest.fixture(scope="module")
def with_head(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a reward model: the tiny model with a random head."""
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    generator = torch.Generator().manual_seed(1)
    model.score.weight.data.normal_(generator=generator)
    folder = tmp_path_factory.mktemp("models") / "with_head"
    model.save_pretrained(folder)
    return folder


def states_alone(model: PreTrainedModel, batch: Sequences) -> list[Tensor]:
    """Return the hidden states [length, H] of each sequence, computed by transformers without packing."""
    parts = [
        torch.from_numpy(batch.token_ids[begin:end]).long()
        for begin, end in zip(batch.offsets, batch.offsets[1:], strict=False)
    ]
    return [model.base_model(input_ids=ids[None]).last_hidden_state[0] for ids in parts]


def test_values_match_transformers_states_before_each_token(with_head: Path) -> None:
    batch = sequences([9, 3, 20, 5])
    model = AutoModelForSequenceClassification.from_pretrained(with_head, dtype=torch.float32)
    values = load_values(str(with_head), FP32, seed=0)
    weights = torch.linspace(-1, 1, int(batch.response_mask.sum()))
    expected = torch.cat(
        [(states.double() @ model.score.weight.double().T)[1:-1, 0] for states in states_alone(model, batch)]
    )
    (got,) = values(packed_inputs(batch, "cpu"))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=2e-5)
    for said in (expected, got):
        (said * weights).sum().backward()
    theirs = dict(model.named_parameters())
    mine = dict(values.causal.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, parameter in mine.items():
        torch.testing.assert_close(
            parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@torch.no_grad()
def test_a_reward_model_reads_the_last_state(with_head: Path) -> None:
    batch = sequences([9, 3, 20])
    model = AutoModelForSequenceClassification.from_pretrained(with_head, dtype=torch.float32)
    last = np.zeros(len(batch.token_ids), np.bool_)
    last[batch.offsets[1:] - 1] = True
    inputs = packed_inputs(replace(batch, response_mask=last), "cpu")
    (got,) = load_values(str(with_head), FP32, seed=0).values(inputs, back=0)
    expected = torch.stack([states[-1] @ model.score.weight[0] for states in states_alone(model, batch)])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


def test_critic_head_starts_at_zero_on_model_layers(tiny_model: Path) -> None:
    model = load_value_model(str(tiny_model), FP32)
    head = model.score
    assert isinstance(head, ValueHead) and head.weight.shape == (1, model.config.hidden_size) and not head.weight.any()
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    theirs = dict(base.base_model.named_parameters())
    for name, parameter in model.base_model.named_parameters():
        assert torch.equal(parameter, theirs.pop(name)), name
    assert not theirs
    batch = sequences([9, 3])
    (values,) = load_values(str(tiny_model), FP32, seed=0)(packed_inputs(batch, "cpu"))
    assert values.shape == (8,) and not values.any()


def test_lora_critic_trains_adapter_and_head(with_head: Path) -> None:
    values = load_values(str(with_head), LORA, seed=3)
    trains = {name for name, parameter in values.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[-2] for name in trains if ".lora_" not in name} == {"score"}
    assert len(trains) == 1 + 2 * 7 * values.causal.config.num_hidden_layers
    batch = sequences([9, 3, 20])
    (adapted,) = values(packed_inputs(batch, "cpu"))
    (plain,) = load_values(str(with_head), FP32, seed=0)(packed_inputs(batch, "cpu"))
    torch.testing.assert_close(adapted, plain)
    adapted.sum().backward()
    moving = {
        name for name, parameter in values.named_parameters() if parameter.grad is not None and parameter.grad.any()
    }
    assert moving == {name for name in trains if ".lora_A." not in name}  # B is 0, so the gradient of A is still 0


@torch.no_grad()
def test_bf16_critic_keeps_fp32_head_arithmetic(with_head: Path) -> None:
    values = load_values(str(with_head), ModelConfig.model_validate({"dtype": "bf16"}), seed=0)
    assert {parameter.dtype for parameter in values.parameters()} == {torch.bfloat16}
    inputs = packed_inputs(sequences([9, 3, 20]), "cpu")
    (got,) = values(inputs)
    states = values.hidden(inputs).index_select(0, inputs.scored - 1)
    assert got.dtype == torch.float32
    torch.testing.assert_close(
        got.double(),
        (states.double() @ values.causal.get_parameter("score.weight").double().T)[:, 0],
        rtol=1e-5,
        atol=1e-5,
    )


def test_filler_sequence_has_zero_gradient(with_head: Path) -> None:
    values = load_values(str(with_head), FP32, seed=0)
    (got,) = values(packed_inputs(FILLER, "cpu"))
    assert got.shape == (0,)
    got.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in values.parameters())


def test_a_folder_without_a_model_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"'{tmp_path}/nothing'") as raised:
        load_value_model(str(tmp_path / "nothing"), FP32)
    assert [fault.code for fault in raised.value.faults] == ["unreadable"]
