"""Rewards of answers about pictures: boxes, counts, text and values of charts."""

from __future__ import annotations

import random
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from roll.rewards.boxes import Box, average_precision, boxes_in, overlap, overlaps, pairs_by_overlap, rescaled
from roll.rewards.functions.anls import anls, edit_distance
from roll.rewards.functions.counting import counting
from roll.rewards.functions.detection import check_reference, detection
from roll.rewards.functions.grounding import grounding
from roll.rewards.functions.relaxed_accuracy import relaxed_accuracy
from roll.types import Prompt, RewardOutcome
from tests.growth import ABOUT_LINEAR, growth

PROMPT = Prompt(0, np.zeros(1, dtype=np.int32), "", "any", {})
CAT = '{"bbox_2d": [0, 0, 10, 10], "label": "cat"}'
DOG = '{"bbox_2d": [20, 20, 40, 40], "label": "dog"}'


def some_box(chance: random.Random) -> Box:
    left, top = chance.randint(0, 20), chance.randint(0, 20)
    return Box(left, top, left + chance.randint(0, 12), top + chance.randint(0, 12), chance.choice("ab"))


def pixels(box: Box) -> set[tuple[int, int]]:
    """Return the unit squares that a box with whole corners covers."""
    return {(x, y) for x in range(int(box.left), int(box.right)) for y in range(int(box.top), int(box.bottom))}


def test_overlap_is_that_of_counted_pixels() -> None:
    chance = random.Random(0)
    for _ in range(300):
        one, other = some_box(chance), some_box(chance)
        both, either = pixels(one) & pixels(other), pixels(one) | pixels(other)
        assert overlap(one, other) == pytest.approx(len(both) / len(either) if either else 0.0)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"[{CAT}, {DOG}]", [Box(0, 0, 10, 10, "cat"), Box(20, 20, 40, 40, "dog")]),
        (f"```json\n[{CAT}, {DOG[:-2]}", [Box(0, 0, 10, 10, "cat")]),
        ("[{'bbox_2d': [1, 2.5, 3, 4], 'label': ' Cat '}]", [Box(1, 2.5, 3, 4, "cat")]),
        (f"{CAT} {CAT}", [Box(0, 0, 10, 10, "cat")]),
        ("at [1, 2, 3, 4].", [Box(1, 2, 3, 4)]),
        ("<|box_start|>(1,2),(3,4)<|box_end|>", [Box(1, 2, 3, 4)]),
        ("[3, 2, 1, 4]", []),
        ('{"bbox_2d": [1, 2, 3], "label": "cat"}', []),
        ('{"bbox_2d": [1, 2, 3, 1e999]}', []),
        ('{"bbox_2d": [1, 2, 3, "x"]} {"a": 1}', []),
        ("none", []),
    ],
)
def test_boxes_are_read_from_text(text: str, found: list[Box]) -> None:
    assert boxes_in(text) == found


def test_time_to_read_boxes_grows_linearly() -> None:
    for piece in ("{", CAT, "[1, 2, 3, 4", "(1,2),(3", "1, "):
        assert growth(boxes_in, lambda size, piece=piece: piece * size, 500) < ABOUT_LINEAR, piece


def test_pairs_take_largest_overlap_first() -> None:
    shared = np.array([[0.6, 0.9], [0.5, 0.8]])
    assert pairs_by_overlap(shared, 0.5) == [(0, 1), (1, 0)] and pairs_by_overlap(shared, 0.7) == [(0, 1)]


def test_grounding_of_one_box_is_its_overlap() -> None:
    row = {"ground_truth": "[0, 0, 10, 10]"}
    assert grounding(PROMPT, "It is at [0, 0, 10, 5].", row).value == 0.5
    assert grounding(PROMPT, "It is at [0, 0, 10, 5].", row, threshold=0.6).value == 0
    assert grounding(PROMPT, CAT, row).value == 1, "the reference has no label"
    assert grounding(PROMPT, "nowhere", row).outcome is RewardOutcome.UNPARSABLE
    with pytest.raises(ValueError, match="no box"):
        grounding(PROMPT, CAT, {"ground_truth": "left"})


def test_grounding_counts_missing_and_additional_boxes() -> None:
    row = {"ground_truth": f"[{CAT}, {DOG}]"}
    assert grounding(PROMPT, f"[{DOG}, {CAT}]", row).value == 1
    assert grounding(PROMPT, CAT, row).value == 0.5
    assert grounding(PROMPT, f"{CAT} {DOG} [[{DOG.replace('20', '30')}]]", row).value == pytest.approx(2 / 3)
    assert grounding(PROMPT, CAT.replace("cat", "dog"), row).value == 0


