"""The choice of the responses that the report page shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.tracking.jsonl import JsonlTracker
from roll.tracking.report import write
from roll.tracking.report.write import LONGEST, choose_steps, halving, page_samples, shortened
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


@given(st.dictionaries(st.integers(0, 30), st.integers(0, 50), max_size=30), st.integers(0, 800))
def test_steps_are_chosen_within_the_budget(characters: dict[int, int], budget: int) -> None:
    chosen = choose_steps(characters, budget)
    assert sum(characters[step] for step in chosen) <= budget
    if sum(characters.values()) <= budget:
        assert chosen == set(characters)
    if chosen:
        assert min(characters) in chosen


def test_a_step_that_just_fits_is_shown() -> None:
    chosen = [choose_steps({0: 10, 1: 10, 2: 10}, budget) for budget in (9, 10, 19, 20, 29, 30)]
    assert chosen == [set(), {0}, {0}, {0, 2}, {0, 2}, {0, 1, 2}]


def test_a_too_large_step_shows_one_group(
    tmp_path: Path, group: Callable[..., RolloutGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = JsonlTracker(tmp_path)
    for step in (1, 2):
        tracker.samples(step, [group(0), group(1)])
    tracker.close()
    (tmp_path / "validation_samples.jsonl").unlink()
    monkeypatch.setattr(write, "LONGEST", 10**7)
    one = sum(len(each["text"]) for each in page_samples(tmp_path)[0].groups[0]["responses"])
    assert [len(write._read(tmp_path / "samples.jsonl", budget).groups) for budget in (one // 2, 10**6)] == [1, 4]


def test_responses_of_old_files_are_not_counted(tmp_path: Path, group: Callable[..., RolloutGroup]) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.samples(1, [group(0)])
    tracker.close()
    path = tmp_path / "samples.jsonl"
    record = json.loads(path.read_text())
    del record["responses_of_step"]
    path.write_text(path.read_text() + json.dumps(record | {"step": 2}) + "\n")
    training, _ = page_samples(tmp_path)
    assert training.sampled is None and training.kept == 8


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
