"""Notices: what a run says about a step that nobody would notice. Watches look at metrics; `Tracking` says what they
find.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from roll.types import Metrics


@dataclass(frozen=True)
class Notice:
    """Something about one step that needs the user's attention."""

    step: int
    topic: str
    """What the notice is about. Notices about the same thing have the same topic."""
    text: str
    """What happened, the probable cause and the remedy."""
    in_a_row: int = 1
    """Number of consecutive steps for which this has held, up to this one. Steps without the watched metric do not
    count.
    """

    @property
    def line(self) -> str:
        """Return the line for the console and the log."""
        again = f" ({self.in_a_row} in a row)" if self.in_a_row > 1 else ""
        return f"step {self.step}{again}: {self.text}"

    def record(self) -> dict[str, Any]:
        """Return the record in `notices.jsonl`."""
        return asdict(self)


class Watch(Protocol):
    """A condition that deserves a notice: it holds in a step whose `metric` is 1."""

    @property
    def metric(self) -> str:
        """Name of the metric, which is also the topic of the notices."""
        ...

    def text(self, metrics: Metrics) -> str:
        """Return the text of a notice, given all metrics of the step."""
        ...


class StepNotices:
    """Finds the notices of each step in turn.

    A condition that holds is said, and then kept quiet until the number of the step reaches the next power of ten. So a
    condition that holds from the first step on is said in steps 1, 10, 100 and so on, and one that begins in step 37 is
    said at once.
    """

    def __init__(self, watches: Sequence[Watch] = ()) -> None:
        self._watches = tuple(watches)
        self._in_a_row: dict[str, int] = {}
        self._quiet_until: dict[str, int] = {}

    def after(self, step: int, metrics: Metrics) -> list[Notice]:
        """Return the notices that are due after a step with these metrics."""
        due = []
        for watch in self._watches:
            value = metrics.get(watch.metric)
            if value is None:
                continue
            topic = watch.metric
            self._in_a_row[topic] = self._in_a_row.get(topic, 0) + 1 if value == 1 else 0
            if value == 1 and step >= self._quiet_until.get(topic, 0):
                self._quiet_until[topic] = next_power_of_ten(step)
                due.append(Notice(step, topic, watch.text(metrics), self._in_a_row[topic]))
        return due


def next_power_of_ten(step: int) -> int:
    """Return the least power of ten above a step, and at least 10."""
    return 10 ** len(str(step))


def notice_of(record: Mapping[str, Any]) -> Notice:
    """Return the notice of a record in `notices.jsonl`."""
    return Notice(record["step"], record["topic"], record["text"], record["in_a_row"])


def by_topic(notices: Sequence[Notice]) -> list[str]:
    """Return a line for each topic, with all of its steps and the text of its last notice."""
    topics: dict[str, list[Notice]] = {}
    for notice in notices:
        topics.setdefault(notice.topic, []).append(notice)
    lines = []
    for found in topics.values():
        steps = ", ".join(str(notice.step) for notice in found)
        lines.append(f"{'Step' if len(found) == 1 else 'Steps'} {steps}: {found[-1].text}")
    return lines
