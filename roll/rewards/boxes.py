"""Boxes around objects in a picture: reading them from text, comparing and pairing them. Pure functions."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from roll.data.picture_parts import SIZES

OBJECT = re.compile(r"\{[^{}]*\}")
"""Matches an object of JSON without others in it."""
FOUR = re.compile(r"[\[(<]" + r"\s*,\s*".join([r"\s*(-?\d+(?:\.\d+)?)\s*"] * 4) + r"[\])>]")
"""Matches four numbers in brackets."""
CORNERS = re.compile(r"\(\s*(-?[\d.]+)\s*,\s*(-?[\d.]+)\s*\)\s*,?\s*\(\s*(-?[\d.]+)\s*,\s*(-?[\d.]+)\s*\)")
"""Matches two corners, as Qwen-VL writes them."""
PLACES = ("bbox_2d", "bbox", "box_2d", "box")
"""Keys of an object that hold the four numbers."""
MOST = 100
"""Largest number of boxes of a response that are compared. COCO compares as many."""
RECALLS = np.linspace(0.0, 1.0, 101)
COCO = tuple((50 + 5 * step) / 100 for step in range(10))
"""Thresholds of overlap over which COCO takes the mean."""


@dataclass(frozen=True)
class Box:
    """A box, from its upper left corner to its lower right one."""

    left: float
    top: float
    right: float
    bottom: float
    label: str = ""

    @property
    def area(self) -> float:
        """Return the area."""
        return (self.right - self.left) * (self.bottom - self.top)


def boxes_in(text: str) -> list[Box]:
    """Return the boxes in a text, each place once; labels in lower case.

    Read are objects such as `{"bbox_2d": [x1, y1, x2, y2], "label": "cat"}`, wherever they stand. If there is none:
    four numbers in brackets, or two corners `(x1, y1), (x2, y2)`. A box whose corners are in the wrong order is left
    out.
    """
    found = [box for match in OBJECT.finditer(text) if (box := _of_object(match[0])) is not None]
    if not found:
        found = [box for form in (FOUR, CORNERS) for match in form.finditer(text) if (box := _box(match.groups()))]
    return [*{(box.left, box.top, box.right, box.bottom): box for box in reversed(found)}.values()][::-1]


def _of_object(text: str) -> Box | None:
    try:
        read: Any = json.loads(text)
    except ValueError:
        try:
            read = ast.literal_eval(text)  # single quotes
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    if not isinstance(read, Mapping):
        return None
    numbers = next((read[key] for key in PLACES if key in read), None)
    label = read.get("label", "")
    return _box(numbers, label.strip().lower() if isinstance(label, str) else "")


def _box(numbers: Any, label: str = "") -> Box | None:
    if not isinstance(numbers, list | tuple) or len(numbers) != 4:
        return None
    try:
        left, top, right, bottom = (float(number) for number in numbers)
    except (TypeError, ValueError):
        return None
    ordered = math.isfinite(left + top + right + bottom) and left <= right and top <= bottom
    return Box(left, top, right, bottom, label) if ordered else None


def rescaled(boxes: Sequence[Box], row: Mapping[str, Any], scale: float) -> list[Box]:
    """Return boxes in pixels of the row's first picture, as the model sees it, on a scale from 0 to `scale`.

    Raises:
        ValueError: the row has no sizes of pictures.
    """
    sizes = row.get(SIZES)
    if not sizes:
        raise ValueError(f"the row shows no picture, so it has no {SIZES}")
    width, height = (float(side) for side in sizes[0])
    across, down = scale / width, scale / height
    return [
        replace(box, left=box.left * across, right=box.right * across, top=box.top * down, bottom=box.bottom * down)
        for box in boxes
    ]


def overlap(one: Box, other: Box) -> float:
    """Return the intersection over union of two boxes; 0 for two without an area."""
    width = min(one.right, other.right) - max(one.left, other.left)
    height = min(one.bottom, other.bottom) - max(one.top, other.top)
    shared = max(width, 0.0) * max(height, 0.0)
    return shared / (one.area + other.area - shared) if shared else 0.0


def overlaps(found: Sequence[Box], wanted: Sequence[Box]) -> np.ndarray:
    """Return the overlap of each box with each other, fp64 [found, wanted]."""
    return np.array([[overlap(one, other) for other in wanted] for one in found]).reshape(len(found), len(wanted))


def same_labels(found: Sequence[Box], wanted: Sequence[Box]) -> np.ndarray:
    """Return whether each box has the label of each other, bool [found, wanted]."""
    return np.array([[one.label == other.label for other in wanted] for one in found], bool)


Pair = tuple[int, int]
"""Indices of a box that was found and of the one that was wanted."""


def pairs_by_overlap(shared: np.ndarray, threshold: float) -> list[Pair]:
    """Return pairs of boxes, those with the largest overlap first, whatever their labels. Each box is in one at most.

    Args:
        shared: [found, wanted], see `overlaps`.
        threshold: smallest overlap of a pair.
    """
    pairs: list[Pair] = []
    taken: tuple[set[int], set[int]] = (set(), set())
    for place in np.argsort(-shared, axis=None, kind="stable"):
        one, other = divmod(int(place), shared.shape[1])
        if shared[one, other] < threshold:
            break
        if one not in taken[0] and other not in taken[1]:
            pairs.append((one, other))
            taken[0].add(one)
            taken[1].add(other)
    return pairs


def pairs_by_label(shared: np.ndarray, found: Sequence[Box], wanted: Sequence[Box], threshold: float) -> list[Pair]:
    """Return pairs of boxes with the same label. Each wanted box, in order, takes the free one that overlaps most."""
    pairs: list[Pair] = []
    free = list(range(len(found)))
    for other, box in enumerate(wanted):
        fitting = [one for one in free if found[one].label == box.label]
        best = max(fitting, key=lambda one: float(shared[one, other]), default=None)
        if best is not None and shared[best, other] >= threshold:
            pairs.append((best, other))
            free.remove(best)
    return pairs


def average_precision(found: Sequence[Box], wanted: Sequence[Box], threshold: float) -> float:
    """Return COCO's average precision of the boxes of one picture, mean over the labels that are wanted.

    All boxes are equally sure, so their order is that of the response; the first 100 of a label count. As in COCO's
    `COCOeval`: precision is interpolated at 101 points of recall.
    """
    return float(np.mean([_of_label(found, wanted, label, threshold) for label in {box.label for box in wanted}]))


def _of_label(found: Sequence[Box], wanted: Sequence[Box], label: str, threshold: float) -> float:
    ours = [box for box in found if box.label == label][:MOST]
    theirs = [box for box in wanted if box.label == label]
    free, hits = set(range(len(theirs))), []
    for box in ours:
        fitting = [(overlap(box, theirs[other]), other) for other in free]
        best = max(fitting, default=(0.0, -1))
        hits.append(best[0] >= threshold)
        free -= {best[1]} if hits[-1] else set()
    right = np.cumsum(hits, dtype=np.float64)
    precision = np.maximum.accumulate((right / np.arange(1, len(hits) + 1))[::-1])[::-1]
    reached = np.searchsorted(right / len(theirs), RECALLS, side="left")
    return float(np.concatenate([precision, [0.0]])[reached].mean())
