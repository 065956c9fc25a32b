"""The interface of trackers, the facts about a run that they receive, the records of groups, and notices.

A notice is what a run says about a step that nobody would notice. Watches look at metrics; `Tracking` says what they
find.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from roll.rewards.answers import ground_truth
from roll.types import Episode, Metrics, RolloutGroup, Segment, StopReason

GROUPS_PER_STEP = 1
"""Number of a step's groups whose samples are sent to a tracking service. `samples.jsonl` keeps more."""
COLUMNS = ("step", "domain", "prompt", "response", "reward", "outcome", "finish_reason", "length")
"""Columns of a table of samples."""


FINISH_REASONS = {StopReason.COMPLETED: "stop", StopReason.ABORTED: "abort"}
"""Values of `finish_reason` in the record. Other stop reasons keep their names."""


@dataclass(frozen=True)
class Notice:
    """Something about one step that needs the user's attention."""

    step: int
    topic: str
    """What the notice is about. Notices about the same thing have the same topic."""
    text: str
    """What happened, the probable cause and the remedy."""
    in_a_row: int = 1
    """Consecutive steps for which this holds, this one included. Steps without the metric do not count."""

    @property
    def line(self) -> str:
        """Return the line for the console and the log."""
        again = f" ({self.in_a_row} in a row)" if self.in_a_row > 1 else ""
        return f"step {self.step}{again}: {self.text}"

    def record(self) -> dict[str, Any]:
        """Return the record in `notices.jsonl`."""
        return asdict(self)


class Watch(Protocol):
    """A condition that deserves a notice: it holds in a step whose `metric` is at least `least`."""

    @property
    def metric(self) -> str:
        """Name of the metric, which is also the topic of the notices."""
        ...

    @property
    def least(self) -> float:
        """Smallest value of the metric with which the condition holds: 1 for a share of all."""
        ...

    def text(self, metrics: Metrics) -> str:
        """Return the text of a notice, given all metrics of the step."""
        ...


@dataclass(frozen=True)
class RunFacts:
    """Facts about the run that a tracker receives when it is opened."""

    folder: Path
    exp_name: str
    config: Mapping[str, Any]
    """The whole configuration, JSON-serialisable."""
    resumed_step: int | None
    """Step of the checkpoint that the run resumes from; None for a fresh start."""


LOSSES = ("sft/loss", "dpo/loss", "reward_model/loss", "distill/loss")
"""Main metrics of the pipelines without rewards."""


class Tracker(Protocol):
    """A destination of metrics and samples."""

    name: str
    """Name in `track_with`. Messages about the tracker use it too."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the metrics of one step. Step 0 stands for the state before the first step."""
        ...

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Record samples of a step. The tracker may keep only some of the groups."""
        ...

    def close(self) -> None:
        """Write all pending data, and release threads, files and the terminal. This must be the last call."""
        ...


class Record(Tracker, Protocol):
    """The run's own record. It also keeps responses of validation, and notices."""

    def held_out(self, step: int, name: str, groups: Sequence[RolloutGroup]) -> None:
        """Record samples of the held-out set `name`. The record may keep only some of the groups."""
        ...

    def notices(self, found: Sequence[Notice]) -> None:
        """Record notices about a step."""
        ...


def group_record(step: int, group: RolloutGroup) -> dict[str, Any]:
    """Return a group's record in `samples.jsonl`. Lengths are in tokens.

    `ground_truth` is the row's reference answer; None if it is missing or is neither a text nor a number. `pictures`,
    if the prompt or a segment shows any, are their paths, or the hashes of those that were given as bytes. `text` and
    `length` describe the sampled tokens. The record of an episode of several turns also has `trajectories`. Each of
    their segments has a role, a text and a length. A segment of the policy also has its reward, its tool calls, and the
    environment's state before it, if there are any.
    """
    shown = group.prompt.shown
    pictures = shown.names if shown else group.episodes[0].trajectories[0].segments[0].pictures
    return {
        "step": step,
        "prompt_id": group.prompt.prompt_id,
        "domain": group.prompt.domain,
        "prompt": group.prompt.text,
        "prompt_length": len(group.prompt.token_ids),
        **({"pictures": list(pictures)} if pictures else {}),
        "ground_truth": _ground_truth(group.prompt.row),
        "responses": [_response_record(episode) for episode in group.episodes],
    }


def sample_table(step: int, groups: Sequence[RolloutGroup]) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and rows of a service's table: each response of the first `GROUPS_PER_STEP` groups."""
    rows = [
        [step, record["domain"], record["prompt"], response["text"], *(response[column] for column in COLUMNS[4:])]
        for record in (group_record(step, group) for group in groups[:GROUPS_PER_STEP])
        for response in record["responses"]
    ]
    return list(COLUMNS), rows


def sample_lines(step: int, groups: Sequence[RolloutGroup]) -> list[tuple[str, str]]:
    """Return the rows of `sample_table` as (caption, text) pairs, for services without tables."""
    _, rows = sample_table(step, groups)
    return [(f"{row[1]}, reward {row[4]:g} ({row[5]})", f"{row[2]}{row[3]}") for row in rows]


def _ground_truth(row: Mapping[str, Any]) -> str | None:
    try:
        return ground_truth(row)
    except ValueError:  # custom rewards and judges need no reference answer
        return None


def _response_record(episode: Episode) -> dict[str, Any]:
    record = {
        "text": episode.text,
        "reward": episode.reward.value,
        "outcome": str(episode.reward.outcome),
        "parts": dict(episode.reward.parts),
        "note": episode.reward.note,
        "turns": [[turn.end, turn.value] for turn in episode.reward.turns],
        "finish_reason": FINISH_REASONS.get(episode.stop, str(episode.stop)),
        "length": episode.length,
    }
    heard = [{"after": turn.after, "partner": turn.partner, "text": turn.text} for turn in episode.partner_turns]
    record |= {"partner_turns": heard} if heard else {}
    return record | ({"trajectories": _trajectory_records(episode)} if _has_answers(episode) else {})


def _has_answers(episode: Episode) -> bool:
    """Whether an episode has an environment, several trajectories, or given segments other than its prompt.

    A single response may be divided into turns as well, but its record shows it as one text.
    """
    return (
        bool(episode.turn_states)
        or len(episode.trajectories) > 1
        or any(not segment.sampled for segment in episode.trajectories[0].segments[1:])
    )


def _trajectory_records(episode: Episode) -> list[dict[str, Any]]:
    earned, states = iter(episode.turn_rewards), iter(episode.turn_states)

    def of(segment: Segment) -> dict[str, Any]:
        role = "assistant" if segment.sampled else "environment"
        record: dict[str, Any] = {
            "role": role,
            "sampled": segment.sampled,
            "text": segment.text,
            "length": len(segment.token_ids),
            **({"pictures": list(segment.pictures)} if segment.pictures else {}),
        }
        if segment.sampled:
            record |= {"reward": next(earned)} if episode.turn_rewards else {}
            record |= {"state": next(states)} if episode.turn_states else {}
            record |= {"calls": list(map(dict, segment.calls))} if segment.calls else {}
        return record

    return [
        {"stop": str(path.stop), "segments": [of(segment) for segment in path.segments]}
        for path in episode.trajectories
    ]


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
            topic, holds = watch.metric, value >= watch.least
            self._in_a_row[topic] = self._in_a_row.get(topic, 0) + 1 if holds else 0
            if holds and step >= self._quiet_until.get(topic, 0):
                self._quiet_until[topic] = 10 ** len(str(step))
                due.append(Notice(step, topic, watch.text(metrics), self._in_a_row[topic]))
        return due


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
