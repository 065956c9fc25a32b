"""Decides which of the groups in flight a take (one call of `RolloutScheduler.take`) may hand over. Works on counts alone.

    ordinals   0 1 2 3 | 4 5 6 7 | 8 9 ...       in the order in which prompts were drawn
               window of two batches |

A take chooses among the ordinals of the window. The window moves on only when all of its groups have been handed over. With a window of
one batch, groups are first in, first out. With a wider one, a take may leave slow groups to a later take, but none for longer than `limit`
steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

from roll.config.derived.batch import age_limit


@dataclass(frozen=True)
class Choice:
    """The groups that a take may choose from."""

    pool: list[int]
    """Ordinals of the groups, the oldest first."""
    count: int
    """Number of groups to hand over."""
    due: frozenset[int]
    """Ordinals that must be handed over now, because they would exceed the age limit in the next step."""


class Window:
    """The ordinals of the groups in flight, and the step in which each was drawn."""

    def __init__(self, batch: int, ratio: float, width: int) -> None:
        """`width` is a multiple of `batch`; both count groups."""
        assert width % batch == 0, f"a window of {width} is not divisible by the batch size, {batch}"
        self._ahead, self._width = round(ratio * batch), width
        self.slack = width - batch
        """Largest number of older groups that may still be in flight when a group is handed over."""
        self.limit = age_limit(ratio, width // batch)
        """Largest age of a group that is handed over, in steps."""
        self._begin = self._next = self._step = 0
        self._drawn_at: dict[int, int] = {}  # step in which each group was drawn, by ordinal
        self._known_gone: set[int] = set()  # after a resume: ordinals that were handed over before it, to be skipped

    def has_room(self, wanted: int) -> bool:
        """Whether another group may be drawn while a take wants `wanted` groups."""
        return len(self._drawn_at) < wanted + self._ahead

    def draw(self) -> int | None:
        """Draw a group. Return its ordinal, or None if the group was handed over before a resume."""
        ordinal, self._next = self._next, self._next + 1
        if ordinal in self._known_gone:
            self._known_gone.remove(ordinal)
            return None
        self._drawn_at[ordinal] = self._step
        return ordinal

    def age(self, ordinal: int) -> int:
        """Return the number of steps since a group in flight was drawn."""
        return self._step - self._drawn_at[ordinal]

    def set_age(self, ordinal: int, steps: int) -> None:
        """Set the age of a group in flight that was drawn before a resume, in steps."""
        self._drawn_at[ordinal] = self._step - steps

    def choice(self, wanted: int) -> Choice:
        """Return the groups that a take of `wanted` groups may choose from. `Choice.count` is smaller if the window has fewer left."""
        assert self.head is not None, "nothing is in flight"
        while self.head >= self._begin + self._width:
            self._begin += self._width
        end = self._begin + self._width
        pool = list(islice(takewhile(lambda ordinal: ordinal < end, self._drawn_at), wanted + self.slack))
        due = frozenset(ordinal for ordinal in pool if self._step - self._drawn_at[ordinal] >= self.limit)
        return Choice(pool, min(wanted, len(pool)), due)

    def remove(self, ordinals: Iterable[int]) -> None:
        """Record that groups were handed over."""
        for ordinal in ordinals:
            del self._drawn_at[ordinal]

    def next_step(self) -> None:
        """Record that a step has all its groups."""
        self._step += 1

    @property
    def head(self) -> int | None:
        """Return the oldest ordinal in flight; None if nothing is in flight."""
        return next(iter(self._drawn_at), None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-serialisable values. A resumed run draws from the head on, so ordinals are relative to it."""
        head = self._next if self.head is None else self.head
        gone = [ordinal - head for ordinal in range(head, self._next) if ordinal not in self._drawn_at]
        return {"begin": self._begin - head, "gone": gone + [ordinal - head for ordinal in sorted(self._known_gone)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned. The head becomes ordinal 0."""
        self._begin, self._known_gone = state["begin"], set(state["gone"])
