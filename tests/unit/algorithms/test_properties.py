"""Properties of every loss, aggregation, correction and KL estimator: padding, order and masked tokens do not
matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from roll.algorithms.corrections import Correction
from roll.algorithms.divergence import Distillation, DistilledPolicy
from roll.algorithms.kl import token_kl
from roll.algorithms.losses import Loss, LossInputs, NegativeLogLikelihood, ValueLoss
from roll.algorithms.methods import CORRECTIONS as METHODS
from roll.algorithms.objectives import (
    Cispo,
    ClipCov,
    Dppo,
    Gmpo,
    Gspo,
    KlCov,
    PolicyGradient,
    PolicyLoss,
    Ppo,
    Sapo,
    Topr,
)
from roll.algorithms.preference import BradleyTerry, PreferenceLoss
from roll.algorithms.shaping import Overlong, difficulty_weights, length_weights, overlong_penalty
from roll.config.schema.rlvr import RlvrConfig
from roll.data.packing import concatenate, loss_weights
from roll.models.packed import scored_only
from roll.training.deepspeed.strategy import loss_inputs
from roll.types import TrainBatch
from tests.unit.algorithms import test_preference

PRESETS = {name: method.traits for name, method in METHODS.items() if name != "none"}
MODES = get_args(RlvrConfig.model_fields["loss_agg_mode"].annotation)
KL_IN_LOSS = get_args(RlvrConfig.model_fields["kl_loss_type"].annotation)
KL_IN_REWARD = get_args(RlvrConfig.model_fields["kl_penalty"].annotation)
CORRECTIONS = {name: Correction(one.weight, one.cap, one.reject, 0.9, 1.1) for name, one in PRESETS.items()}
LOSSES: dict[str, Loss] = {
    "sft": NegativeLogLikelihood(),
    "values": ValueLoss(),
    "values, clipped": ValueLoss(clip=0.2),
    "teacher": Distillation(0.6),
    "teacher, on policy": DistilledPolicy(PolicyLoss(kl_coef=0.1), 0.5),
    "reward model": BradleyTerry(),
    "ppo": PolicyLoss(Ppo(0.2, 0.28, 3.0), entropy_coef=0.01),
    "ppo, masked": PolicyLoss(Ppo(), kl_coef=0.1, mask_threshold=0.02),
    "pg": PolicyLoss(PolicyGradient()),
    "gspo": PolicyLoss(Gspo(0.05, 0.1)),
    "gmpo": PolicyLoss(Gmpo(0.3, 0.5)),
    "cispo": PolicyLoss(Cispo()),
    "sapo": PolicyLoss(Sapo(3.0, 5.0)),
    "dppo": PolicyLoss(Dppo(threshold=0.01)),
    "dppo, kl": PolicyLoss(Dppo("kl", 0.002)),
    "topr": PolicyLoss(Topr(0.7, 1.3)),
    # With ratio 1.0, every token in the interval is selected. A random draw would depend on the order of the tokens.
    "clip_cov": PolicyLoss(ClipCov(ratio=1.0, low=0.1, high=1.0)),
    "kl_cov": PolicyLoss(KlCov(ratio=0.3)),
}
LOSSES |= {f"kl {name}": PolicyLoss(Ppo(), kl_coef=0.5, kl_estimator=name) for name in KL_IN_LOSS}
LOSSES |= {
    f"kl {name}, weighted": PolicyLoss(Ppo(), kl_coef=0.5, kl_estimator=name, kl_importance=True) for name in KL_IN_LOSS
}
LOSSES |= {f"correction {name}": PolicyLoss(Ppo(), correction) for name, correction in CORRECTIONS.items()}
LOSSES |= {f"preference {name}": loss for name, loss in test_preference.LOSSES.items()}


@dataclass(frozen=True)
class Row:
    """One sequence, with the outputs of the current model and the fields of a batch."""

    mask: np.ndarray
    token_ids: np.ndarray
    current: np.ndarray
    """[tokens]: log-probs, or a critic's values or a reward model's scores."""
    fields: np.ndarray
    """[6, tokens]: advantages, behaviour, proximal and reference log-probs, a critic's old values and returns."""
    label: float


