"""A second implementation of the losses, token by token in float64, written from the papers' formulas and not from
roll's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

    def losses(row: Row, held: Row) -> list[float]:
        tokens = list(zip(row.current, row.old, row.advantages, row.token_selection, strict=True))
        d = [current - old for current, old, _, _ in tokens]
        fixed = [current - old for current, old in zip(held.current, held.old, strict=True)]
        match objective:
            case Ppo(low, high, dual):
                out = [surrogate(exp(x), a, low, high) for x, a in zip(d, row.advantages, strict=True)]
                return [min(o, -dual * a) if dual and a < 0 else o for o, a in zip(out, row.advantages, strict=True)]
            case PolicyGradient():
                return [-a * current for current, _, a, _ in tokens]
            case Gspo(low, high):
                s = exp(sum(fixed) / len(fixed))
                own = [exp(current - stopped) for current, stopped in zip(row.current, held.current, strict=True)]
                return [surrogate(s * x, a, low, high) for x, a in zip(own, row.advantages, strict=True)]
            case Gmpo(low, high):
                c = [min(x, high) if a >= 0 else max(x, -low) for x, a in zip(d, row.advantages, strict=True)]
                return [-a * float(np.prod([exp(x) for x in c])) ** (1 / len(c)) for a in row.advantages]
            case Cispo(low, high):
                return [
                    -clip(exp(x), 1 - low, 1 + high) * a * current
                    for x, (current, _, a, _) in zip(fixed, tokens, strict=True)
                ]
            case Sapo(positive, negative):
                taus = [positive if a > 0 else negative for a in row.advantages]
                gates = [4 / (tau * (1 + exp(-tau * (exp(x) - 1)))) for x, tau in zip(d, taus, strict=True)]
                return [-a * gate for a, gate in zip(row.advantages, gates, strict=True)]
            case Dppo(kind, threshold):
                return [
                    0.0
                    if (current - old) * a > 0 and apart(kind, exp(current), exp(old)) > threshold
                    else -a * exp(current - old)
                    for current, old, a, _ in tokens
                ]
            case Topr(positive, negative):
                product = float(np.prod([exp(x) for x in fixed]))
                return [
                    -(positive if a >= 0 else negative * min(product, 1)) * a * current for current, _, a, _ in tokens
                ]
            case ClipCov(low, high):
                return [
                    0.0 if selected else surrogate(exp(x), a, low, high)
                    for x, (_, _, a, selected) in zip(d, tokens, strict=True)
                ]
            case KlCov(_, coef):
                return [
                    -a * exp(x) + (coef * abs(x) if selected else 0)
                    for x, (_, _, a, selected) in zip(d, tokens, strict=True)
                ]
        raise AssertionError(objective)

    return losses
