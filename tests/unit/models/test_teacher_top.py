"""The top-k output of a teacher: its divergence over k + 1 categories, compared with sums in float64 and with the full
divergence.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from roll.algorithms.divergence import Divergence
from roll.config.schema.model import ModelConfig
from roll.data import packing
from roll.models import student as divergence
from roll.models.load import load_causal_model
from roll.models.packed import packed_inputs
from roll.models.student import (
    PackedTopTeacher,
    TeacherTop,
    chunked_divergence,
    chunked_top_divergence,
    in_buckets,
    output_rows,
)

TOKENS, WORDS, HEAT = 30, 40, 1.3
MEASURES = [
    Divergence("forward_kl", temperature=HEAT),
    Divergence("reverse_kl", temperature=HEAT),
    Divergence("jsd", 0.3, HEAT),
]
each = pytest.mark.parametrize("measure", MEASURES, ids=str)


def doubles() -> tuple[Tensor, Tensor]:
    """Return the logits of a student and of a teacher, in float64."""
    student, teacher = 2 * torch.randn(
        2, TOKENS, WORDS, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    return student.requires_grad_(), teacher


def compared(measure: Divergence, student: Tensor, teacher: Tensor, count: int) -> Tensor:
    """Return the divergence over the teacher's top `count` tokens and the tail, computed in float64."""
    q, p = (student / HEAT).log_softmax(-1), (teacher / HEAT).log_softmax(-1)
    token_ids = p.topk(count).indices
    return measure.between(in_buckets(q, token_ids), in_buckets(p, token_ids))


@each
def test_with_all_tokens_it_is_the_whole_divergence(measure: Divergence) -> None:
    student, teacher = doubles()
    found, whole = compared(measure, student, teacher, WORDS), measure(student, teacher)
    assert (found - whole).abs().max() < 1e-12
    slopes = [torch.autograd.grad(value.sum(), student, retain_graph=True)[0] for value in (found, whole)]
    assert (slopes[0] - slopes[1]).abs().max() < 1e-12


@each
def test_the_more_tokens_the_nearer_and_never_above(measure: Divergence) -> None:
    student, teacher = doubles()
    by_count = torch.stack([compared(measure, student, teacher, count) for count in range(1, WORDS + 1)])
    assert (by_count >= 0).all() and (by_count[1:] >= by_count[:-1] - 1e-12).all()
    assert (by_count[0] < by_count[-1]).all()


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_missing_divergence_is_that_within_the_tail(kind: str) -> None:
    """By the chain rule of KL, the missing term is the probability of the tail times the KL of the distributions given
    the tail.
    """
    measure, (student, teacher), count = next(one for one in MEASURES if one.kind == kind), doubles(), 8
    q, p = ((logits.detach() / HEAT).softmax(-1) for logits in (student, teacher))
    in_tail = torch.ones_like(p, dtype=torch.bool).scatter(-1, p.topk(count).indices, False)
    tails = [(values * in_tail).sum(-1, keepdim=True) for values in (q, p)]
    (first, mass), (second, other) = (
        ((p, tails[1]), (q, tails[0])) if kind == "forward_kl" else ((q, tails[0]), (p, tails[1]))
    )
    within = torch.where(in_tail, first / mass * ((first / mass) / (second / other)).log(), 0.0).sum(-1)
    missing = measure(student, teacher) - compared(measure, student, teacher, count)
    assert (missing - mass[:, 0] * within).abs().max() < 1e-12
    assert missing.max() > 0.1


