"""Divergences compared with explicit sums in float64, and the chunked divergence with the unchunked one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from roll.algorithms.divergence import Distillation, Divergence
from roll.algorithms.losses import LossInputs
from roll.models import student as chunks
from roll.models.packed import LogProbHead
from roll.models.student import chunked_divergence

KINDS = [
    Divergence("forward_kl", temperature=1.5),
    Divergence("reverse_kl", temperature=0.7),
    Divergence("jsd", 0.3),
    Divergence("jsd", 0.9),
]
P, Q = [0.2, 0.5, 0.3], [0.6, 0.1, 0.3]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        (Divergence("forward_kl"), kl(P, Q)),
        (Divergence("reverse_kl"), kl(Q, P)),
        (Divergence("jsd", 0.25), 0.25 * kl(P, [0.5, 0.2, 0.3]) + 0.75 * kl(Q, [0.5, 0.2, 0.3])),
    ],
)
def test_divergences_by_hand(measure: Divergence, expected: float) -> None:
    student, teacher = (torch.tensor([row], dtype=torch.float64).log() + 3.0 for row in (Q, P))
    assert measure(student, teacher).tolist() == pytest.approx([expected], rel=1e-6)
    assert measure(teacher, teacher).tolist() == pytest.approx([0.0], abs=1e-7)


def test_the_temperature_divides_both_logits() -> None:
    student, teacher = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(
        Divergence("forward_kl", temperature=2.0)(student, teacher), Divergence("forward_kl")(student / 2, teacher / 2)
    )


@pytest.mark.parametrize("measure", KINDS)
def test_gradients_are_those_of_finite_differences(measure: Divergence) -> None:
    student, teacher = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda logits: measure(logits, teacher), [student.requires_grad_()], atol=1e-6)


def world(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states and output matrices of a student and of a wider teacher, which has `rows` vocabulary rows
    instead of 40.
    """
    generator = torch.Generator().manual_seed(2)
    shapes = ((70, 8), (40, 8), (70, 12), (rows, 12))
    hidden, weight, teacher_hidden, teacher_weight = (torch.randn(shape, generator=generator) for shape in shapes)
    return hidden.requires_grad_(), weight.requires_grad_(), teacher_hidden, teacher_weight


@pytest.mark.parametrize("rows", [40, 36, 48])
@pytest.mark.parametrize("measure", KINDS)
def test_chunks_change_neither_values_nor_gradients(
    measure: Divergence, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "head_tokens", lambda vocabulary: 64)  # 16 tokens per chunk
    hidden, weight, teacher_hidden, teacher_weight = world(rows)
    slope = torch.linspace(-1, 1, 70)
    said = chunked_divergence(hidden, weight, teacher_hidden, teacher_weight, measure)
    found = torch.autograd.grad(said, (hidden, weight), slope)

    doubles = [value.detach().double() for value in (hidden, weight, teacher_hidden, teacher_weight)]
    wide, matrix = doubles[0].requires_grad_(), doubles[1].requires_grad_()
    shared = min(40, rows)
    whole = measure(wide @ matrix[:shared].T, doubles[2] @ doubles[3][:shared].T)
    expected = torch.autograd.grad(whole, (wide, matrix), slope.double())
    assert torch.allclose(said.double(), whole, atol=1e-5)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours.double(), theirs, atol=1e-4)


def test_the_head_says_it_beside_log_probs() -> None:
    hidden, weight, teacher_hidden, teacher_weight = world(40)
    linear = torch.nn.Linear(8, 40, bias=False)
    linear.weight.data = weight.detach()
    head, targets = LogProbHead(linear), torch.arange(70) % 40

    def more(states: Tensor, matrix: Tensor) -> Tensor:
        return chunked_divergence(states, matrix, teacher_hidden, teacher_weight, KINDS[0])

    log_probs, entropy, divergence = head(hidden, targets, 1.0, more)
    assert torch.equal(log_probs, head(hidden, targets)[0]) and torch.equal(entropy, head(hidden, targets)[1])
    assert torch.allclose(divergence, more(hidden, linear.weight))


def test_the_loss_mixes_divergence_and_likelihood() -> None:
    log_probs, divergence = torch.tensor([-1.0, -2.0]), torch.tensor([0.5, 0.25])
    said = Distillation(0.75)(log_probs, log_probs, divergence, LossInputs(torch.zeros(2), torch.tensor([2])))
    assert said.losses.tolist() == pytest.approx([0.75 * 0.5 + 0.25 * 1.0, 0.75 * 0.25 + 0.25 * 2.0])
    assert said.metrics["distill/divergence"].tolist() == [0.5, 0.25]
