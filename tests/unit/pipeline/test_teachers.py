"""Teachers by domain: each gets only the sequences of its domains, and each token is compared with the teacher of its
domain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.algorithms.divergence import Divergence
from roll.models.student import TeacherTop, chunked_top_divergence, in_buckets
from roll.rollout.batch import Experience, Shaping, experience
from roll.runs.device_phases import untimed
from roll.runs.teacher import DomainTeacher, StepTeachers
from roll.types import Floats, RolloutGroup, Sequences
from tests.unit.rollout.build import make_episode, make_group, make_trajectory, observed, sampled

WORDS, TOP = 24, TeacherTop(4, 20, 1.5)
"""Output rows of the student, and the top-k output of the teachers: the top 4 of only 20 rows, at temperature 1.5."""
DOMAINS: Mapping[str, tuple[str, ...]] = {"teachers.exact": ("math", "code"), "teachers.kind": ("chat",)}
DRAWN = [
    ("chat", [[5, 6], [7]]),
    ("math", [[8, 9, 3]]),
    ("code", [[4], [6, 6]]),
    ("chat", [[9]]),
    ("math", [[2], [3, 4, 5]]),
]
"""Domain and responses of each group."""


def table(seed: int, rows: int) -> Tensor:
    """Return random logits [WORDS, rows] of the token after each token: a model with a context of one token."""
    return 2 * torch.randn(WORDS, rows, generator=torch.Generator().manual_seed(seed))


TABLES = {role: table(seed, TOP.rows) for seed, role in enumerate(DOMAINS)}


def before(sequences: Sequences) -> np.ndarray:
    """Return the token before each response token, [S]."""
    return sequences.token_ids[np.flatnonzero(sequences.response_mask) - 1]


class Asked:
    """Teachers that record each call as (role, number of sequences). Onloading is recorded with 0 sequences."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    async def scoring(self, role: str) -> None:
        self.calls.append((role, 0))


@dataclass(frozen=True)
class Table:
    """A teacher."""

    asked: Asked
    role: str

    async def states(self, sequences: Sequences) -> Floats:
        self.asked.calls.append((self.role, len(sequences.offsets) - 1))
        return TOP.encode(TABLES[self.role][before(sequences)]).numpy()


def ask(groups: list[RolloutGroup]) -> tuple[Asked, Experience, Floats]:
    asked, step = Asked(), experience(groups, Shaping())
    of_domains = [DomainTeacher(role, DOMAINS[role], Table(asked, role)) for role in DOMAINS]
    teachers = StepTeachers(of_domains, cast(Any, asked), untimed)
    return asked, step, asyncio.run(teachers.states(groups, step))


def groups_of(drawn: list[tuple[str, list[list[int]]]]) -> list[RolloutGroup]:
    return [
        make_group(number, [make_episode(ids) for ids in tokens], domain=domain)
        for number, (domain, tokens) in enumerate(drawn)
    ]


@pytest.mark.parametrize(
    "measure", [Divergence("forward_kl", temperature=1.5), Divergence("reverse_kl", temperature=1.5)], ids=str
)
def test_tokens_are_compared_with_teacher_of_domain(measure: Divergence) -> None:
    """Compare value and gradient with a computation in float64, one group at a time."""
    groups = groups_of(DRAWN)
    asked, step, sent = ask(groups)
    assert asked.calls == [("teachers.exact", 0), ("teachers.exact", 5), ("teachers.kind", 0), ("teachers.kind", 3)]
    student, ids = table(9, WORDS), torch.from_numpy(before(step.sequences)).long()
    hidden = torch.eye(WORDS)[ids]
    weight = student.T.contiguous().requires_grad_()
    found = chunked_top_divergence(hidden, weight, torch.from_numpy(sent), TOP, measure)
    found.sum().backward()
    wide = student.double().requires_grad_()
    expected = []
    for group, (domain, _) in zip(groups, DRAWN, strict=True):
        [role] = [role for role, domains in DOMAINS.items() if domain in domains]
        own = torch.from_numpy(before(experience([group], Shaping()).sequences)).long()
        p = (TABLES[role][own].double() / 1.5).log_softmax(-1)
        chosen = p.topk(TOP.count).indices
        q = (wide[own, : TOP.rows] / 1.5).log_softmax(-1)
        expected.append(measure.between(in_buckets(q, chosen), in_buckets(p, chosen)))
    torch.cat(expected).sum().backward()
    assert torch.allclose(found.double(), torch.cat(expected), atol=1e-5)
    assert weight.grad is not None and wide.grad is not None
    assert torch.allclose(weight.grad.T.double(), wide.grad, atol=1e-5)


def test_all_trajectories_of_an_episode_have_its_teacher() -> None:
    forked = make_trajectory(observed([3]), sampled([6, 7]))
    episode = replace(make_episode([5]), trajectories=[*make_episode([5]).trajectories, forked])
    groups = [make_group(0, [episode], domain="chat"), *groups_of([("math", [[4, 4]])])]
    asked, step, sent = ask(groups)
    assert asked.calls == [("teachers.exact", 0), ("teachers.exact", 1), ("teachers.kind", 0), ("teachers.kind", 2)]
    ids = before(step.sequences)
    expected = torch.cat([TOP.encode(TABLES["teachers.kind"][ids[:3]]), TOP.encode(TABLES["teachers.exact"][ids[3:]])])
    assert sent.tolist() == expected.tolist()


def test_teacher_without_responses_is_not_asked() -> None:
    asked, _, _ = ask(groups_of([("chat", [[5]])]))
    assert asked.calls == [("teachers.kind", 0), ("teachers.kind", 1)]
