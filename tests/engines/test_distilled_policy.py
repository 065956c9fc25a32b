"""Reinforcement learning with a distillation term, on DeepSpeed: loss and gradient, for every split, match a plain
float64 computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.algorithms.divergence import DistilledPolicy, Divergence
from roll.algorithms.objectives import PolicyLoss, Ppo
from roll.backend import Rank
from roll.data import packing
from roll.engines.hf.settings import HfScoreSettings
from roll.engines.hf.strategy import HfScore
from roll.models.load import load_causal_model
from roll.models.student import PackedTeacher, student_loader
from roll.training.actor_train import TrainShape, merge, micro_batches_of
from roll.types import Metrics, TrainBatch
from tests import limits
from tests.engines import plain_offline
from tests.engines.plain_offline import HEAT, SHARE
from tests.engines.ranks import run_ranks
from tests.engines.splitting import Update, Work, updates
from tests.engines.training import TEMPERATURE, Case, model_args

pytestmark = pytest.mark.full

LENGTHS = [9, 4, 14, 6, 11, 3, 8, 5, 12, 7]
MICRO_BATCHES = (1, 2, 5)
"""Numbers of micro-batches per rank: from one with all sequences of the rank to five with one or two sequences each."""
COEF = 0.7
FAR = 1e4
"""Factor for the teacher's logits that puts nearly all probability on one token at every position."""
LOSS = DistilledPolicy(PolicyLoss(Ppo(1e9, 1e9)), COEF)
"""The clip range is so wide that no ratio is clipped."""
FP32 = model_args(Case(0, lora=False))
KINDS = [("forward_kl", 0), ("reverse_kl", 2), ("jsd", 3)]
"""Each divergence, with a different ZeRO stage."""


@dataclass(frozen=True)
class Expected:
    """The expected gradient and losses of an update, in float64."""

    gradient: Tensor
    policy: float
    divergence: float


def make_batch(teacher: Path, scale: float) -> TrainBatch:
    """Return ten sequences of random tokens with advantages, behaviour log-probs and the teacher's hidden states times
    `scale`.
    """
    generator = np.random.default_rng(1)
    sequences = packing.concatenate(
        [generator.integers(0, 250, length).astype(np.int32) for length in LENGTHS],
        [np.arange(length) >= 2 for length in LENGTHS],
    )
    mask = sequences.response_mask
    behaviour = np.where(mask, generator.normal(-5.8, 0.3, len(mask)), 0).astype(np.float32)
    advantages = np.where(mask, generator.normal(size=len(mask)), 0).astype(np.float32)
    scorer = HfScore(
        HfScoreSettings(str(teacher), FP32, PackedTeacher), Rank("teacher", 0, 1, "", 0, "cpu", limits.START)
    )
    states = scorer.states([sequences])[0] * np.float32(scale)
    return TrainBatch(sequences, advantages, behaviour, np.zeros(len(mask), np.int32), teacher_states=states)


def by_hand(kind: str, student: Path, teacher: Path, batch: TrainBatch, scale: float) -> Expected:
    """Compute -A pi / mu + COEF * D(policy, teacher), averaged over the response tokens, with one forward pass per
    sequence.
    """
    models = [load_causal_model(str(folder), FP32, packed=False).double() for folder in (student, teacher)]
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    sequences = batch.sequences
    for begin, end in zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True):
        ids = torch.from_numpy(sequences.token_ids[begin:end]).long()
        where = torch.from_numpy(np.flatnonzero(sequences.response_mask[begin:end]))
        own, given = (model(input_ids=ids[None]).logits[0, where - 1] for model in models)
        now = torch.softmax(own / TEMPERATURE, -1).gather(1, ids[where][:, None])[:, 0]
        rows.append((now, own / HEAT, given.detach() * scale / HEAT))
    now, own, given = (torch.cat(parts) for parts in zip(*rows, strict=True))
    tiny = torch.finfo(torch.float64).tiny  # p log p is 0 at p = 0, which only the scaled teacher reaches
    p, q = torch.softmax(given, -1).clamp(min=tiny), torch.softmax(own, -1)
    apart = plain_offline.reverse_kl(p, q) if kind == "reverse_kl" and scale == 1 else None
    if apart is None:
        log_p, log_q = given.log_softmax(-1), own.log_softmax(-1)
        apart = (q * (log_q - log_p)).sum(-1) if kind == "reverse_kl" else getattr(plain_offline, kind)(p, q)
    assert batch.behaviour_log_probs is not None
    mask = sequences.response_mask
    old, advantages = (
        torch.from_numpy(values[mask]).double() for values in (batch.behaviour_log_probs, batch.advantages)
    )
    policy = (-advantages * now / old.exp()).mean()
    (policy + COEF * apart.mean()).backward()
    gradient = torch.cat([value.grad.flatten() for value in models[0].parameters() if value.grad is not None])
    return Expected(gradient, policy.item(), apart.mean().item())


def work(batches: Mapping[str, TrainBatch], ranks: int) -> Work:
    """Return each batch as one update, once for every number of micro-batches per rank."""
    budgets = {packing.split_to_budget(LENGTHS, ranks, budget).forwards: budget for budget in range(1, 200)}
    out: dict[tuple[str, int], Any] = {}
    for name, batch in batches.items():
        for count in MICRO_BATCHES:
            shape = TrainShape(1, 1, budgets[count], "token-mean", TEMPERATURE)
            out[name, count] = (LOSS, micro_batches_of(batch, range(len(LENGTHS)), ranks, shape))
            assert [len(micro_batches) for micro_batches in out[name, count][1]] == [count] * ranks
    return out


@pytest.mark.parametrize(("kind", "stage"), KINDS)
def test_distilled_update_matches_hand_computation_in_every_split(
    kind: Any, stage: int, small_model: Path, small_tied_model: Path, tmp_path: Path
) -> None:
    """One of the two teachers puts nearly all probability on one token, so that the reverse KL reaches thousands of
    nats.
    """
    scales = {"near": 1.0, "far": FAR}
    batches = {name: make_batch(small_tied_model, scale) for name, scale in scales.items()}
    expected = {
        name: by_hand(kind, small_model, small_tied_model, batches[name], scale) for name, scale in scales.items()
    }
    load = student_loader(str(small_tied_model), FP32, Divergence(kind, SHARE, HEAT))
    for ranks in (1, 2):
        given = work(batches, ranks)
        seen: list[dict[tuple[str, int], Update]] = run_ranks(
            updates, ranks, tmp_path / str(ranks), replace(Case(stage, lora=False)), small_model, given, load
        )
        for (name, count), update in seen[0].items():
            said: Metrics = merge([results[name, count].result for results in seen])
            one, where = expected[name], f"{name}, {ranks} ranks, {count} micro-batches"
            assert said["policy/skipped_updates"] == 0, where
            assert said["distill/divergence"] == pytest.approx(one.divergence, rel=1e-5), where
            assert said["policy/loss"] == pytest.approx(one.policy, rel=1e-4), where
            difference = float((update.gradient - one.gradient).norm() / one.gradient.norm())
            assert difference < 1e-5, f"{where}: {difference:.1e}"
