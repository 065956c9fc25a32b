"""The keys that name a method, what they know by name, and what the user's own must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roll.algorithms.methods.base import Methods
from roll.algorithms.methods.corrections import CORRECTIONS, CorrectionTraits
from roll.algorithms.methods.estimators import ESTIMATORS, EstimatorTraits
from roll.algorithms.methods.policy_losses import POLICY_LOSSES, PolicyLossTraits
from roll.algorithms.methods.preference_losses import PREFERENCE_LOSSES, PreferenceTraits


@dataclass(frozen=True)
class Kind:
    """One such key."""

    key: str
    noun: str
    known: Methods[Any]
    traits: Any
    """Traits of a user's method that declares none."""
    call: tuple[str, ...]
    """The arguments that it is called with."""
    base: str | None = None
    """`module:Name` of the protocol that a frozen dataclass of the user's derives from; None takes a function."""

    @property
    def arguments(self) -> str:
        """The key that holds the keys of the user's own."""
        return f"{self.key}_args"


KINDS = {
    kind.key: kind
    for kind in (
        Kind("adv_estimator", "an advantage estimator", ESTIMATORS, EstimatorTraits(), ("scores", "norm")),
        Kind("policy_loss", "a policy loss", POLICY_LOSSES, PolicyLossTraits(), ("tokens",), "roll.algorithms.objectives:Objective"),
        Kind(
            "preference_loss",
            "a preference loss",
            PREFERENCE_LOSSES,
            PreferenceTraits(),
            ("chosen", "rejected"),
            "roll.algorithms.preference:PairObjective",
        ),
        Kind(
            "mismatch_correction",
            "a correction",
            CORRECTIONS,
            CorrectionTraits(),
            ("delta", "lengths"),
            "roll.algorithms.corrections:MismatchCorrection",
        ),
    )
}
