"""The keys that name a method, with the built-in methods, and the requirements of the user's own."""

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
    """Traits of a user's method without a declaration."""
    call: tuple[str, ...]
    """Arguments of its call."""
    base: str | None = None
    """`module:Name` of the protocol that the user's frozen dataclass derives from. None means a function."""

    @property
    def arguments(self) -> str:
        """The key with the arguments of the user's own method."""
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
