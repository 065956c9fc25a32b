"""The policy terms of `policy_loss`. Their classes are in `roll/algorithms/objectives.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll.algorithms.methods.base import Fields, Method, methods_table

CLIP = ("pg_clip", "pg_clip_low", "pg_clip_high")
USUAL_DUAL_CLIP = 3.0
DPPO_THRESHOLDS = {"tv": 0.15, "kl": 0.05}
"""Thresholds of DPPO's authors, by divergence."""


@dataclass(frozen=True)
class PolicyLossTraits:
    """Traits of a policy term, used by the configuration checks."""

    ratio: Literal["token", "sequence"] | None = "token"
    """Level of its probability ratio. None if it has no ratio."""
    carries_token_credit: bool = True
    """Whether the gradient of a token uses the token's own advantage. Otherwise all tokens of a sequence share one
    gradient.
    """
    selects_tokens: bool = False
    """Whether it selects tokens of the whole step by their log-probs before the first update."""
    acts_on_change: bool = False
    """Whether it penalises the change of the policy, which is zero in a step's first update."""
    usual_clip: tuple[float, float] | None = None
    """Usual lower and upper clip of the method, if they differ from `pg_clip` by orders of magnitude."""
    largest_clip: float = float("inf")
    """Largest reasonable clip. Above it, almost nothing is clipped."""


def _clip(keys: Fields) -> Fields:
    return {"clip_low": keys["pg_clip_low"] or keys["pg_clip"], "clip_high": keys["pg_clip_high"] or keys["pg_clip"]}


def _ppo(keys: Fields) -> Fields:
    bound = keys["dual_clip_loss"]
    return {**_clip(keys), "dual_clip": USUAL_DUAL_CLIP if bound is True else bound or None}


def _sapo(keys: Fields) -> Fields:
    return {"positive": keys["sapo_positive_temperature"], "negative": keys["sapo_negative_temperature"]}


def _dppo(keys: Fields) -> Fields:
    kind, threshold = keys["dppo_divergence"], keys["dppo_threshold"]
    return {"divergence": kind, "threshold": DPPO_THRESHOLDS[kind] if threshold is None else threshold}


def _topr(keys: Fields) -> Fields:
    return {"positive": keys["topr_positive_weight"], "negative": keys["topr_negative_weight"]}


def _clip_cov(keys: Fields) -> Fields:
    return {**_clip(keys), "ratio": keys["clip_cov_ratio"], "low": keys["clip_cov_low"], "high": keys["clip_cov_high"]}


def _kl_cov(keys: Fields) -> Fields:
    return {"ratio": keys["kl_cov_ratio"], "coef": keys["kl_cov_coef"]}


POLICY_LOSSES = methods_table(
    Method("ppo", PolicyLossTraits(), (*CLIP, "dual_clip_loss"), _ppo),
    Method("pg", PolicyLossTraits(ratio=None)),
    Method("gspo", PolicyLossTraits(ratio="sequence", usual_clip=(3e-4, 4e-4), largest_clip=0.01), CLIP, _clip),
    Method("gmpo", PolicyLossTraits(ratio="sequence", carries_token_credit=False), CLIP, _clip),
    Method("cispo", PolicyLossTraits(), CLIP, _clip),
    Method("sapo", PolicyLossTraits(), ("sapo_positive_temperature", "sapo_negative_temperature"), _sapo),
    Method("dppo", PolicyLossTraits(), ("dppo_divergence", "dppo_threshold"), _dppo),
    Method("topr", PolicyLossTraits(ratio="sequence"), ("topr_positive_weight", "topr_negative_weight"), _topr),
    Method(
        "clip_cov",
        PolicyLossTraits(selects_tokens=True),
        (*CLIP, "clip_cov_ratio", "clip_cov_low", "clip_cov_high"),
        _clip_cov,
    ),
    Method(
        "kl_cov", PolicyLossTraits(selects_tokens=True, acts_on_change=True), ("kl_cov_ratio", "kl_cov_coef"), _kl_cov
    ),
)
