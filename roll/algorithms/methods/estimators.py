"""The advantage estimators of `adv_estimator`. Their functions are in `roll/algorithms/advantages.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from roll.algorithms.methods.base import Fields, Method, methods_table, same_names


@dataclass(frozen=True)
class EstimatorTraits:
    """Traits of an estimator, used by the configuration checks and the training loop."""

    compares_groups: bool = True
    """Whether it compares the responses to one prompt, so that a single response has an advantage of 0."""
    discounts: Literal["tokens", "turns"] | None = None
    """Whether `gamma` discounts by token or by turn. None if it does not read `gamma`."""
    normalises: bool = False
    """Whether it reads `norm_mean_type` and `norm_std_type`."""
    own_scope: Literal["group"] | None = None
    """Scope of its built-in normalisation. `norm_mean_type` and `norm_std_type` may be set to this scope, without
    effect.
    """
    whitens: bool = False
    """Whether it whitens its advantages itself."""
    credits_tokens: bool = False
    """Whether its advantages differ among the tokens of a response, regardless of `gamma`."""
    needs_values: bool = False
    """Whether it uses a critic's values."""
    needs_turns: bool = False
    """Whether it credits the turns of a response separately, so that the reward must supply turns."""
    needs_states: bool = False
    """Whether it compares turns that started in the same state of an environment."""
    divides_by_mean: bool = False
    """Whether it divides by a group's mean reward, so that a group whose mean is 0 has advantages of 0."""
    needs_greedy: bool = False
    """Whether it uses the reward of the greedy response to each prompt."""


NORM_KEYS = ("norm_mean_type", "norm_std_type")
CLIP_NORMALISED = ("grpo", "reinforce", "gae")
"""Estimators that can clip rewards after their normalisation."""
GIGPO_KEYS = ("episode_reward_weight", "step_reward_weight", "step_reward_gamma", "gigpo_std")


def _none(keys: Fields) -> Fields:
    """Return no arguments: most estimators read their keys from `Normalisation`."""
    return {}


def _method(
    name: str, traits: EstimatorTraits, *own: str, fields: Callable[[Fields], Fields] = _none
) -> Method[EstimatorTraits]:
    """Return an estimator that reads the keys implied by its traits, and its own keys."""
    return Method(name, traits, (*["gamma"] * bool(traits.discounts), *NORM_KEYS * traits.normalises, *own), fields)


ESTIMATORS = methods_table(
    _method("grpo", EstimatorTraits(own_scope="group")),
    _method("dr_grpo", EstimatorTraits()),
    _method("rloo", EstimatorTraits()),
    _method("reinforce", EstimatorTraits(compares_groups=False, discounts="tokens", normalises=True)),
    _method(
        "step_reinforce",
        EstimatorTraits(
            compares_groups=False, discounts="turns", normalises=True, credits_tokens=True, needs_turns=True
        ),
    ),
    _method(
        "gigpo",
        EstimatorTraits(own_scope="group", credits_tokens=True, needs_states=True),
        *GIGPO_KEYS,
        fields=same_names,
    ),
    _method("reinforce_plus_plus", EstimatorTraits(compares_groups=False, discounts="tokens", whitens=True)),
    _method("reinforce_plus_plus_baseline", EstimatorTraits(whitens=True)),
    _method("remax", EstimatorTraits(compares_groups=False, discounts="tokens", needs_greedy=True)),
    _method("opo", EstimatorTraits()),
    _method("gpg", EstimatorTraits()),
    _method("maxrl", EstimatorTraits(divides_by_mean=True)),
    _method("pass_at_k", EstimatorTraits(), "pass_k", fields=same_names),
    _method(
        "gae",
        EstimatorTraits(compares_groups=False, discounts="tokens", credits_tokens=True, needs_values=True),
        *("lambd", "value_clip", "critic_warmup"),
    ),
)
