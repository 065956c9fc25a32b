"""The configured `mismatch_correction`, with the configured bounds."""

from __future__ import annotations

from dataclasses import replace

from roll.algorithms.methods.corrections import CorrectionTraits
from roll.config.schema.rlvr import RlvrConfig

BOUNDS = {"mismatch_cap": "cap", "mismatch_low": "low", "mismatch_high": "high"}
"""Fields of `CorrectionTraits`, by the key that sets them."""


def is_corrected(config: RlvrConfig) -> bool:
    """Whether the policy loss corrects for the mismatch between engine and trainer."""
    return config.mismatch_correction.name != "none"


def correction_of(config: RlvrConfig) -> CorrectionTraits | None:
    """Return the settings of the configured correction with its bounds, or None without a correction."""
    if not is_corrected(config):
        return None
    bounds = {"cap": config.mismatch_cap, "low": config.mismatch_low, "high": config.mismatch_high}
    return replace(
        config.mismatch_correction.traits, **{name: bound for name, bound in bounds.items() if bound is not None}
    )
