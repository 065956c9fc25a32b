"""Log-probs, entropies and gradients of packed sequences, compared with transformers on each sequence alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from roll.config.schema.model import ModelConfig
from roll.data.packing import FILLER, concatenate
from roll.models.load import load_causal_model
from roll.models.packed import PackedPolicy, packed_inputs, scored_only, spread_to_tokens
from roll.types import Sequences

FP32 = ModelConfig.model_validate({"dtype": "fp32"})


def sequences(lengths: list[int], prompt: int = 2, seed: int = 0) -> Sequences:
    """Return sequences of random tokens. The first `prompt` tokens of each are the prompt, the others the response."""
    generator = np.random.default_rng(seed)
    return concatenate(
        [generator.integers(0, 250, length).astype(np.int32) for length in lengths],
        [np.arange(length) >= prompt for length in lengths],
    )


def one_by_one(model: PreTrainedModel, batch: Sequences, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies [S] in float64 from the logits of transformers, one sequence at a time."""
    log_probs, entropies = [], []
    for begin, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        ids = torch.from_numpy(batch.token_ids[begin:end]).long()
        log_p = (model(input_ids=ids[None]).logits[0].double() / temperature).log_softmax(-1)
        where = torch.from_numpy(np.flatnonzero(batch.response_mask[begin:end]))
        log_probs.append(log_p[where - 1].gather(1, ids[where][:, None])[:, 0])
        entropies.append(-(log_p[where - 1].exp() * log_p[where - 1]).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


@pytest.fixture(params=["tiny_model", "tiny_tied_model"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@torch.no_grad()
def test_log_probs_are_those_of_each_sequence_alone(folder: Path, temperature: float) -> None:
    batch = sequences([9, 3, 20, 2, 5])
    expected = one_by_one(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), batch, temperature)
    got = PackedPolicy(load_causal_model(str(folder), FP32))(packed_inputs(batch, "cpu", temperature))
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=2e-5)


@torch.no_grad()
def test_bf16_agrees_within_its_rounding(tiny_model: Path) -> None:
    batch = sequences([9, 3, 20])
    expected, _ = one_by_one(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), batch, 1.0)
    policy = PackedPolicy(load_causal_model(str(tiny_model), ModelConfig.model_validate({"dtype": "bf16"})))
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.bfloat16}
    got, _ = policy(packed_inputs(batch, "cpu"))
    difference = (got.double() - expected).abs()
    assert difference.max() < 0.1
    assert difference.mean() < 0.02


@pytest.mark.gpu
def test_the_gpus_kernels_agree_with_the_cpus(tiny_model: Path) -> None:
    batch = sequences([9, 3, 20, 60])
    exact = PackedPolicy(load_causal_model(str(tiny_model), FP32))
    policy = PackedPolicy(load_causal_model(str(tiny_model), ModelConfig.model_validate({"dtype": "bf16"}))).cuda()
    expected, _ = exact(packed_inputs(batch, "cpu", 0.8))
    got, _ = policy(packed_inputs(batch, "cuda", 0.8))
    assert (got.cpu() - expected).abs().max() < 0.15
    assert (got.cpu() - expected).abs().mean() < 0.02
    expected.sum().backward()
    got.sum().backward()
    for name, parameter in policy.causal.named_parameters():
        theirs = exact.causal.get_parameter(name).grad
        assert theirs is not None and parameter.grad is not None
        assert (
            nn.functional.cosine_similarity(parameter.grad.cpu().float().flatten(), theirs.flatten(), dim=0) > 0.99
        ), name


def test_gradients_are_those_of_transformers(folder: Path) -> None:
    batch = sequences([9, 3, 20])
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = PackedPolicy(load_causal_model(str(folder), FP32))
    weights = torch.linspace(-1, 1, int(batch.response_mask.sum()))
    for log_probs, entropies in (one_by_one(reference, batch, 0.8), policy(packed_inputs(batch, "cpu", 0.8))):
        ((log_probs * weights).sum() + 0.1 * entropies.sum()).backward()
    expected = dict(reference.named_parameters())
    got = dict(policy.causal.named_parameters())
    assert got.keys() == expected.keys()
    for name, parameter in got.items():
        torch.testing.assert_close(
            parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@torch.no_grad()
def test_packed_neighbours_do_not_change_a_sequence(tiny_model: Path) -> None:
    policy = PackedPolicy(load_causal_model(str(tiny_model), FP32))
    alone, beside = sequences([7], seed=1), sequences([30, 4], seed=2)
    together = concatenate(
        [alone.token_ids, beside.token_ids[:30], beside.token_ids[30:]],
        [alone.response_mask, beside.response_mask[:30], beside.response_mask[30:]],
    )
    expected, _ = policy(packed_inputs(alone, "cpu"))
    got, _ = policy(packed_inputs(together, "cpu"))
    torch.testing.assert_close(got[: len(expected)], expected, rtol=1e-5, atol=1e-5)


def test_filler_sequence_has_zero_gradient(tiny_model: Path) -> None:
    policy = PackedPolicy(load_causal_model(str(tiny_model), FP32))
    log_probs, entropies = policy(packed_inputs(FILLER, "cpu"))
    assert log_probs.shape == entropies.shape == (0,)
    log_probs.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in policy.parameters())


def test_inputs_of_a_micro_batch_by_hand() -> None:
    batch = concatenate(
        [np.array([5, 6, 7], np.int32), np.array([8, 9], np.int32)], [np.array([0, 0, 1], bool), np.array([0, 1], bool)]
    )
    inputs = packed_inputs(batch, "cpu")
    assert inputs.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert inputs.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert inputs.cu_seq_lens.tolist() == [0, 3, 5]
    assert inputs.cu_seq_lens.dtype == torch.int32
    assert inputs.max_length == 3
    assert inputs.scored.tolist() == [2, 4]
    field = np.array([1, 2, 3, 4, 5], np.float32)
    assert scored_only(field, batch, "cpu").tolist() == [3, 5]
    assert spread_to_tokens(torch.tensor([-1.0, -2.0]), batch).tolist() == [0, 0, -1, 0, -2]


def test_a_first_token_cannot_be_a_response() -> None:
    batch = sequences([3, 3])
    mask = batch.response_mask.copy()
    mask[3] = True
    with pytest.raises(AssertionError, match="first token"):
        packed_inputs(dataclasses.replace(batch, response_mask=mask), "cpu")


def test_policy_without_adapter_is_the_model_itself(tiny_model: Path) -> None:
    model = load_causal_model(str(tiny_model), FP32)
    assert PackedPolicy(model).causal is model
    assert isinstance(load_causal_model(str(tiny_model), FP32, packed=False).get_output_embeddings(), nn.Linear)
