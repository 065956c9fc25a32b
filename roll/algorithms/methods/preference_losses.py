"""The losses of `preference_loss`. Their classes are in `roll/algorithms/preference.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from roll.algorithms.methods.base import Fields, Method, table


@dataclass(frozen=True)
class PreferenceTraits:
    """Traits of a loss of pairs for the checks and the loop."""

    needs_reference: bool = True
    """Whether it compares with a reference policy."""

    rows: ClassVar[Literal["pairs", "labelled"]] = "pairs"
    """Kind of its rows."""
    compares_rows: ClassVar[bool] = False
    """Whether it compares rows of an update, and needs the reference's log-probs of other pairs of prompt and response in every step."""


@dataclass(frozen=True)
class LabelledTraits(PreferenceTraits):
    """Traits of a loss of single responses with a label."""

    rows: ClassVar[Literal["pairs", "labelled"]] = "labelled"
    compares_rows: ClassVar[bool] = True


def _simpo(keys: Fields) -> Fields:
    return {"beta": keys["beta"], "gamma": keys["simpo_gamma"]}


PREFERENCE_LOSSES = table(
    Method("dpo", PreferenceTraits(), ("beta", "label_smoothing")),
    Method("ipo", PreferenceTraits(), ("beta",)),
    Method("dpo_norm", PreferenceTraits(), ("beta", "label_smoothing")),
    Method("simpo", PreferenceTraits(needs_reference=False), ("beta", "simpo_gamma"), _simpo),
    Method("orpo", PreferenceTraits(needs_reference=False), ("beta",)),
    Method("sft", PreferenceTraits(needs_reference=False)),
    Method("kto", LabelledTraits(), ("beta", "desirable_weight", "undesirable_weight")),
)