@pytest.mark.parametrize("count", [1, 8, 36, 99])
@each
def test_chunks_change_neither_values_nor_gradients(
    measure: Divergence, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with the unchunked divergence in float64. The teacher's output matrix has fewer rows than the
    student's.
    """
    monkeypatch.setattr(divergence, "head_tokens", lambda vocabulary: 64)  # 16 tokens per chunk
    generator, rows = torch.Generator().manual_seed(2), 36
    hidden, weight, teacher = (torch.randn(shape, generator=generator) for shape in ((70, 8), (WORDS, 8), (70, rows)))
    top = TeacherTop(min(count, rows), rows, HEAT)
    slope = torch.linspace(-1, 1, 70)
    said = chunked_top_divergence(hidden.requires_grad_(), weight.requires_grad_(), top.encode(teacher), top, measure)
    found = torch.autograd.grad(said, (hidden, weight), slope)

    wide, matrix = (value.detach().double().requires_grad_() for value in (hidden, weight))
    whole = compared(measure, wide @ matrix[:rows].T, teacher.double(), top.count)
    expected = torch.autograd.grad(whole, (wide, matrix), slope.double())
    assert torch.allclose(said.double(), whole, atol=1e-5)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours.double(), theirs, atol=1e-4)


@each
def test_all_tokens_and_hidden_states_say_the_same(measure: Divergence) -> None:
    generator = torch.Generator().manual_seed(5)
    hidden, weight, states, matrix = (
        torch.randn(shape, generator=generator) for shape in ((9, 8), (WORDS, 8), (9, 12), (WORDS, 12))
    )
    top = TeacherTop(WORDS, WORDS, HEAT)
    found = chunked_top_divergence(hidden, weight, top.encode(states @ matrix.T), top, measure)
    assert torch.allclose(found, chunked_divergence(hidden, weight, states, matrix, measure), atol=1e-6)


@each
@pytest.mark.parametrize("far", [100.0, 3e4])
def test_distributions_beyond_all_measure_stay_finite(measure: Divergence, far: float) -> None:
    """With fp32 logits. In the first row, the teacher is certain of the first token, and the student of a token in the
    tail.
    """
    teacher, student = torch.zeros(2, WORDS), torch.zeros(2, WORDS)
    teacher[:, 0] = torch.tensor([far, -far])
    student[:, -1] = torch.tensor([far, -far])
    top = TeacherTop(4, WORDS, HEAT)
    p, token_ids = top.decode(top.encode(teacher))
    found = measure.between(in_buckets((student.requires_grad_() / HEAT).log_softmax(-1), token_ids), p)
    found.sum().backward()
    assert student.grad is not None and torch.isfinite(found).all() and torch.isfinite(student.grad).all()
    assert (found[0] > 0.1).all()


def test_encoded_teacher_token_takes_8k_plus_4_bytes() -> None:
    """Token ids survive encoding and decoding, including the largest one."""
    rows, count = 151_936, 64
    logits = torch.randn(3, rows, generator=torch.Generator().manual_seed(6))
    logits[:, -1] = 99.0
    top = TeacherTop(count, rows, 1.0)
    encoded = top.encode(logits)
    assert encoded.dtype == torch.float32 and encoded.shape == (3, top.width) and 4 * top.width == 8 * count + 4
    log_probs, token_ids = top.decode(encoded)
    assert torch.equal(token_ids, logits.topk(count).indices) and (token_ids[:, 0] == rows - 1).all()
    assert torch.allclose(log_probs.double().exp().sum(-1), torch.ones(3, dtype=torch.float64), atol=1e-5)


def test_teacher_sends_top_k_of_its_logits(tiny_model: Path) -> None:
    """Compare packed sequences with the float64 logits of transformers for one sequence at a time."""
    generator, lengths = np.random.default_rng(1), [9, 2, 6]
    sequences = packing.concatenate(
        [generator.integers(0, 250, length).astype(np.int32) for length in lengths],
        [np.arange(length) >= 2 for length in lengths],
    )
    plain = Qwen2ForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    expected = []
    for begin, end in zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True):
        ids = torch.from_numpy(sequences.token_ids[begin:end]).long()
        expected.append(plain(input_ids=ids[None]).logits[0, 1:-1])  # at the token before each response token
    logits = torch.cat(expected).detach()
    rows = output_rows(str(tiny_model), trust_remote_code=False)
    assert rows == logits.shape[1]
    top = TeacherTop(8, rows, HEAT)
    teacher = PackedTopTeacher(
        load_causal_model(str(tiny_model), ModelConfig.model_validate({"dtype": "fp32"})), top
    ).eval()
    with torch.no_grad():
        log_probs, token_ids = top.decode(teacher(packed_inputs(sequences, "cpu"))[0])
    p = (logits / HEAT).softmax(-1)
    best = p.topk(8).values
    # Tokens that are as likely in fp32 may be in another order.
    assert torch.allclose(p.gather(-1, token_ids), best, rtol=1e-5, atol=0)
    assert torch.allclose(log_probs.double(), torch.cat([best, 1 - best.sum(-1, keepdim=True)], -1).log(), atol=1e-5)
