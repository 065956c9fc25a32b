"""The declarations of estimators and losses match the implementations, and read only keys that exist."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from roll.algorithms.advantages import ADVANTAGES
from roll.algorithms.methods import ESTIMATORS, POLICY_LOSSES, PREFERENCE_LOSSES, Method, readers
from roll.algorithms.objectives import (
    OBJECTIVES,
    Cispo,
    ClipCov,
    Dppo,
    Gmpo,
    Gspo,
    KlCov,
    PolicyGradient,
    Ppo,
    Sapo,
    Topr,
)
from roll.algorithms.preference import (
    LABELLED_LOSSES,
    PAIR_OBJECTIVES,
    ChosenLikelihood,
    Dpo,
    DpoNorm,
    Ipo,
    Kto,
    OrPo,
    SimPo,
)
from roll.config.schema.offline import DpoConfig
from roll.config.schema.rlvr import RlvrConfig

DEFAULTS = {
    schema: {key: field.default for key, field in schema.model_fields.items() if not field.is_required()}
    for schema in (RlvrConfig, DpoConfig)
}
"""The defaults of all keys that have one, by schema."""
POLICY = [
    ("ppo", {}, Ppo(0.2, 0.2, None)),
    ("ppo", {"pg_clip": 0.1, "pg_clip_high": 0.3, "dual_clip_loss": True}, Ppo(0.1, 0.3, 3.0)),
    ("ppo", {"pg_clip_low": 0.05, "dual_clip_loss": 5.0}, Ppo(0.05, 0.2, 5.0)),
    ("pg", {}, PolicyGradient()),
    ("gspo", {"pg_clip_low": 3e-4, "pg_clip_high": 4e-4}, Gspo(3e-4, 4e-4)),
    ("gmpo", {"pg_clip": 0.4}, Gmpo(0.4, 0.4)),
    ("cispo", {}, Cispo(0.2, 0.2)),
    ("sapo", {}, Sapo(1.0, 1.05)),
    ("sapo", {"sapo_positive_temperature": 2.0, "sapo_negative_temperature": 3.0}, Sapo(2.0, 3.0)),
    ("dppo", {}, Dppo("tv", 0.15)),
    ("dppo", {"dppo_divergence": "kl"}, Dppo("kl", 0.05)),
    ("dppo", {"dppo_divergence": "kl", "dppo_threshold": 0.1}, Dppo("kl", 0.1)),
    ("topr", {"topr_positive_weight": 2.0, "topr_negative_weight": 3.0}, Topr(2.0, 3.0)),
    ("clip_cov", {"clip_cov_ratio": 0.1, "clip_cov_low": 2.0, "clip_cov_high": 3.0}, ClipCov(0.2, 0.2, 0.1, 2.0, 3.0)),
    ("kl_cov", {"kl_cov_ratio": 0.1, "kl_cov_coef": 2.0}, KlCov(0.1, 2.0)),
]
PREFERENCE = [
    ("dpo", {"beta": 0.3, "label_smoothing": 0.2}, Dpo(0.3, 0.2)),
    ("ipo", {"beta": 0.3}, Ipo(0.3)),
    ("dpo_norm", {"beta": 5.0, "label_smoothing": 0.1}, DpoNorm(5.0, 0.1)),
    ("sft", {}, ChosenLikelihood()),
    ("simpo", {"beta": 2.5, "simpo_gamma": 1.5}, SimPo(2.5, 1.5)),
    ("orpo", {"beta": 0.3}, OrPo(0.3)),
    ("kto", {"beta": 0.3, "desirable_weight": 2.0, "undesirable_weight": 3.0}, Kto(0.3, 2.0, 3.0)),
]


class Keys:
    """A stand-in for a configuration, with only the given keys."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)


def made(method: Method[Any], implementation: Callable[..., Any], schema: type, given: Mapping[str, Any]) -> Any:
    return implementation(**method.arguments(Keys({**DEFAULTS[schema], **given})))


def test_what_is_declared_is_implemented_and_nothing_else() -> None:
    assert list(ESTIMATORS) == list(ADVANTAGES)
    assert set(POLICY_LOSSES) == set(OBJECTIVES)
    assert {name for name, method in PREFERENCE_LOSSES.items() if method.traits.rows == "pairs"} == set(PAIR_OBJECTIVES)
    assert {name for name, method in PREFERENCE_LOSSES.items() if method.traits.rows == "labelled"} == set(
        LABELLED_LOSSES
    )


def test_declared_keys_are_root_keys() -> None:
    assert readers(ESTIMATORS).keys() | readers(POLICY_LOSSES).keys() <= RlvrConfig.model_fields.keys()
    assert readers(PREFERENCE_LOSSES).keys() <= DpoConfig.model_fields.keys()


@pytest.mark.parametrize(("name", "given", "expected"), POLICY)
def test_a_policy_loss_is_made_of_its_keys(name: str, given: dict[str, Any], expected: object) -> None:
    assert made(POLICY_LOSSES[name], OBJECTIVES[name], RlvrConfig, given) == expected


@pytest.mark.parametrize(("name", "given", "expected"), PREFERENCE)
def test_a_preference_loss_is_made_of_its_keys(name: str, given: dict[str, Any], expected: object) -> None:
    registry = LABELLED_LOSSES if name in LABELLED_LOSSES else PAIR_OBJECTIVES
    assert made(PREFERENCE_LOSSES[name], registry[name], DpoConfig, given) == expected


def test_the_cases_above_leave_no_method_out() -> None:
    assert {name for name, _, _ in POLICY} == set(POLICY_LOSSES)
    assert {name for name, _, _ in PREFERENCE} == set(PREFERENCE_LOSSES)


def test_estimator_takes_scores_norm_and_own_keys() -> None:
    for name, estimator in ADVANTAGES.items():
        own = ESTIMATORS[name].arguments(Keys(DEFAULTS[RlvrConfig]))
        assert list(inspect.signature(estimator).parameters) == ["scores", "norm", *own], name
