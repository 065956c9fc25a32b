"""The advantage estimators of `adv_estimator`. Their functions are in `roll/algorithms/advantages.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from roll.algorithms.methods.base import Fields, Method, same_names, table


@dataclass(frozen=True)
class EstimatorTraits:
    """What the checks and the loop ask about an estimator."""

    compares_groups: bool = True
    """It compares the responses to one prompt with each other, so one response to a prompt teaches nothing."""
    discounts: Literal["tokens", "turns"] | None = None
    """Which later rewards `gamma` discounts; None pays every token of a response alike."""
    normalises: bool = False
    """It reads `norm_mean_type` and `norm_std_type`."""
    own_scope: Literal["group"] | None = None
    """The scope that it normalises over by itself; these two keys may say so too."""
    whitens: bool = False
    """It whitens its advantages by itself."""
    credits_tokens: bool = False
    """Whether its advantages differ among the tokens of a response, whatever `gamma` is."""
    needs_values: bool = False
    """It takes advantages against a critic's values."""
    needs_turns: bool = False
    """It credits turns of a response, which a reward names."""
    needs_states: bool = False
    """It compares turns that were taken in the same state of an environment."""
    needs_greedy: bool = False
    """It compares with the greedy response to each prompt."""


NORM_KEYS = ("norm_mean_type", "norm_std_type")
GIGPO_KEYS = ("episode_reward_weight", "step_reward_weight", "step_reward_gamma", "gigpo_std")


def _none(keys: Fields) -> Fields:
    """The keys of most estimators reach them in `Normalisation`."""
    return {}


def _method(name: str, traits: EstimatorTraits, *own: str, fields: Callable[[Fields], Fields] = _none) -> Method[EstimatorTraits]:
    """An estimator that reads the keys that its traits speak of, and its own."""
    return Method(name, traits, (*["gamma"] * bool(traits.discounts), *NORM_KEYS * traits.normalises, *own), fields)


ESTIMATORS = table(
    _method("grpo", EstimatorTraits(own_scope="group")),
    _method("dr_grpo", EstimatorTraits()),
    _method("rloo", EstimatorTraits()),
    _method("reinforce", EstimatorTraits(compares_groups=False, discounts="tokens", normalises=True)),
    _method(
        "step_reinforce",
        EstimatorTraits(compares_groups=False, discounts="turns", normalises=True, credits_tokens=True, needs_turns=True),
    ),
    _method("gigpo", EstimatorTraits(own_scope="group", credits_tokens=True, needs_states=True), *GIGPO_KEYS, fields=same_names),
    _method("reinforce_plus_plus", EstimatorTraits(compares_groups=False, discounts="tokens", whitens=True)),
    _method("reinforce_plus_plus_baseline", EstimatorTraits(whitens=True)),
    _method("remax", EstimatorTraits(compares_groups=False, discounts="tokens", needs_greedy=True)),
    _method("opo", EstimatorTraits()),
    _method("gpg", EstimatorTraits()),
    _method("maxrl", EstimatorTraits()),
    _method("pass_at_k", EstimatorTraits(), "pass_k", fields=same_names),
    _method(
        "gae",
        EstimatorTraits(compares_groups=False, discounts="tokens", credits_tokens=True, needs_values=True),
        *("lambd", "value_clip", "critic_warmup"),
    ),
)
