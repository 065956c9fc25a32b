"""The preference losses of a run, whose weighted sum is the loss. Pure functions of the configuration."""

from __future__ import annotations

from collections.abc import Mapping

from roll.algorithms.methods.base import Method
from roll.algorithms.methods.preference_losses import PREFERENCE_LOSSES, PreferenceTraits
from roll.config.schema.offline import DpoConfig


def added_losses(config: DpoConfig) -> Mapping[Method[PreferenceTraits], float]:
    """Return the losses of `added_preference_losses` with their weights, without unknown names."""
    return {
        PREFERENCE_LOSSES[name]: weight
        for name, weight in config.added_preference_losses.items()
        if name in PREFERENCE_LOSSES
    }


def compares(config: DpoConfig) -> bool:
    """Whether any of the losses needs a reference."""
    return any(method.traits.needs_reference for method in (config.preference_loss, *added_losses(config)))
