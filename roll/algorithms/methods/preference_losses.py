"""The losses of `preference_loss`. Their classes are in `roll/algorithms/preference.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from roll.algorithms.methods.base import Fields, Method, methods_table


@dataclass(frozen=True)
class PreferenceTraits:
    """Traits of a loss on preference pairs, used by the configuration checks and the training loop."""

    needs_reference: bool = True
    """Whether it uses the log-probs of a reference policy."""

    rows: ClassVar[Literal["pairs", "labelled"]] = "pairs"
    """Kind of data rows on which it trains."""
    compares_rows: ClassVar[bool] = False
    """Whether it compares the rows of an update, and needs reference log-probs of mismatched prompts and responses in
    every step.
    """


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