def test_grounding_is_below_best_pairing_of_labels() -> None:
    chance = random.Random(1)
    for _ in range(100):
        wanted, found = ([some_box(chance) for _ in range(chance.randint(1, 3))] for _ in range(2))
        written = [
            str([{"bbox_2d": [box.left, box.top, box.right, box.bottom], "label": box.label} for box in boxes])
            for boxes in (wanted, found)
        ]
        wanted, found = (boxes_in(text) for text in written)
        fits = overlaps(found, wanted) * [[one.label == other.label for other in wanted] for one in found]
        most, least = max(len(found), len(wanted)), min(len(found), len(wanted))
        squared = np.zeros((most, most))
        squared[: len(found), : len(wanted)] = fits
        best = max(sum(squared[range(most), order]) for order in permutations(range(most)))
        value = grounding(PROMPT, written[1], {"ground_truth": written[0]}).value
        assert value <= best / most + 1e-9 and (least > 1 or value == pytest.approx(best / most))


def test_boxes_in_pixels_are_brought_to_scale() -> None:
    row = {"ground_truth": "[0, 500, 250, 1000]", "picture_sizes": [[40, 80]]}
    assert grounding(PROMPT, "[0, 40, 10, 80]", row, pixels_to=1000).value == 1
    with pytest.raises(ValueError, match="no picture"):
        rescaled([Box(0, 0, 1, 1)], {}, 1000)


def test_average_precision_by_hand() -> None:
    wanted = [Box(0, 0, 10, 10, "a"), Box(50, 0, 60, 10, "a")]
    wrong = Box(80, 80, 90, 90, "a")
    assert average_precision(wanted, wanted, 0.5) == pytest.approx(1)
    # Recall reaches 1/2 with the first box, and no more: 51 of the 101 points have precision 1.
    assert average_precision([wanted[0], wrong], wanted, 0.5) == pytest.approx(51 / 101)
    # Precision is 1/2 from the second box on, and 2/3 after the third, which is interpolated to the left.
    assert average_precision([wrong, *wanted], wanted, 0.5) == pytest.approx(2 / 3)
    assert average_precision([wrong], [*wanted, Box(0, 0, 9, 9, "b")], 0.5) == 0
    assert average_precision([wanted[0]] * 2, [wanted[0], Box(0, 0, 9, 9, "b")], 0.5) == pytest.approx(1 / 2)


def of_roll(weights: dict[str, float], **more: Any) -> dict[str, Any]:
    """Return a row with one cat and one dog to detect."""
    truth = f"<answer>[{CAT}, {DOG}]</answer>"
    block = {"ground_truth": truth, "verifier_parm": {"det_reward_ratio": weights, **more}}
    return {"ground_truth": truth, "reward_model": block, "picture_sizes": [[500, 250]]}


def lines(answer: str) -> str:
    return f"<think>Look.</think>\n<answer>\n{answer}\n</answer>"


def test_detection_by_hand() -> None:
    both = lines(f"[{CAT}, {DOG}]")
    for score in ("iou_max_label_first", "iou_max_iou_first", "map", "map50", "map75"):
        assert detection(PROMPT, both, of_roll({score: 1})).value == pytest.approx(1)
    # One of two: overlap per wanted box 1/2, precision 1, recall 1/2, and one box is missing.
    one = lines(f"[{CAT}]")
    for score, share, value in (
        ("iou_max_label_first", 0.0, 0.5),
        ("iou_max_label_first", 1.0, 0.75),
        ("iou_max_iou_first", 0.5, 0.625),
        ("map50", 0.0, 0.5),
    ):
        result = detection(PROMPT, one, of_roll({score: 1, "iou_completeness": share}))
        assert result.value == pytest.approx((0.6 * value + 0.1) / 1.1), score
        assert result.parts["format"] == pytest.approx(0.1 / 1.1)
    # An overlap of 1/2 of the cat counts at the threshold 0.5 alone, of 11.
    half = lines(f"[{CAT.replace('10, 10', '10, 5')}, {DOG}]")
    value = detection(PROMPT, half, of_roll({"iou_max_label_first": 1})).parts["accuracy"]
    assert value == pytest.approx((0.5 + 0.25 / 11) / 1.1)


def test_detection_compares_labels_after_pairing_overlaps() -> None:
    swapped = lines(f"[{CAT.replace('cat', 'dog')}, {DOG}]")
    by_overlap = detection(PROMPT, swapped, of_roll({"iou_max_iou_first": 1, "iou_completeness": 0.5}))
    assert by_overlap.parts["accuracy"] == pytest.approx((0.25 + 0.5) / 1.1)


def test_detection_without_form_or_answer() -> None:
    row = of_roll({"map": 1})
    assert detection(PROMPT, f"<answer>[{CAT}, {DOG}]</answer>", row).value == pytest.approx(1 / 1.1)
    assert detection(PROMPT, f"[{CAT}, {DOG}]", row).value == 0
    assert detection(PROMPT, lines("none"), row).value == 0


