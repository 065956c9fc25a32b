"""Computes how much each response contributes to the best of k rewards (pass@k if rewards are 0 or 1). Pure functions."""

from __future__ import annotations

from math import comb

import numpy as np

from roll.algorithms.moments import Doubles
from roll.types import Floats


def added_to_best(rewards: Floats | Doubles, k: int) -> Doubles:
    """Return [n]: how much each response raises the largest reward of k - 1 other responses, averaged over all choices of the others.

    Rank the responses by reward from 1, lowest first. For the response of rank i, the best of the others has rank j < i in
    comb(j - 1, k - 2) of the comb(n - 1, k - 1) choices.

    Source: Walder and Karkhanis, arXiv 2505.15201, the estimator with the baseline of k - 1 samples (loo-1), without its factor of k / n.

    Args:
        rewards: [n], rewards of the responses to one prompt; n is at least 2.
        k: From 2 to n.
    """
    n = len(rewards)
    assert 2 <= k <= n, "k must be from 2 to the number of responses"
    order = np.argsort(rewards, kind="stable")
    ranked = rewards[order].astype(np.float64) - float(rewards.min())  # so that equal rewards give 0 exactly
    shares = np.array([comb(j, k - 2) / comb(n - 1, k - 1) for j in range(n - 1)])
    below, paid = np.cumsum(shares), np.cumsum(shares * ranked[:-1])
    out = np.zeros(n)
    out[order[1:]] = ranked[1:] * below - paid
    return out
