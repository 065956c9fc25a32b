"""Means and standard deviations of rewards over a group, a domain, the batch, or all steps so far, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from roll.types import Bools, Ints

EPSILON = 1e-6
"""Constant added to a standard deviation in a denominator. One up to this value counts as 0."""
WHITENING_EPSILON = 1e-8
"""Constant added to the variance of advantages in a denominator."""
Doubles = NDArray[np.float64]
Scope = Literal["batch", "group", "domain", "running"] | None


@dataclass(frozen=True)
class RunningMoments:
    """Running mean and variance of all rewards so far."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations from `mean`."""

    def joined(self, values: np.ndarray) -> RunningMoments:
        """Return the moments of all values so far. Source: Chan, Golub and LeVeque, "Updating Formulae", 1979."""
        if not len(values):
            return self
        new = values.astype(np.float64)
        count, delta = self.count + len(new), float(new.mean()) - self.mean
        squares = self.squares + float(((new - new.mean()) ** 2).sum()) + delta**2 * self.count * len(new) / count
        return RunningMoments(count, self.mean + delta * len(new) / count, squares)

    @property
    def std(self) -> float:
        """Return the sample standard deviation (n - 1); 0 for fewer than two values."""
        return (self.squares / (self.count - 1)) ** 0.5 if self.count > 1 else 0.0


def standardise(
    rewards: np.ndarray,
    groups: Ints,
    mean: Scope,
    std: Scope,
    running: RunningMoments | None = None,
    domains: Ints | None = None,
) -> Doubles:
    """Return (r - mean) / (std + 1e-6), [N], with the sample standard deviation (n - 1). A scope of None leaves its
    part out.

    Rewards whose standard deviation is at most 1e-6 are not divided, so the result is r - mean. If they were divided,
    and no mean were subtracted, rewards that are equal up to rounding would be multiplied by up to a million.

    Args:
        rewards, groups: [N] each.
        mean: Scope of the mean.
        std: Scope of the standard deviation.
        running: Moments of the rewards of all steps, including this one. Required if a scope is `running`.
        domains: [N], the domain of each reward. Required if a scope is `domain`.
    """
    values = rewards.astype(np.float64)
    members = {"group": groups, "domain": domains}
    shift = _moment(values, members, mean, np.mean, running and running.mean) if mean else 0.0
    spread = _moment(values, members, std, _sample_std, running and running.std) if std else 0.0
    return (values - shift) / np.where(spread > EPSILON, spread + EPSILON, 1.0)


def by_group(values: np.ndarray, groups: Ints, reduce: Callable[[np.ndarray], float | Doubles]) -> Doubles:
    """Return [N]: for each value, the result of `reduce` (one number, or one for each) on the values of its group."""
    out = np.empty(len(values), np.float64)
    order = np.argsort(groups, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        out[members] = reduce(values[members])
    return out


def whiten(values: np.ndarray, mask: Bools, domains: Ints | None = None) -> Doubles:
    """Return (v - mean) / sqrt(variance + 1e-8), [T], over the tokens in the mask; 0 elsewhere.

    The variance is the sample variance (n - 1), as in ROLL, TRL and verl. A single token gets 0.

    Args:
        values, mask: [T] each.
        domains: [T], the domain of each token. Each domain is then whitened separately. None: all tokens together.
    """
    out, chosen = np.zeros(len(values), np.float64), values[mask].astype(np.float64)
    if mask.any():
        out[mask] = _whitened(chosen) if domains is None else by_group(chosen, domains[mask], _whitened)
    return out


def _whitened(values: Doubles) -> Doubles:
    variance = float(values.var(ddof=1)) if len(values) > 1 else 0.0
    return (values - values.mean()) / np.sqrt(variance + WHITENING_EPSILON)


def _moment(
    values: Doubles,
    members: Mapping[str, Ints | None],
    scope: Scope,
    reduce: Callable[[np.ndarray], float],
    running: float | None,
) -> Doubles:
    match scope:
        case "group" | "domain":
            of = members[scope]
            assert of is not None, f"a scope is '{scope}', but the {scope} of each reward was not given"
            return by_group(values, of, reduce)
        case "running":
            assert running is not None, "a scope is 'running', but no running moments were given"
            return np.full(len(values), running)
        case _:
            return np.full(len(values), reduce(values))


def _sample_std(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
