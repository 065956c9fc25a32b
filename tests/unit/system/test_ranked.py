"""The smallest of many items whose keys change, compared with a search through all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from roll.system.ranked import MOST_ENTRIES, SPARE_ENTRIES, LeastBusy, Ranked


@given(
    keys=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    changes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=200),
)
def test_first_is_the_smallest_key(keys: list[int], changes: list[tuple[int, int]]) -> None:
    ranked = Ranked(dict(enumerate(keys)))
    for number, key in changes:
        number %= len(keys)
        ranked[number] = keys[number] = key
        assert ranked.first() == min(range(len(keys)), key=keys.__getitem__)
        assert len(ranked._heap) <= MOST_ENTRIES * len(keys) + SPARE_ENTRIES


def test_nothing_is_first_of_no_items() -> None:
    assert Ranked[int]({}).first() is None


def test_work_goes_to_the_least_busy_worker() -> None:
    workers = LeastBusy(3)
    assert [workers.take(amount) for amount in (5, 2, 2, 1)] == [(0, 5), (1, 2), (2, 2), (1, 3)]
    workers.leave(0, 5)
    assert workers.take(1) == (0, 1)
