"""The loss that a configuration builds: every key reaches its field, and no key of the loss is left out of this
file.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import pytest

from roll.algorithms.corrections import Correction
from roll.algorithms.divergence import DistilledPolicy
from roll.algorithms.methods import CORRECTIONS, POLICY_LOSSES, CorrectionTraits, Method, PolicyLossTraits, readers
from roll.algorithms.objectives import (
    Cispo,
    ClipCov,
    Dppo,
    Gmpo,
    Gspo,
    KlCov,
    PolicyGradient,
    PolicyLoss,
    Ppo,
    Sapo,
    Topr,
)
from roll.config.derived.methods import BOUNDS
from roll.config.schema.rlvr import RlvrConfig
from roll.runs.rlvr import wiring as wire_loss
from roll.runs.rlvr.wiring import learner_loss, policy_loss

KEYS = Mapping[str, Any]
CLIPPED = {"ppo": Ppo, "gspo": Gspo, "gmpo": Gmpo, "cispo": Cispo, "clip_cov": ClipCov}
OTHERS = {"pg": PolicyGradient, "sapo": Sapo, "dppo": Dppo, "topr": Topr, "kl_cov": KlCov}
USERS_LOSS = Method("roll.algorithms.objectives:Sapo", PolicyLossTraits())
USERS_CORRECTION = Method("roll.algorithms.corrections:Correction", CorrectionTraits())
ONE_UPDATE = {"async_generation_ratio": 0.0, "behaviour_log_probs": "on_policy"}


@pytest.fixture(scope="module")
def usual(configured: Callable[..., Any]) -> RlvrConfig:
    """Return a configuration with two updates per step and a reference."""
    return configured("tiny/tiny_rlvr_lora_zero3").model_copy(update={"use_kl_loss": False, "kl_loss_coef": 0.0})


def loss_of(usual: RlvrConfig, keys: KEYS) -> PolicyLoss:
    named = {"policy_loss": POLICY_LOSSES, "mismatch_correction": CORRECTIONS}
    given = {key: named[key].get(value, value) if key in named else value for key, value in keys.items()}
    return policy_loss(usual.model_copy(update=given))


def clips(loss: Any) -> tuple[float, float]:
    return loss.objective.clip_low, loss.objective.clip_high


def correction(loss: PolicyLoss) -> Correction:
    assert isinstance(loss.correction, Correction)
    return loss.correction


def rejects(loss: PolicyLoss) -> tuple[float, float]:
    return correction(loss).low, correction(loss).high


CASES: list[
    tuple[str, KEYS, Callable[[Any], Any], Any]
] = [  # key, its settings, what is read from the loss, and the value expected
    *(
        ("policy_loss", {"policy_loss": name}, lambda loss: type(loss.objective), kind)
        for name, kind in (CLIPPED | OTHERS).items()
    ),
    *(("pg_clip", {"policy_loss": name, "pg_clip": 0.3}, clips, (0.3, 0.3)) for name in CLIPPED),
    *(("pg_clip_low", {"policy_loss": name, "pg_clip_low": 0.1}, clips, (0.1, 0.2)) for name in CLIPPED),
    *(("pg_clip_high", {"policy_loss": name, "pg_clip_high": 0.4}, clips, (0.2, 0.4)) for name in CLIPPED),
    ("dual_clip_loss", {"dual_clip_loss": 2.5}, lambda loss: loss.objective.dual_clip, 2.5),
    ("dual_clip_loss", {"dual_clip_loss": True}, lambda loss: loss.objective.dual_clip, 3.0),
    ("dual_clip_loss", {"dual_clip_loss": False}, lambda loss: loss.objective.dual_clip, None),
    (
        "sapo_positive_temperature",
        {"policy_loss": "sapo", "sapo_positive_temperature": 3.0},
        lambda loss: loss.objective,
        Sapo(3.0, 1.05),
    ),
    (
        "sapo_negative_temperature",
        {"policy_loss": "sapo", "sapo_negative_temperature": 3.0},
        lambda loss: loss.objective,
        Sapo(1.0, 3.0),
    ),
    (
        "dppo_divergence",
        {"policy_loss": "dppo", "dppo_divergence": "kl"},
        lambda loss: loss.objective,
        Dppo("kl", 0.05),
    ),
    ("dppo_threshold", {"policy_loss": "dppo", "dppo_threshold": 0.3}, lambda loss: loss.objective, Dppo("tv", 0.3)),
    (
        "topr_positive_weight",
        {"policy_loss": "topr", "topr_positive_weight": 0.5},
        lambda loss: loss.objective,
        Topr(0.5, 1.0),
    ),
    (
        "topr_negative_weight",
        {"policy_loss": "topr", "topr_negative_weight": 0.5},
        lambda loss: loss.objective,
        Topr(1.0, 0.5),
    ),
    ("clip_cov_ratio", {"policy_loss": "clip_cov", "clip_cov_ratio": 0.5}, lambda loss: loss.objective.ratio, 0.5),
    ("clip_cov_low", {"policy_loss": "clip_cov", "clip_cov_low": 0.5}, lambda loss: loss.objective.low, 0.5),
    ("clip_cov_high", {"policy_loss": "clip_cov", "clip_cov_high": 7.0}, lambda loss: loss.objective.high, 7.0),
    ("kl_cov_ratio", {"policy_loss": "kl_cov", "kl_cov_ratio": 0.5}, lambda loss: loss.objective, KlCov(0.5, 1.0)),
    ("kl_cov_coef", {"policy_loss": "kl_cov", "kl_cov_coef": 2.0}, lambda loss: loss.objective, KlCov(2e-4, 2.0)),
    (
        "policy_loss_args",
        {"policy_loss": USERS_LOSS, "policy_loss_args": {"positive": 4.0}},
        lambda loss: loss.objective,
        Sapo(4.0, 1.05),
    ),
    *(
        (
            "mismatch_correction",
            {"mismatch_correction": name},
            lambda loss: (correction(loss).weight, correction(loss).reject),
            levels,
        )
        for name, levels in {
            "tis": ("token", None),
            "icepop": ("token", "token"),
            "seq_tis": ("sequence", None),
            "seq_mis": ("sequence", "sequence"),
            "geo_tis": ("geometric", None),
            "token_rs": (None, "token"),
            "seq_rs": (None, "sequence"),
            "geo_rs": (None, "geometric"),
            "geo_rs_tis": ("token", "geometric"),
        }.items()
    ),
    ("mismatch_correction", {"mismatch_correction": "none"}, lambda loss: loss.correction, None),
    ("mismatch_correction", {"mismatch_correction": "tis"}, lambda loss: loss.correction, Correction("token", 2.0)),
    ("mismatch_cap", {"mismatch_correction": "tis", "mismatch_cap": 1.5}, lambda loss: correction(loss).cap, 1.5),
    ("mismatch_low", {"mismatch_correction": "icepop", "mismatch_low": 0.25}, rejects, (0.25, 5)),
    ("mismatch_high", {"mismatch_correction": "icepop", "mismatch_high": 4.0}, rejects, (0.5, 4)),
    (
        "mismatch_correction_args",
        {"mismatch_correction": USERS_CORRECTION, "mismatch_correction_args": {"weight": "token", "cap": 7.0}},
        lambda loss: loss.correction,
        Correction("token", 7.0),
    ),
    ("behaviour_log_probs", {"behaviour_log_probs": "engine"}, lambda loss: loss.on_policy, False),
    ("behaviour_log_probs", {"behaviour_log_probs": "trainer"}, lambda loss: loss.on_policy, False),
    ("behaviour_log_probs", {"behaviour_log_probs": "on_policy"}, lambda loss: loss.on_policy, True),
    ("use_kl_loss", {"use_kl_loss": False, "kl_loss_coef": 0.5}, lambda loss: loss.kl_coef, 0.0),
    ("kl_loss_coef", {"use_kl_loss": True, "kl_loss_coef": 0.5}, lambda loss: loss.kl_coef, 0.5),
    *(
        ("kl_loss_type", {"kl_loss_type": kind}, lambda loss: loss.kl_estimator, kind)
        for kind in ("k1", "k2", "k3", "k1+", "k3+")
    ),
    (
        "kl_loss_importance",
        {"use_kl_loss": True, "kl_loss_importance": True, **ONE_UPDATE},
        lambda loss: loss.kl_importance,
        True,
    ),
    ("kl_loss_importance", {"use_kl_loss": True, "kl_loss_importance": False}, lambda loss: loss.kl_importance, False),
    ("kl_loss_importance", {"use_kl_loss": True, "async_generation_ratio": 1.0}, lambda loss: loss.kl_importance, True),
    (
        "kl_loss_importance",
        {"use_kl_loss": False, "async_generation_ratio": 1.0},
        lambda loss: loss.kl_importance,
        False,
    ),
    ("entropy_loss_coef", {"entropy_loss_coef": 0.25}, lambda loss: loss.entropy_coef, 0.25),
    ("off_policy_mask_threshold", {"off_policy_mask_threshold": 0.5}, lambda loss: loss.mask_threshold, 0.5),
    ("off_policy_mask_threshold", {"off_policy_mask_threshold": None}, lambda loss: loss.mask_threshold, None),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_a_key_reaches_its_field(case: tuple[str, KEYS, Callable[[Any], Any], Any], usual: RlvrConfig) -> None:
    _, keys, read, value = case
    assert read(loss_of(usual, keys)) == value


def test_a_teachers_divergence_gets_its_weight(usual: RlvrConfig) -> None:
    assert isinstance(learner_loss(usual), PolicyLoss)
    taught = learner_loss(usual.model_copy(update={"teacher": usual.reference, "distill_loss_coef": 0.25}))
    assert taught == DistilledPolicy(policy_loss(usual), 0.25)


def test_no_key_of_the_loss_is_left_out() -> None:
    makers = (wire_loss.learner_loss, wire_loss.policy_loss, wire_loss.objective, wire_loss.correction)
    tree = ast.parse("\n".join(inspect.getsource(make) for make in makers))
    named = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
    read = {node.attr for node in named if node.value.id == "config"}  # pyright: ignore[reportAttributeAccessIssue]
    wired = read | set(readers(POLICY_LOSSES)) | set(BOUNDS) | {"behaviour_log_probs", "kl_loss_importance"}
    assert {key for key, *_ in CASES} | {"distill_loss_coef"} == wired


def test_no_field_of_the_loss_is_left_unset(usual: RlvrConfig) -> None:
    plain = PolicyLoss()
    losses = [loss_of(usual, keys) for _, keys, _, _ in CASES]
    assert {
        field.name
        for field in fields(plain)
        for loss in losses
        if getattr(loss, field.name) != getattr(plain, field.name)
    } == {field.name for field in fields(plain)}