def test_detection_in_pixels_where_row_says_so() -> None:
    shrunk = lines("[{'bbox_2d': [0, 0, 5, 2.5], 'label': 'cat'}, {'bbox_2d': [10, 5, 20, 10], 'label': 'dog'}]")
    row = of_roll({"map": 1}, det_verifier_normalized=True)
    assert detection(PROMPT, shrunk, row, pixels_to=1000).value == pytest.approx(1)
    assert detection(PROMPT, shrunk, row).value < 0.5
    assert detection(PROMPT, shrunk, of_roll({"map": 1}), pixels_to=1000).value < 0.5


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"ground_truth": CAT}, "reward_model"),
        (of_roll({}), "are 0"),
        (of_roll({"map": 2.0}), "are 0"),
        (of_roll({"map": 1}) | {"ground_truth": "left"}, "no box"),
        ({"ground_truth": CAT, "reward_model": {"verifier_parm": {}}}, "det_reward_ratio"),
    ],
)
def test_unusable_row_of_detection_is_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_reference(row)


@pytest.mark.parametrize(
    ("response", "value", "partial"),
    [
        ("There are 12 cats.", 1.0, 1.0),
        ("twelve", 1.0, 1.0),
        ("First 3, then \\boxed{12} and 5", 1.0, 1.0),
        ("9", 0.0, 0.75),
        ("24,000", 0.0, 0.0),
        ("12.5 12th", 0.0, 0.0),
        ("<think>12</think> 11", 0.0, 11 / 12),
        ("many", 0.0, 0.0),
    ],
)
def test_counting(response: str, value: float, partial: float) -> None:
    row = {"ground_truth": 12}
    assert counting(PROMPT, response, row).value == value
    assert counting(PROMPT, response, row, partial=True).value == pytest.approx(partial)


def test_counting_of_nothing_and_without_reference() -> None:
    assert counting(PROMPT, "none are there: 0", {"ground_truth": "zero"}, partial=True).value == 1
    assert counting(PROMPT, "1", {"ground_truth": "0"}, partial=True).value == 0
    with pytest.raises(ValueError, match="whole number"):
        counting(PROMPT, "1", {"ground_truth": "1.5"})


def distance_by_table(one: str, other: str) -> int:
    """Return the edit distance by the table of all distances of beginnings."""
    row = list(range(len(other) + 1))
    for above, left in enumerate(one, start=1):
        diagonal, row[0] = row[0], above
        for place, right in enumerate(other, start=1):
            diagonal, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, diagonal + (left != right))
    return row[-1]


def test_edit_distance_is_that_of_table() -> None:
    chance = random.Random(2)
    for _ in range(500):
        one, other = ("".join(chance.choices("ab é", k=chance.randint(0, 90))) for _ in range(2))
        assert edit_distance(one, other) == distance_by_table(one, other)


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("Coca Cola", 1.0),
        (" coca\ncola ", 1.0),
        ("coca cole", 1 - 1 / 9),
        ("<think>Pepsi</think>It is \\boxed{coca cola}", 1.0),
        ("pepsi", 0.0),
        ("", 0.0),
        ("x" * 30_000, 0.0),
    ],
)
def test_similarity_of_text_read(response: str, value: float) -> None:
    assert anls(PROMPT, response, {"ground_truth": "Coca Cola"}).value == pytest.approx(value)
    assert anls(PROMPT, response, {"answers": ["Fanta", "Coca Cola", 3]}).value == pytest.approx(value)


def test_similarity_with_case_and_bound() -> None:
    row = {"ground_truth": "Stop"}
    assert anls(PROMPT, "stop", row, ignore_case=False).value == 0.75
    assert anls(PROMPT, "stop", row, ignore_case=False, least=0.8).value == 0
    with pytest.raises(ValueError, match="neither"):
        anls(PROMPT, "stop", {"answers": []})


@pytest.mark.parametrize(
    ("response", "reference", "value"),
    [
        ("104", "100", 1.0),
        ("105.5", "100", 0.0),
        ("The answer is 1,040.", "1000", 1.0),
        ("<answer>-95</answer>", "-100", 1.0),
        ("\\boxed{0.42}", "42%", 1.0),
        ("42 %", "0.42", 1.0),
        ("42%", "42", 1.0),
        ("$5", "5", 1.0),
        ("0.01", "0", 0.0),
        ("Answer: New  York", "new york.", 1.0),
        ("York", "New York", 0.0),
        (".", "-", 0.0),
        ("5 in 2010", "5", 0.0),
    ],
)
def test_relaxed_accuracy(response: str, reference: str, value: float) -> None:
    assert relaxed_accuracy(PROMPT, response, {"ground_truth": reference}).value == value
