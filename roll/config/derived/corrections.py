"""The named corrections of `mismatch_correction`: what each weighs, what it rejects, and its usual bounds. No code of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from roll.config.schema.rlvr import RlvrConfig

Level = Literal["token", "sequence", "geometric"]
BOUNDS = {"mismatch_cap": "cap", "mismatch_low": "low", "mismatch_high": "high"}
"""Keys to fields of `Preset`."""


@dataclass(frozen=True)
class Preset:
    """See `roll.algorithms.corrections.Correction`, whose fields these are. A bound that is None is none of this preset."""

    weight: Level | None = None
    cap: float | None = None
    reject: Level | None = None
    low: float | None = None
    high: float | None = None


PRESETS: Mapping[str, Preset] = {
    "tis": Preset(weight="token", cap=2.0),
    "icepop": Preset(weight="token", reject="token", low=0.5, high=5.0),
    "seq_tis": Preset(weight="sequence", cap=2.0),
    "seq_mis": Preset(weight="sequence", reject="sequence", low=0.5, high=2.0),
    "geo_tis": Preset(weight="geometric", cap=2.0),
    "token_rs": Preset(reject="token", low=0.5, high=2.0),
    "seq_rs": Preset(reject="sequence", low=0.5, high=2.0),
    "geo_rs": Preset(reject="geometric", low=0.999, high=1.001),
    "geo_rs_tis": Preset(weight="token", cap=2.0, reject="geometric", low=0.999, high=1.001),
}


def correction_of(config: RlvrConfig) -> Preset | None:
    """The preset that the configuration names, with its own bounds where it gives them; None for none."""
    preset = PRESETS.get(config.mismatch_correction)
    if preset is None:
        return None
    bounds = {"cap": config.mismatch_cap, "low": config.mismatch_low, "high": config.mismatch_high}
    return replace(preset, **{name: bound for name, bound in bounds.items() if bound is not None})
