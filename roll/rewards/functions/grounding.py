"""A reward for boxes around the objects of a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.algorithms.methods import declares
from roll.rewards.answers import final_text, ground_truth
from roll.rewards.base import REWARDS, RewardTraits
from roll.rewards.boxes import MOST, Box, boxes_in, overlaps, pairs_by_overlap, rescaled, same_labels
from roll.types import Prompt, RewardOutcome, RewardResult

ENOUGH = 0.5
"""Overlap at which a box counts as found in most benchmarks of grounding, among them RefCOCO's."""


def wanted_boxes(row: Mapping[str, Any]) -> list[Box]:
    """Return the boxes of the reference answer. Raises ValueError if it has none."""
    if not (boxes := boxes_in(reference := ground_truth(row))):
        raise ValueError(f"the reference answer {reference[:80]!r} has no box")
    return boxes


@REWARDS.register("grounding")
@declares(RewardTraits(check_row=wanted_boxes, passes_at=ENOUGH))
def grounding(
    prompt: Prompt,
    response: str,
    row: Mapping[str, Any],
    *,
    threshold: float = 0.0,
    pixels_to: float | None = None,
) -> RewardResult:
    """Return the overlaps of the boxes found with those wanted: their sum, divided by the larger number of boxes.

    Overlap is intersection over union. Boxes with the same label are paired, those with the largest overlap first;
    labels count only if the reference has any. For one box in both, the reward is their overlap. A box too many and a
    missing one lower the reward alike. At most 100 boxes of a response count.

    Args:
        threshold: an overlap below this counts as 0.
        pixels_to: the response is in pixels of the picture as the model sees it, as from Qwen2.5-VL, and the reference
            on a scale from 0 to this number. None: both are on the same scale.

    Raises:
        ValueError: the reference answer has no box.
    """
    wanted, found = wanted_boxes(row), boxes_in(final_text(response))[:MOST]
    if not found:
        return RewardResult(0.0, RewardOutcome.UNPARSABLE, note="no box in the response")
    if pixels_to is not None:
        found = rescaled(found, row, pixels_to)
    shared = overlaps(found, wanted)
    if any(box.label for box in wanted):
        shared = shared * same_labels(found, wanted)
    total = sum(shared[pair] for pair in pairs_by_overlap(shared, threshold))
    return RewardResult(float(total) / max(len(found), len(wanted)), note=f"{len(found)} boxes")
