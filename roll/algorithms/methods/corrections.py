"""The corrections of `mismatch_correction`: their weights, rejections and usual bounds.

`Correction` in `roll/algorithms/corrections.py` implements all built-in corrections. They differ only in these
settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll.algorithms.methods.base import Method, methods_table

Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class CorrectionTraits:
    """Settings of a correction; see `Correction`. A bound of None means that the correction does not read the key of
    that bound.
    """

    weight: Level | None = None
    cap: float | None = None
    reject: Level | None = None
    low: float | None = None
    high: float | None = None


NO_CORRECTION = Method("none", CorrectionTraits())
CORRECTIONS = methods_table(
    NO_CORRECTION,
    Method("tis", CorrectionTraits(weight="token", cap=2.0)),
    Method("icepop", CorrectionTraits(weight="token", reject="token", low=0.5, high=5.0)),
    Method("seq_tis", CorrectionTraits(weight="sequence", cap=2.0)),
    Method("seq_mis", CorrectionTraits(weight="sequence", reject="sequence", low=0.5, high=2.0)),
    Method("geo_tis", CorrectionTraits(weight="geometric", cap=2.0)),
    Method("token_rs", CorrectionTraits(reject="token", low=0.5, high=2.0)),
    Method("seq_rs", CorrectionTraits(reject="sequence", low=0.5, high=2.0)),
    Method("geo_rs", CorrectionTraits(reject="geometric", low=0.999, high=1.001)),
    Method("geo_rs_tis", CorrectionTraits(weight="token", cap=2.0, reject="geometric", low=0.999, high=1.001)),
)
