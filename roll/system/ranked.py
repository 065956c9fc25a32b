"""Finds the smallest of many numbered items whose keys change one at a time, without a look at all of them.

A heap keeps an entry of each key that an item has had. Outdated entries are dropped when they reach the top, or all at
once when they outnumber the items.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Any, Generic, Protocol, TypeVar

MOST_ENTRIES = 4
"""Largest number of entries in the heap, in multiples of the items, beyond `SPARE_ENTRIES`."""
SPARE_ENTRIES = 64


class Ordered(Protocol):
    """A key that can be compared."""

    def __lt__(self, other: Any, /) -> bool: ...


K = TypeVar("K", bound=Ordered)


class Ranked(Generic[K]):
    """Numbered items in the order of their keys, and of their numbers where keys are equal."""

    def __init__(self, keys: Mapping[int, K]) -> None:
        """`keys` are the keys of the items, by number."""
        self._keys = dict(keys)
        self._sort()

    def _sort(self) -> None:
        self._heap = [(key, number) for number, key in self._keys.items()]
        heapify(self._heap)

    def __getitem__(self, number: int) -> K:
        """Return the key of an item."""
        return self._keys[number]

    def __contains__(self, number: object) -> bool:
        return number in self._keys

    def __setitem__(self, number: int, key: K) -> None:
        """Change the key of an item."""
        self._keys[number] = key
        heappush(self._heap, (key, number))
        if len(self._heap) > MOST_ENTRIES * len(self._keys) + SPARE_ENTRIES:
            self._sort()

    def first(self) -> int | None:
        """Return the number of the item with the smallest key; None without items."""
        while self._heap and self._keys[self._heap[0][1]] != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None


class LeastBusy:
    """Chooses the worker with the least work. Of equally busy ones, that is the first."""

    def __init__(self, workers: int) -> None:
        self._work = Ranked(dict.fromkeys(range(workers), 0))

    def take(self, amount: int) -> tuple[int, int]:
        """Give work to the least busy worker. Return its number, and the amount of work that it now has."""
        worker = self._work.first()
        assert worker is not None, "there are no workers"
        self._work[worker] += amount
        return worker, self._work[worker]

    def leave(self, worker: int, amount: int) -> None:
        """Note that some work of a worker has ended."""
        self._work[worker] -= amount
