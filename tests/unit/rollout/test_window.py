"""Invariants of the window in random schedules of durations, dropped groups and resumes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from roll.rollout.scheduler import Choice, Window

SCHEDULES = 1000
STEPS = 12
STORED = 0.7
"""Groups with a duration below this one are finished when the run is resumed, and are kept. The mean duration is 1."""


@dataclass
class Schedule:
    """A simulated trainer and engine. Groups have random durations. Due groups are taken first, then the shortest
    ones.
    """

    numbers: random.Random
    batch: int
    ratio: float
    width: int
    dropped_share: float
    resumed_share: float
    window: Window = field(init=False)
    step: int = 0
    first: int = 0
    """Number, in the run, of the group that the window numbers 0: the oldest in flight at the last resume, or the next
    to draw.
    """
    drawn_at: dict[int, int] = field(default_factory=dict)
    finish: dict[int, float] = field(default_factory=dict)
    consumed: list[list[int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    most_drawn: int = 0
    stored: dict[int, int] = field(default_factory=dict)
    """Ages, in steps, of groups that were finished but not handed over at a resume, and are not yet drawn again. Key:
    ordinal.
    """

    def __post_init__(self) -> None:
        self.window = Window(self.batch, self.ratio, self.width)

    def run(self) -> Schedule:
        for _ in range(STEPS):
            self.take()
            if self.numbers.random() < self.resumed_share:
                self.resume()
        return self

    def take(self) -> None:
        kept: list[int] = []
        while len(kept) < self.batch:
            while self.window.has_room(self.batch - len(kept)):
                self.draw()
            choice = self.window.choice(self.batch - len(kept))
            chosen = self.chosen(choice)
            self.window.remove(chosen)
            for ordinal in chosen:
                dropped = self.numbers.random() < self.dropped_share
                (self.dropped if dropped else kept).append(ordinal + self.first)
        self.window.next_step()
        self.consumed.append(sorted(kept))
        self.step += 1

    def draw(self) -> None:
        if (number := self.window.draw()) is not None:
            ordinal = number + self.first
            if ordinal in self.stored:
                self.window.set_age(number, self.stored.pop(ordinal))
            else:
                self.drawn_at[ordinal] = self.step
                self.finish[ordinal] = self.numbers.expovariate(1.0)
            self.most_drawn = max(self.most_drawn, ordinal + 1)

    def chosen(self, choice: Choice) -> list[int]:
        assert 0 < choice.count <= len(choice.pool) and choice.due <= set(choice.pool)
        assert len(choice.due) <= choice.count, "more groups are due than the step has room for"
        early = sorted(choice.pool, key=lambda ordinal: (ordinal not in choice.due, self.finish[ordinal + self.first]))
        return early[: choice.count]

    def resume(self) -> None:
        state, head = self.window.state_dict(), self.window.head
        in_flight = [ordinal + self.first for ordinal in self.window._drawn_at]
        ages = {
            ordinal: self.window.age(ordinal - self.first) for ordinal in in_flight if self.finish[ordinal] < STORED
        }
        assert all(age == self.step - self.drawn_at[ordinal] for ordinal, age in ages.items())
        self.first = self.first + head if head is not None else self.first + self.window._next
        self.window = Window(self.batch, self.ratio, self.width)
        self.window.load_state_dict(state)
        self.stored |= ages


def schedule(seed: int, resumed_share: float | None = None, width: int | None = None) -> Schedule:
    numbers = random.Random(seed)
    batch = numbers.choice([1, 2, 3, 4, 8])
    ratio = numbers.choice([0.5, 1.0, 1.5, 2.0, 3.0])
    dropped = numbers.choice([0.0, 0.0, 0.2, 0.6])
    resumed = numbers.choice([0.0, 0.3]) if resumed_share is None else resumed_share
    return Schedule(numbers, batch, ratio, (width or numbers.randint(1, 4)) * batch, dropped, resumed).run()


@pytest.mark.parametrize("first", range(0, SCHEDULES, 100))
def test_ordinals_are_used_once_within_age_limit(first: int) -> None:
    for seed in range(first, first + 100):
        check(schedule(seed))


def check(run: Schedule) -> None:
    consumed = [ordinal for step in run.consumed for ordinal in step]
    assert all(len(step) == run.batch for step in run.consumed)
    assert len(set(consumed + run.dropped)) == len(consumed) + len(run.dropped), "an ordinal was used twice"
    ages = [step - run.drawn_at[ordinal] for step, ordinals in enumerate(run.consumed) for ordinal in ordinals]
    assert max(ages) <= run.window.limit
    gone = set(consumed) | set(run.dropped)
    assert all(ordinal in gone for ordinal in range(run.first + (run.window.head or 0))), (
        "an ordinal before the head was left out"
    )


@pytest.mark.parametrize("seed", range(50))
def test_window_of_one_batch_is_fifo(seed: int) -> None:
    run = schedule(seed, width=1)
    used = sorted([ordinal for step in run.consumed for ordinal in step] + run.dropped)
    assert used == list(range(len(used)))
    for step, ordinals in enumerate(run.consumed[1:]):
        assert min(ordinals) > max(run.consumed[step])


def drawn(window: Window, wanted: int) -> list[int | None]:
    out = []
    while window.has_room(wanted):
        out.append(window.draw())
    return out


def test_a_wider_window_leaves_slow_groups_for_later() -> None:
    window = Window(2, 1.0, 4)
    assert window.limit == 2 and Window(4, 0.5, 12).limit == 3 and Window(4, 2.0, 4).limit == 2
    assert drawn(window, 2) == [0, 1, 2, 3]
    assert window.choice(2) == Choice([0, 1, 2, 3], 2, frozenset())
    window.remove([1, 3])
    window.next_step()
    assert drawn(window, 2) == [4, 5]
    assert window.choice(2) == Choice([0, 2, 4, 5], 2, frozenset())
    window.remove([2, 5])
    window.next_step()
    assert drawn(window, 2) == [6, 7]
    assert window.choice(2) == Choice([0, 4, 6, 7], 2, frozenset([0])), "0 has reached the limit"
    window.remove([0, 7])
    window.next_step()
    assert drawn(window, 2) == [8, 9]
    assert window.choice(2) == Choice([4, 6, 8, 9], 2, frozenset([4]))


def test_groups_are_due_before_later_steps_are_full() -> None:
    """Four groups of the first step reach their limit in step 4, in which only two can be handed over."""
    window = Window(2, 2.0, 6)
    assert (window.limit, drawn(window, 2)) == (4, [0, 1, 2, 3, 4, 5])
    window.remove([2, 3])
    for later in ([6, 7], [8, 9]):
        window.next_step()
        assert drawn(window, 2) == later
        assert window.choice(2).due == frozenset(), "steps 3 and 4 have room for all four"
        window.remove(later)
    window.next_step()
    assert drawn(window, 2) == [10, 11]
    assert (window.choice(2).due, window.age(0)) == ({0, 1}, 3), "step 4 has room for two"
    window.remove([0, 1])
    window.next_step()
    assert drawn(window, 2) == [12, 13]
    assert (window.choice(2).due, window.age(4)) == ({4, 5}, 4)


def test_ordinals_consumed_ahead_are_not_redrawn() -> None:
    window = Window(2, 1.0, 4)
    for _ in range(4):
        window.draw()
    window.remove([1, 3])
    state = window.state_dict()
    assert state == {"gone": [1, 3]}
    again = Window(2, 1.0, 4)
    again.load_state_dict(state | {"begin": 0})  # which checkpoints of earlier versions have
    assert [again.draw() for _ in range(5)] == [0, None, 2, None, 4]


def test_a_second_save_remembers_what_is_gone() -> None:
    """A run is resumed and saved again before, while and after it draws the ordinals that were handed over."""
    state = {"gone": [1, 3]}
    for drawn_before in range(5):
        again, once_more = Window(2, 1.0, 4), Window(2, 1.0, 4)
        again.load_state_dict(state)
        for _ in range(drawn_before):
            again.draw()
        assert again.state_dict() == state
        once_more.load_state_dict(again.state_dict())
        assert [once_more.draw() for _ in range(5)] == [0, None, 2, None, 4]


def test_a_second_save_counts_from_its_own_head() -> None:
    """Ordinal 0 was drawn and handed over, so the next ordinal is the head, and those that are gone are counted from
    it.
    """
    again, once_more = Window(2, 1.0, 4), Window(2, 1.0, 4)
    again.load_state_dict({"gone": [1, 3]})
    again.draw()
    again.remove([0])
    assert again.state_dict() == {"gone": [0, 2]}
    once_more.load_state_dict(again.state_dict())
    assert [once_more.draw() for _ in range(4)] == [None, 1, None, 3]
