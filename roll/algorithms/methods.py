"""The methods that a configuration key selects: estimators, policy losses, preference losses and corrections. A method
has a name, its own keys, and traits, which the configuration checks use.

Their functions and classes are in `advantages.py`, `objectives.py`, `preference.py` and `corrections.py`. One class
implements all built-in corrections, which differ only in the settings here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, TypeGuard, TypeVar

LARGEST_ERROR = 0.2
"""Largest magnitude of a step's proportional error. A step changes the coefficient by at most the fraction
LARGEST_ERROR * responses / kl_horizon."""


Traits = TypeVar("Traits")
Entry = TypeVar("Entry")
Fields = Mapping[str, Any]
PATH = re.compile(r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|[^:]+\.py):[A-Za-z_]\w*")
DECLARED = "declared_traits"
"""The attribute that `declares` sets."""


def is_path(name: object) -> TypeGuard[str]:
    """Return whether a name refers to user code, in the form `package.module:Name` or `FILE.py:Name`."""
    return isinstance(name, str) and PATH.fullmatch(name) is not None


def declares(traits: object) -> Callable[[Entry], Entry]:
    """Return a decorator that attaches `traits` to a reward, estimator, loss or correction, and no more."""

    def mark(entry: Entry) -> Entry:
        setattr(entry, DECLARED, traits)
        return entry

    return mark


def declared(entry: object) -> object | None:
    """Return the traits recorded by `declares`, or None if there are none."""
    return getattr(entry, DECLARED, None)


def same_names(keys: Fields) -> Fields:
    """Return the values unchanged, for implementations whose arguments have the names of the keys."""
    return keys


@dataclass(frozen=True)
class Method(Generic[Traits]):
    """One estimator, loss or correction. Its implementation has its name in `roll/algorithms/`, or is user code."""

    name: str
    traits: Traits
    keys: tuple[str, ...] = ()
    """Root keys of the configuration that this method reads, and that some other methods of its kind do not read."""
    fields: Callable[[Fields], Fields] = same_names
    """Function that maps the values of `keys` to the arguments of the implementation."""

    def __str__(self) -> str:
        return self.name

    @property
    def is_users(self) -> bool:
        """Return whether the method is user code, named `package.module:Name`. It then reads no root keys."""
        return is_path(self.name)

    def arguments(self, config: object) -> Fields:
        """Return the implementation's arguments, read from a configuration that has the method's keys."""
        return self.fields({key: getattr(config, key) for key in self.keys})


Methods = Mapping[str, Method[Traits]]


def methods_table(*methods: Method[Traits]) -> Methods[Traits]:
    """Return the methods by name. Messages and the configuration reference list them in this order."""
    return MappingProxyType({method.name: method for method in methods})


def readers(known: Mapping[str, Method[Any]]) -> dict[str, tuple[str, ...]]:
    """Map each key that only some methods read to the names of these methods."""
    keys = dict.fromkeys(key for method in known.values() for key in method.keys)
    return {key: tuple(method.name for method in known.values() if key in method.keys) for key in keys}


Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class CorrectionTraits:
    """Settings of a correction; see `Correction`. A bound of None: the correction does not read its key."""

    weight: Level | None = None
    cap: float | None = None
    reject: Level | None = None
    low: float | None = None
    high: float | None = None


NO_CORRECTION = Method("none", CorrectionTraits())
CORRECTIONS = methods_table(
    NO_CORRECTION,
    Method("tis", CorrectionTraits(weight="token", cap=2.0)),
    Method("icepop", CorrectionTraits(weight="token", reject="token", low=0.5, high=5.0)),
    Method("seq_tis", CorrectionTraits(weight="sequence", cap=2.0)),
    Method("seq_mis", CorrectionTraits(weight="sequence", reject="sequence", low=0.5, high=2.0)),
    Method("geo_tis", CorrectionTraits(weight="geometric", cap=2.0)),
    Method("token_rs", CorrectionTraits(reject="token", low=0.5, high=2.0)),
    Method("seq_rs", CorrectionTraits(reject="sequence", low=0.5, high=2.0)),
    Method("geo_rs", CorrectionTraits(reject="geometric", low=0.999, high=1.001)),
    Method("geo_rs_tis", CorrectionTraits(weight="token", cap=2.0, reject="geometric", low=0.999, high=1.001)),
)


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
    """Scope of its built-in normalisation. `norm_mean_type` and `norm_std_type` may name this scope, with no effect."""
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
    """Whether a token's gradient uses its own advantage. Otherwise all tokens of a sequence share one gradient."""
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


@dataclass(frozen=True)
class PreferenceTraits:
    """Traits of a loss on preference pairs, used by the configuration checks and the training loop."""

    needs_reference: bool = True
    """Whether it uses the log-probs of a reference policy."""

    rows: ClassVar[Literal["pairs", "labelled"]] = "pairs"
    """Kind of data rows on which it trains."""
    compares_rows: ClassVar[bool] = False
    """Whether it compares the rows of an update, and needs reference log-probs of mismatched pairs in every step."""


@dataclass(frozen=True)
class LabelledTraits(PreferenceTraits):
    """Traits of a loss on single responses with a label."""

    rows: ClassVar[Literal["pairs", "labelled"]] = "labelled"
    compares_rows: ClassVar[bool] = True


def _simpo(keys: Fields) -> Fields:
    return {"beta": keys["beta"], "gamma": keys["simpo_gamma"]}


PREFERENCE_LOSSES = methods_table(
    Method("dpo", PreferenceTraits(), ("beta", "label_smoothing")),
    Method("ipo", PreferenceTraits(), ("beta",)),
    Method("dpo_norm", PreferenceTraits(), ("beta", "label_smoothing")),
    Method("simpo", PreferenceTraits(needs_reference=False), ("beta", "simpo_gamma"), _simpo),
    Method("orpo", PreferenceTraits(needs_reference=False), ("beta",)),
    Method("sft", PreferenceTraits(needs_reference=False)),
    Method("kto", LabelledTraits(), ("beta", "desirable_weight", "undesirable_weight")),
)


@dataclass(frozen=True)
class MethodKey:
    """A configuration key that selects a method."""

    key: str
    noun: str
    """Noun for such a method in messages, with its article."""
    known: Methods[Any]
    """Built-in methods by name."""
    traits: Any
    """Traits of a user-defined method that declares none."""
    call: tuple[str, ...]
    """Names of the arguments with which the method is called."""
    base: str | None = None
    """`module:Name` of the protocol from which a user's frozen dataclass derives. None: the user defines a function."""

    @property
    def arguments(self) -> str:
        """Return the key for the arguments of a user-defined method."""
        return f"{self.key}_args"


KINDS = {
    kind.key: kind
    for kind in (
        MethodKey("adv_estimator", "an advantage estimator", ESTIMATORS, EstimatorTraits(), ("scores", "norm")),
        MethodKey(
            "policy_loss",
            "a policy loss",
            POLICY_LOSSES,
            PolicyLossTraits(),
            ("tokens",),
            "roll.algorithms.objectives:Objective",
        ),
        MethodKey(
            "preference_loss",
            "a preference loss",
            PREFERENCE_LOSSES,
            PreferenceTraits(),
            ("chosen", "rejected"),
            "roll.algorithms.preference:PairObjective",
        ),
        MethodKey(
            "mismatch_correction",
            "a correction",
            CORRECTIONS,
            CorrectionTraits(),
            ("delta", "lengths"),
            "roll.algorithms.corrections:MismatchCorrection",
        ),
    )
}
