"""The choice of the responses that the report page shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from roll.tracking.jsonl import JsonlTracker
from roll.tracking.report.write import LONGEST, Kept, choose_samples, count_sampled, halving, page_samples, shortened
from roll.types import RolloutGroup


@given(st.integers(0, 300))
def test_halving_order_visits_each_index_once_evenly(count: int) -> None:
    order = list(halving(count))
    assert sorted(order) == list(range(count))
    for taken in range(2, count + 1):
        seen = sorted(order[:taken])
        widest = max(later - earlier for earlier, later in zip(seen[:-1], seen[1:], strict=True))
        # After 2^k + 1 visits, every gap has been halved k times, and half of an odd gap is rounded up.
        halved = (taken - 1).bit_length() - 1
        assert seen[0] == 0 and seen[-1] == count - 1 and widest <= (count - 1) / 2**halved + 1


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 50)), max_size=60), st.integers(0, 800))
def test_whole_steps_are_chosen_within_the_budget(lines: list[tuple[int, int]], budget: int) -> None:
    kept = [Kept(place, step, size, 1) for place, (step, size) in enumerate(sorted(lines))]
    chosen = choose_samples(kept, budget)
    assert chosen == sorted(chosen, key=lambda line: line.begin)
    if sum(line.characters for line in kept) <= budget:
        assert chosen == kept
    elif sum(line.characters for line in kept if line.step == kept[0].step) > budget:
        assert chosen == kept[:1], "if not even the first step fits, one of its lines is shown"
    else:
        assert sum(line.characters for line in chosen) <= budget
        steps = {line.step for line in chosen}
        assert [line for line in kept if line.step in steps] == chosen, "a step is shown completely or not at all"


def test_a_step_that_just_fits_is_shown() -> None:
    lines = [Kept(place, place, 10, 1) for place in range(3)]
    assert [[line.step for line in choose_samples(lines, budget)] for budget in (9, 10, 19, 20, 29, 30)] == [
        [0],
        [0],
        [0],
        [0, 2],
        [0, 2],
        [0, 1, 2],
    ]


def test_sampled_responses_are_counted_per_step_and_set() -> None:
    lines = [
        Kept(0, 1, 9, 4, "", 64),
        Kept(1, 1, 9, 4, "", 64),
        Kept(2, 2, 9, 4, "", 32),
        Kept(3, 2, 9, 4, "gsm8k", 100),
    ]
    assert count_sampled(lines) == 64 + 32 + 100
    assert count_sampled([*lines, Kept(4, 3, 9, 4)]) is None, "files of earlier versions do not record the number"


def test_training_and_validation_are_both_on_the_page(tmp_path: Path, group: Callable[..., RolloutGroup]) -> None:
    tracker = JsonlTracker(tmp_path, groups_per_step=1, groups_per_set=2)
    tracker.samples(1, [group(0), group(1), group(2)])
    tracker.held_out(1, "gsm8k", [group(number) for number in range(5)])
    tracker.close()
    training, validation = page_samples(tmp_path)
    assert (training.shown, training.kept, training.sampled) == (4, 4, 12)
    assert (validation.shown, validation.kept, validation.sampled) == (8, 8, 20)
    assert [(one["set"], one["id"], one["answer"]) for one in validation.groups] == [
        ("gsm8k", 0, "391"),
        ("gsm8k", 1, "391"),
    ]


def test_a_long_text_keeps_beginning_and_end() -> None:
    text = "a" * LONGEST + "b" * LONGEST
    short = shortened(text)
    assert short == f"{'a' * (LONGEST // 2)}\n[… {LONGEST:,} characters …]\n{'b' * (LONGEST // 2)}"
    assert shortened("a" * LONGEST) == "a" * LONGEST
