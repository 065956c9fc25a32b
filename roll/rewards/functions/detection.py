"""A reward for detected objects with the arithmetic of Orsta (arXiv 2505.18129), which ROLL's files name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from roll.algorithms.methods import declares
from roll.rewards.answers import ground_truth
from roll.rewards.base import REWARDS, RewardTraits
from roll.rewards.boxes import (
    COCO,
    MOST,
    Box,
    Pair,
    average_precision,
    boxes_in,
    overlaps,
    pairs_by_label,
    pairs_by_overlap,
    rescaled,
    same_labels,
)
from roll.types import Prompt, RewardResult

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
LINES = "\n<answer>\n", "\n</answer>"
"""The lines around an answer in the right form."""
THRESHOLDS = (*COCO, 0.99)
BY_LABEL, BY_OVERLAP, COMPLETE = "iou_max_label_first", "iou_max_iou_first", "iou_completeness"
SCORES = (BY_LABEL, BY_OVERLAP, "map", "map50", "map75")
"""Scores that `det_reward_ratio` weighs."""
PER_BOX = 0.6
"""Factor for each box too many or too few."""


def check_reference(row: Mapping[str, Any]) -> None:
    """Raise ValueError if the row has no boxes to find, or no weights of scores."""
    _wanted(row)
    _weights(row)


def _wanted(row: Mapping[str, Any]) -> list[Box]:
    reference = ground_truth(row)
    answer = ANSWER.search(reference)
    if not (boxes := boxes_in(answer[1] if answer else reference)):
        raise ValueError(f"the reference answer {reference[:80]!r} has no box")
    return boxes


def _settings(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    block = row.get("reward_model")
    settings = block.get("verifier_parm") if isinstance(block, Mapping) else None
    if not isinstance(block, Mapping) or not isinstance(settings, Mapping):
        raise ValueError("the row has no 'reward_model' with 'verifier_parm'")
    return block, settings


def _weights(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the weights of the scores; those outside [0, 1] count as 0, as in ROLL. Raises ValueError if all are 0."""
    given = _settings(row)[1].get("det_reward_ratio")
    if not isinstance(given, Mapping):
        raise ValueError("the row has no 'det_reward_ratio' in 'reward_model.verifier_parm'")
    read = {key: float(given.get(key) or 0.0) for key in (*SCORES, COMPLETE)}
    weights = {key: value if 0 <= value <= 1 else 0.0 for key, value in read.items()}
    if not sum(weights[key] for key in SCORES):
        raise ValueError("all weights in 'det_reward_ratio' are 0")
    return weights


@REWARDS.register("detection")
@declares(RewardTraits(check_row=check_reference, passes_at=None))
def detection(prompt: Prompt, response: str, row: Mapping[str, Any], *, pixels_to: float | None = None) -> RewardResult:
    """Return the weighted mean of accuracy and form, by the weights of the row: `reward_model.accuracy_ratio` (1 if
    missing) and `format_ratio` (0.1).

    The boxes are those in the first `<answer>...</answer>`. The form is 1 if the tags stand on lines of their own and
    there is a box. Accuracy is the mean of these scores, weighted by `reward_model.verifier_parm.det_reward_ratio`,
    times 0.6 for each box too many or too few:

    - `iou_max_label_first`: wanted boxes take, in order, the box with their label that overlaps most. The score is the
      overlap per wanted box, mixed with the mean of precision and recall by the weight `iou_completeness`; mean over
      pairs that overlap by at least 0.5, 0.55, ..., 0.95, and 0.99.
    - `iou_max_iou_first`: the same, with pairs of largest overlap first; a pair of different labels has overlap 0.
    - `map`, `map50`, `map75`: COCO's average precision. `map75` has a weight, as in ROLL.

    ROLL's own pairs of `iou_max_iou_first` are not those of largest overlap, and a list with a broken object is worth 0
    there; here its other boxes count.

    Args:
        pixels_to: as in `grounding`; it applies to rows whose `verifier_parm.det_verifier_normalized` is true.

    Raises:
        ValueError: the reference answer has no box, or the row has no weights.
    """
    block, settings = _settings(row)
    wanted, weights = _wanted(row), _weights(row)
    answer = ANSWER.search(response.strip())
    found = boxes_in(answer[1].lower())[:MOST] if answer else []
    form = float(bool(found) and LINES[0] in response and response.count(LINES[1]) == 1)
    if found and pixels_to is not None and settings.get("det_verifier_normalized"):
        found = [_whole(box) for box in rescaled(found, row, pixels_to)]
    accuracy = accuracy_of(found, wanted, weights) if found else 0.0
    shares = {"accuracy": float(block.get("accuracy_ratio", 1.0)), "format": float(block.get("format_ratio", 0.1))}
    parts = {"accuracy": accuracy * shares["accuracy"], "format": form * shares["format"]}
    parts = {name: value / sum(shares.values()) for name, value in parts.items()}
    return RewardResult(sum(parts.values()), parts=parts, note=f"{len(found)} boxes")


def _whole(box: Box) -> Box:
    sides = {side: float(math.trunc(getattr(box, side))) for side in ("left", "top", "right", "bottom")}
    return replace(box, **sides)


def accuracy_of(found: Sequence[Box], wanted: Sequence[Box], weights: Mapping[str, float]) -> float:
    """Return the accuracy of at least one box; see `detection`."""
    shared, share = overlaps(found, wanted), weights[COMPLETE]
    same = same_labels(found, wanted)
    by_label = [pairs_by_label(shared, found, wanted, threshold) for threshold in THRESHOLDS]
    by_overlap = [pairs_by_overlap(shared, threshold) for threshold in THRESHOLDS]
    scores = {
        BY_LABEL: np.mean([_mixed(shared, pairs, share) for pairs in by_label]),
        BY_OVERLAP: np.mean([_mixed(shared * same, pairs, share) for pairs in by_overlap]),
        "map": np.mean([average_precision(found, wanted, threshold) for threshold in COCO]),
        "map50": average_precision(found, wanted, 0.5),
        "map75": average_precision(found, wanted, 0.75),
    }
    total = sum(weights[key] * scores[key] for key in SCORES) / sum(weights[key] for key in SCORES)
    return float(total * PER_BOX ** abs(len(found) - len(wanted)))


def _mixed(shared: np.ndarray, pairs: Sequence[Pair], share: float) -> float:
    """Return the overlap of pairs per wanted box, mixed with the mean of precision and recall by `share`."""
    found, wanted = shared.shape
    mean = sum(shared[pair] for pair in pairs) / wanted
    return float((1 - share) * mean + share * (len(pairs) / wanted + len(pairs) / found) / 2)
