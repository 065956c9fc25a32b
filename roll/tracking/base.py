"""The interface of trackers, the facts that they are given about a run, and the records of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from roll.rewards.answers import ground_truth
from roll.types import Episode, Metrics, RolloutGroup, Segment, StopReason

GROUPS_PER_STEP = 1
"""Number of a step's groups whose samples are sent to a service. `samples.jsonl` keeps more."""
COLUMNS = ("step", "domain", "prompt", "response", "reward", "outcome", "finish_reason", "length")


FINISH_REASONS = {StopReason.COMPLETED: "stop", StopReason.ABORTED: "abort"}
"""`finish_reason` in the record. Other reasons keep their names."""


@dataclass(frozen=True)
class RunFacts:
    """Facts about the run for a tracker's start."""

    folder: Path
    """The run folder."""
    exp_name: str
    config: Mapping[str, Any]
    """The whole configuration in JSON's types."""
    resumed_step: int | None
    """Step of the checkpoint that the run continues from, None for a fresh start."""


LOSSES = ("sft/loss", "dpo/loss", "reward_model/loss", "distill/loss")
"""Main metric of a run without rewards."""


class Tracker(Protocol):
    """A destination of metrics and samples."""

    name: str
    """Name in `track_with`, also for messages about the tracker itself."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the metrics of one step. Step 0 stands for the state before the first step."""
        ...

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Record some of the step's groups, as many as the tracker keeps."""
        ...

    def close(self) -> None:
        """Write everything that is pending, and release threads, files and the terminal. This is the last call."""
        ...


class Record(Tracker, Protocol):
    """The run's own record, which also keeps the responses of validation."""

    def held_out(self, step: int, name: str, groups: Sequence[RolloutGroup]) -> None:
        """Record some of the groups of a held-out set, `name`, as many as the record keeps."""
        ...


def group_record(step: int, group: RolloutGroup) -> dict[str, Any]:
    """Return a group's record in `samples.jsonl`. Lengths are in tokens.

    `ground_truth` is the row's reference answer, None where it has none that is a text or a number. `text` and `length` are of what the
    policy sampled. An episode of several turns has its `trajectories` too: of each segment who laid it down, its text, and of the policy's
    what it earned, in which state of the environment, and the tools that it called.
    """
    return {
        "step": step,
        "prompt_id": group.prompt.prompt_id,
        "domain": group.prompt.domain,
        "prompt": group.prompt.text,
        "prompt_length": len(group.prompt.token_ids),
        "ground_truth": _ground_truth(group.prompt.row),
        "responses": [_response_record(episode) for episode in group.episodes],
    }


def sample_table(step: int, groups: Sequence[RolloutGroup]) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows for a service, one row for each response."""
    rows = [
        [step, record["domain"], record["prompt"], response["text"], *(response[column] for column in COLUMNS[4:])]
        for record in (group_record(step, group) for group in groups[:GROUPS_PER_STEP])
        for response in record["responses"]
    ]
    return list(COLUMNS), rows


def sample_lines(step: int, groups: Sequence[RolloutGroup]) -> list[tuple[str, str]]:
    """Return the same rows as caption and text, for services without tables."""
    _, rows = sample_table(step, groups)
    return [(f"{row[1]}, reward {row[4]:g} ({row[5]})", f"{row[2]}{row[3]}") for row in rows]


def _ground_truth(row: Mapping[str, Any]) -> str | None:
    try:
        return ground_truth(row)
    except ValueError:  # custom rewards and judges need none
        return None


def _response_record(episode: Episode) -> dict[str, Any]:
    record = {
        "text": "".join(segment.text for segment in episode.sampled),
        "reward": episode.reward.value,
        "outcome": str(episode.reward.outcome),
        "parts": dict(episode.reward.parts),
        "note": episode.reward.note,
        "turns": [[turn.end, turn.value] for turn in episode.reward.turns],
        "finish_reason": FINISH_REASONS.get(episode.stop, str(episode.stop)),
        "length": episode.length,
    }
    return record | ({"trajectories": _trajectory_records(episode)} if _has_answers(episode) else {})


def _has_answers(episode: Episode) -> bool:
    """Whether an episode has given segments besides its prompt, or an environment.

    A single response may be divided into turns; its record shows it as one.
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
        record: dict[str, Any] = {"role": role, "sampled": segment.sampled, "text": segment.text, "length": len(segment.token_ids)}
        if segment.sampled:
            record |= {"reward": next(earned)} if episode.turn_rewards else {}
            record |= {"state": next(states)} if episode.turn_states else {}
            record |= {"calls": list(map(dict, segment.calls))} if segment.calls else {}
        return record

    return [{"stop": str(path.stop), "segments": [of(segment) for segment in path.segments]} for path in episode.trajectories]