def sequences_of_an_example(loss: Loss) -> int:
    """Return 2 for a loss of pairs, otherwise 1."""
    return 2 if isinstance(loss, PreferenceLoss | BradleyTerry) else 1


def random_rows(lengths: Sequence[int], seed: int, loss: Loss) -> list[Row]:
    """Return sequences of these response lengths, with prompts of two tokens. The third token of every fourth response
    is masked. A reward model scores the last token alone.
    """
    generator = np.random.default_rng(seed)
    scores_end = isinstance(loss, BradleyTerry)
    out = []
    for number, length in enumerate(lengths):
        mask = np.arange(length + 2) >= (length + 1 if scores_end else 2)
        if number % 4 == 3 and length > 2 and not scores_end:
            mask[4] = False
        current = -generator.exponential(size=length + 2)
        near = current + generator.normal(scale=0.2, size=(5, length + 2))
        fields = np.concatenate([generator.normal(size=(1, length + 2)), near])
        token_ids = generator.integers(0, 50, length + 2)
        out.append(Row(mask, token_ids, current, np.where(mask, fields, 0), float(generator.integers(2))))
    return out


def padded(row: Row, count: int, seed: int) -> Row:
    """Return the row with `count` masked tokens of random values appended."""
    noise = np.random.default_rng(seed).normal(size=(7, count))
    ids = np.concatenate([row.token_ids, np.full(count, 7)])
    fields = np.concatenate([row.fields, noise[1:]], axis=1)
    current = np.append(row.current, noise[0])
    return Row(np.append(row.mask, np.zeros(count, np.bool_)), ids, current, fields, row.label)


def gradient(rows: Sequence[Row], loss: Loss, mode: str) -> tuple[float, list[np.ndarray]]:
    """Return the aggregated loss, and its gradient with respect to the output at every token, masked or not, by
    sequence.
    """
    sequences = concatenate([row.token_ids.astype(np.int32) for row in rows], [row.mask for row in rows])
    columns = np.concatenate([row.fields for row in rows], axis=1).astype(np.float32)
    advantages, behaviour, proximal, reference, values, returns = columns
    labels = np.array([row.label for row in rows], np.float32)
    versions = np.zeros(len(advantages), np.int32)
    batch = TrainBatch(
        sequences, advantages, behaviour, versions, reference, proximal, values=values, returns=returns, labels=labels
    )
    batch = replace(batch, token_selection=loss.token_selection(batch))
    leaf = torch.from_numpy(np.concatenate([row.current for row in rows])).requires_grad_()
    outputs = outputs_of(loss, leaf[torch.from_numpy(sequences.response_mask)])
    said = loss(*outputs, loss_inputs(batch, "cpu"))
    weights = scored_only(loss_weights(sequences, mode, scale=5.0), sequences, "cpu")
    total = (said.losses * weights).sum()
    total.backward()
    assert leaf.grad is not None
    return float(total.detach()), np.split(leaf.grad.numpy(), sequences.offsets[1:-1])


