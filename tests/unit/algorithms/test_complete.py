"""No shipped loss is without a case in the tests of its formula, of splits, of properties and of extreme ratios, and no
shipped method without a row in the tables of the documentation and a recipe.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

import roll.algorithms
from roll.algorithms.advantages import ADVANTAGES
from roll.algorithms.corrections import Correction
from roll.algorithms.divergence import DistilledPolicy
from roll.algorithms.losses import Loss
from roll.algorithms.methods import CORRECTIONS, ESTIMATORS, POLICY_LOSSES, PREFERENCE_LOSSES
from roll.algorithms.objectives import OBJECTIVES, PolicyLoss
from roll.algorithms.preference import LABELLED_LOSSES, PAIR_OBJECTIVES, Mixture, PreferenceLoss
from tests.unit.algorithms import (
    test_distilled_policy,
    test_objectives,
    test_preference,
    test_properties,
    test_ratios,
    test_split,
)
from tests.unit.docs.pages import first_column

ROOT = Path(__file__).parents[3]
SPLITS: list[Loss] = [*test_split.LOSSES.values(), *test_preference.SPLIT.values(), *test_distilled_policy.LOSSES]
"""Losses whose gradient is shown not to depend on ranks and micro-batches."""
PROPERTIES: list[Loss] = list(test_properties.LOSSES.values())
"""Losses that are shown not to depend on padding, masked tokens and the order of samples."""
each_suite = pytest.mark.parametrize("cases", [SPLITS, PROPERTIES], ids=["splits", "properties"])


def shipped(kind: type) -> set[type]:
    """Return all classes below `kind` that roll's algorithms define."""
    for module in pkgutil.walk_packages(roll.algorithms.__path__, "roll.algorithms."):
        import_module(module.name)
    below = {one for direct in kind.__subclasses__() for one in {direct, *shipped(direct)}}
    return {one for one in below if one.__module__.startswith("roll.")}


@each_suite
def test_every_loss_has_a_case(cases: list[Loss]) -> None:
    assert {type(loss) for loss in cases} == shipped(Loss)
    assert DistilledPolicy in shipped(Loss), "the search finds no losses"


@each_suite
def test_every_policy_loss_has_a_case(cases: list[Loss]) -> None:
    assert {type(loss.objective) for loss in cases if isinstance(loss, PolicyLoss)} == set(OBJECTIVES.values())


@pytest.mark.parametrize("suite", [test_objectives, test_ratios], ids=["test_objectives.py", "test_ratios.py"])
def test_every_policy_loss_has_a_formula_and_extremes(suite: Any) -> None:
    assert {type(objective) for objective in suite.OBJECTIVES} == set(OBJECTIVES.values())


@each_suite
def test_every_preference_loss_has_a_case(cases: list[Loss]) -> None:
    pairs = {type(loss.objective) for loss in cases if isinstance(loss, PreferenceLoss)}
    assert pairs == {*PAIR_OBJECTIVES.values(), Mixture}
    assert {type(loss) for loss in cases} >= set(LABELLED_LOSSES.values())


@each_suite
def test_every_correction_has_a_case(cases: list[Loss]) -> None:
    found = {
        (one.weight, one.reject)
        for loss in cases
        if isinstance(loss, PolicyLoss) and isinstance(one := loss.correction, Correction)
    }
    assert found == {(one.traits.weight, one.traits.reject) for one in CORRECTIONS.values()} - {(None, None)}


def test_every_policy_loss_has_a_recipe() -> None:
    recipes = [
        yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / "examples/algorithms").glob("*.yaml")
    ]
    assert {recipe["policy_loss"] for recipe in recipes if "policy_loss" in recipe} | {"ppo"} == set(POLICY_LOSSES)


@pytest.mark.parametrize(
    ("page", "key", "methods"),
    [
        ("docs/algorithms.md", "adv_estimator", {*ESTIMATORS, *ADVANTAGES}),
        ("docs/algorithms.md", "policy_loss", {*POLICY_LOSSES, *OBJECTIVES}),
        ("docs/algorithms.md", "mismatch_correction", set(CORRECTIONS) - {"none"}),
        ("docs/post_training.md", "preference_loss", {*PREFERENCE_LOSSES, *PAIR_OBJECTIVES, *LABELLED_LOSSES}),
    ],
)
def test_every_method_has_a_row(page: str, key: str, methods: Iterable[str]) -> None:
    rows = first_column(page, f"`{key}`")
    assert set(rows) == set(methods)
    assert len(rows) == len(set(rows)), "a method has two rows"
