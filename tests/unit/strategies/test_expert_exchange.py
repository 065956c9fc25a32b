"""The exchange of expert parallelism: which rows a rank computes, their sums, and the kernel that adds them on GPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from roll.training.deepspeed.expert_exchange import Rows, TakeRows, weighted_sums
from tests import limits

TOKENS, CHOICES, EXPERTS, WIDTH = 11, 3, 6, 4
PADDING = 2
"""Tokens at the end that no expert was chosen for."""


def chosen_experts() -> Tensor:
    """Return three different experts for each token, and none for the padding."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOICES] for _ in range(TOKENS)])
    chosen[-PADDING:] = EXPERTS
    return chosen


def rows_of(own: range) -> Rows:
    counts = torch.bincount(chosen_experts().flatten(), minlength=EXPERTS + 1)[own.start : own.stop]
    return Rows.of(chosen_experts(), own, counts.int(), int(counts.sum()))


@pytest.mark.parametrize("own", [range(3), range(3, 6), range(2, 3)], ids=str)
def test_rows_are_the_choices_of_own_experts(own: range) -> None:
    rows = rows_of(own)
    chosen = chosen_experts().tolist()
    expected = [token for expert in own for token, its in enumerate(chosen) if expert in its]
    assert rows.tokens.tolist() == expected and int(rows.counts.sum()) == len(expected)
    seen = list[int]()
    for token, places in enumerate(rows.places.tolist()):
        for expert, place in zip(chosen[token], places, strict=True):
            assert (place >= 0) == (expert in own)
            if place >= 0:
                assert rows.tokens[place] == token
                seen.append(place)
    assert sorted(seen) == list(range(len(expected)))


def test_parts_of_all_ranks_add_up() -> None:
    torch.manual_seed(1)
    tokens = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(TOKENS, CHOICES, dtype=torch.float64, requires_grad=True)
    experts = torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.float64)

    def in_parts(tokens: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(tokens)
        for own in (range(3), range(3, 6)):
            rows = rows_of(own)
            parts = TakeRows.apply(tokens, rows).split(rows.counts.tolist())
            results = torch.cat([part @ experts[expert] for part, expert in zip(parts, own, strict=True)])
            total = total + weighted_sums(results, weights, rows.places)
        return total

    expected = torch.zeros(TOKENS, WIDTH, dtype=torch.float64)
    for token, its in enumerate(chosen_experts().tolist()):
        for slot, expert in enumerate(its):
            if expert < EXPERTS:
                expected[token] += weights[token, slot] * (tokens[token] @ experts[expert])
    torch.testing.assert_close(in_parts(tokens, weights), expected)
    gradients = torch.autograd.grad(in_parts(tokens, weights).square().sum(), (tokens, weights))
    for got, wanted in zip(gradients, torch.autograd.grad(expected.square().sum(), (tokens, weights)), strict=True):
        torch.testing.assert_close(got, wanted)


INTERPRETED = """
from triton.backends import backends
for backend in backends.values():
    backend.driver.is_active = staticmethod(lambda: True)
import torch
from deepspeed.ops.triton_ops import autoep_fused_token_ops as kernels
from roll.training.deepspeed.expert_exchange import weighted_sums
from tests.unit.strategies.test_expert_exchange import CHOICES, TOKENS, rows_of
torch.manual_seed(2)
places = rows_of(range(2, 4)).places
weights, gradient = torch.rand(TOKENS, CHOICES), torch.randn(TOKENS, 32)
rows = torch.randn(int((places >= 0).sum()), 32)
def computed(function):
    own, factors = rows.clone().requires_grad_(), weights.clone().requires_grad_()
    out = function(own, factors)
    out.backward(gradient)
    return out.detach(), own.grad, factors.grad
plain = computed(lambda own, factors: weighted_sums(own, factors, places))
kernel = computed(lambda own, factors: kernels._FusedWeightedRestore.apply(own, factors, places.flatten(), CHOICES))
for got, wanted in zip(kernel, plain, strict=True):
    torch.testing.assert_close(got, wanted)
assert plain[0].abs().sum() > 0
"""


def test_the_kernel_of_gpus_adds_alike() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=limits.PROCESS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