def outputs_of(loss: Loss, chosen: Tensor) -> tuple[Tensor, ...]:
    """Return stand-ins for the outputs that the loss reads: values or scores, otherwise log-probs, entropies and the
    divergence from a teacher.
    """
    if isinstance(loss, ValueLoss | BradleyTerry):
        return (chosen,)
    return (
        (chosen, chosen.exp(), chosen.square())
        if isinstance(loss, Distillation | DistilledPolicy)
        else (chosen, chosen.exp())
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_padding_and_masked_tokens_change_no_gradient(name: str, mode: str) -> None:
    rows = random_rows([5, 1, 7, 4, 3, 6], seed=2, loss=LOSSES[name])
    total, plain = gradient(rows, LOSSES[name], mode)
    widest = max(len(row.mask) for row in rows)
    rectangle, wide = gradient(
        [padded(row, widest - len(row.mask), seed) for seed, row in enumerate(rows)], LOSSES[name], mode
    )
    assert rectangle == pytest.approx(total, rel=1e-6)
    for row, narrow, whole in zip(rows, plain, wide, strict=True):
        np.testing.assert_allclose(whole[: len(narrow)], narrow, rtol=1e-6, atol=1e-12)
        assert not whole[len(narrow) :].any()
        assert not narrow[~row.mask].any()
    assert any(part.any() for part in plain)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=5)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=7).filter(any),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 99),
    random=st.randoms(use_true_random=False),
)
def test_the_order_of_samples_does_not_matter(
    name: str, lengths: list[int], mode: str, seed: int, random: Random
) -> None:
    assume(name != "kl_cov" or sum(lengths) != 2)  # two tokens have equal covariances, and the first is selected
    each = sequences_of_an_example(LOSSES[name])
    if each == 2:
        lengths = [part for length in lengths for part in (length + 1, 7 - length)]
    rows = random_rows(lengths, seed, LOSSES[name])
    examples = list(range(len(rows) // each))
    random.shuffle(examples)
    order = [each * example + number for example in examples for number in range(each)]
    total, plain = gradient(rows, LOSSES[name], mode)
    shuffled, parts = gradient([rows[index] for index in order], LOSSES[name], mode)
    assert shuffled == pytest.approx(total, rel=1e-5, abs=1e-6)
    for index, part in zip(order, parts, strict=True):
        np.testing.assert_allclose(part, plain[index], rtol=1e-5, atol=1e-7)


def float64(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", PRESETS)
def test_corrected_losses_against_finite_differences(name: str) -> None:
    """The correction's weights are fixed before the update, so the loss's gradient is the slope of its value."""
    current, noise, advantages, far = float64(4, 12)
    inputs = LossInputs(advantages, torch.tensor([5, 0, 7]), current + 0.02 * far, current + 0.3 * noise)
    loss = PolicyLoss(Ppo(), CORRECTIONS[name])
    assert torch.autograd.gradcheck(
        lambda x: loss(x, x.exp(), inputs).losses, current.requires_grad_(), eps=1e-7, atol=1e-5
    )


@pytest.mark.parametrize("name", PRESETS)
def test_a_correction_sees_its_own_sequence_alone(name: str) -> None:
    delta = 0.2 * float64(9)
    together = CORRECTIONS[name](delta, torch.tensor([4, 0, 5])).weights
    alone = [CORRECTIONS[name](part, torch.tensor([len(part)])).weights for part in delta.split([4, 5])]
    torch.testing.assert_close(together, torch.cat(alone))


@pytest.mark.parametrize("estimator", sorted({*KL_IN_LOSS, *KL_IN_REWARD}))
def test_kl_estimators_against_their_formulas_and_finite_differences(estimator: str) -> None:
    policy, reference = float64(2, 40, seed=2)
    d = reference - policy
    plain = {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - 1 - d, "abs": d.abs()}
    torch.testing.assert_close(token_kl(policy, reference, estimator), plain[estimator.removesuffix("+")])
    leaf = policy.clone().requires_grad_()
    token_kl(leaf, reference, estimator).sum().backward()
    step = 1e-6
    # `k1+` and `k3+` have the values of `k1` and `k3`, and the gradient of `k2`.
    sloped = "k2" if estimator.endswith("+") else estimator
    slopes = (token_kl(policy + step, reference, sloped) - token_kl(policy - step, reference, sloped)) / (2 * step)
    torch.testing.assert_close(leaf.grad, slopes, rtol=1e-6, atol=1e-8)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8), random=st.randoms(use_true_random=False))
def test_shaping_looks_at_each_response_whatever_its_place(lengths: list[int], random: Random) -> None:
    order = list(range(len(lengths)))
    random.shuffle(order)
    given_lengths, difficulties = np.array(lengths, np.int32), np.array([length / 20 for length in lengths], np.float32)
    for shaped in (length_weights, lambda values: overlong_penalty(values, Overlong(20, 5))):
        np.testing.assert_array_equal(shaped(given_lengths[order]), shaped(given_lengths)[order])
    np.testing.assert_array_equal(difficulty_weights(difficulties[order]), difficulty_weights(difficulties)[order])
    assert ((length_weights(given_lengths) >= 0.5) & (length_weights(given_lengths) <= 1.5)).all()
