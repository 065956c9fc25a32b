"""A second implementation of the losses, token by token in float64, written from the papers' formulas and not from
roll's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, singledispatch
from math import exp, log

import numpy as np

from roll.algorithms.objectives import (
    Cispo,
    ClipCov,
    Dppo,
    Gmpo,
    Gspo,
    KlCov,
    Objective,
    PolicyGradient,
    Ppo,
    Sapo,
    Topr,
)


@dataclass(frozen=True)
class Row:
    """The response tokens of one sequence."""

    current: Sequence[float]
    old: Sequence[float]
    advantages: Sequence[float]
    token_selection: Sequence[bool]


Formula = Callable[[Row, Row], list[float]]
"""Maps the row of a sequence, and the row at which terms without a gradient are evaluated, to the token losses of the
sequence.
"""


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def surrogate(ratio: float, advantage: float, low: float, high: float) -> float:
    """Return PPO's token loss, the negated clipped objective, with one case for each sign of the advantage."""
    return -advantage * (min(ratio, 1 + high) if advantage >= 0 else max(ratio, 1 - low))


def apart(kind: str, p: float, q: float) -> float:
    """Return the total variation, or KL(q || p), of two distributions over two outcomes; p and q are the first
    outcome's probabilities.
    """
    if kind == "tv":
        return (abs(p - q) + abs((1 - p) - (1 - q))) / 2
    return q * log(q / p) + (1 - q) * log((1 - q) / (1 - p))


def formula(objective: Objective) -> Formula:
    """Return the formula of an objective's token losses, a function of `row` and `held`.

    With `held` equal to `row`, it gives the values of the losses. With `held` fixed, its derivative is the gradient.
    """
    return partial(losses, objective)


def log_ratios(row: Row) -> list[float]:
    return [current - old for current, old in zip(row.current, row.old, strict=True)]


def ratios(row: Row) -> list[float]:
    return [exp(x) for x in log_ratios(row)]


@singledispatch
def losses(objective: Objective, row: Row, held: Row) -> list[float]:
    """Return the token losses of one sequence. Each objective has a function of its own below."""
    raise AssertionError(objective)


@losses.register
def _ppo(objective: Ppo, row: Row, held: Row) -> list[float]:
    low, high, dual = objective.clip_low, objective.clip_high, objective.dual_clip
    out = [surrogate(r, a, low, high) for r, a in zip(ratios(row), row.advantages, strict=True)]
    return [min(o, -dual * a) if dual and a < 0 else o for o, a in zip(out, row.advantages, strict=True)]


@losses.register
def _policy_gradient(objective: PolicyGradient, row: Row, held: Row) -> list[float]:
    return [-a * current for current, a in zip(row.current, row.advantages, strict=True)]


@losses.register
def _gspo(objective: Gspo, row: Row, held: Row) -> list[float]:
    fixed = log_ratios(held)
    s = exp(sum(fixed) / len(fixed))
    own = [exp(current - stopped) for current, stopped in zip(row.current, held.current, strict=True)]
    low, high = objective.clip_low, objective.clip_high
    return [surrogate(s * x, a, low, high) for x, a in zip(own, row.advantages, strict=True)]


@losses.register
def _gmpo(objective: Gmpo, row: Row, held: Row) -> list[float]:
    low, high = objective.clip_low, objective.clip_high
    c = [min(x, high) if a >= 0 else max(x, -low) for x, a in zip(log_ratios(row), row.advantages, strict=True)]
    return [-a * float(np.prod([exp(x) for x in c])) ** (1 / len(c)) for a in row.advantages]


@losses.register
def _cispo(objective: Cispo, row: Row, held: Row) -> list[float]:
    weights = [clip(r, 1 - objective.clip_low, 1 + objective.clip_high) for r in ratios(held)]
    return [-w * a * current for w, a, current in zip(weights, row.advantages, row.current, strict=True)]


@losses.register
def _sapo(objective: Sapo, row: Row, held: Row) -> list[float]:
    taus = [objective.positive if a > 0 else objective.negative for a in row.advantages]
    gates = [4 / (tau * (1 + exp(-tau * (r - 1)))) for r, tau in zip(ratios(row), taus, strict=True)]
    return [-a * gate for a, gate in zip(row.advantages, gates, strict=True)]


@losses.register
def _dppo(objective: Dppo, row: Row, held: Row) -> list[float]:
    return [
        0.0
        if (current - old) * a > 0 and apart(objective.divergence, exp(current), exp(old)) > objective.threshold
        else -a * exp(current - old)
        for current, old, a in zip(row.current, row.old, row.advantages, strict=True)
    ]


@losses.register
def _topr(objective: Topr, row: Row, held: Row) -> list[float]:
    least = min(float(np.prod(ratios(held))), 1)
    weights = [objective.positive if a >= 0 else objective.negative * least for a in row.advantages]
    return [-w * a * current for w, a, current in zip(weights, row.advantages, row.current, strict=True)]


@losses.register
def _clip_cov(objective: ClipCov, row: Row, held: Row) -> list[float]:
    low, high = objective.clip_low, objective.clip_high
    tokens = zip(ratios(row), row.advantages, row.token_selection, strict=True)
    return [0.0 if selected else surrogate(r, a, low, high) for r, a, selected in tokens]


@losses.register
def _kl_cov(objective: KlCov, row: Row, held: Row) -> list[float]:
    tokens = zip(log_ratios(row), row.advantages, row.token_selection, strict=True)
    return [-a * exp(x) + (objective.coef * abs(x) if selected else 0) for x, a, selected in tokens]
