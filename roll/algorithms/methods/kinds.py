"""The configuration keys that select a method, their built-in methods, and the requirements for user-defined
methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roll.algorithms.methods.base import Methods
from roll.algorithms.methods.corrections import CORRECTIONS, CorrectionTraits
from roll.algorithms.methods.estimators import ESTIMATORS, EstimatorTraits
from roll.algorithms.methods.policy_losses import POLICY_LOSSES, PolicyLossTraits
from roll.algorithms.methods.preference_losses import PREFERENCE_LOSSES, PreferenceTraits


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
    """`module:Name` of the protocol from which a user-defined frozen dataclass derives. None: the user defines a
    function.
    """

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
