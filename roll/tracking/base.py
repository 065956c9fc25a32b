"""What a tracker is, what it is told of a run, and how a group of rollouts reads on paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from roll.types import Metrics, Rollout, RolloutGroup

GROUPS_PER_STEP = 1
"""Groups of a step whose samples go to a service; `samples.jsonl` keeps more."""
COLUMNS = ("step", "domain", "prompt", "response", "reward", "outcome", "finish_reason", "length")


@dataclass(frozen=True)
class RunFacts:
    """What a tracker is told of the run when it opens."""

    folder: Path
    """The run folder."""
    exp_name: str
    config: Mapping[str, Any]
    """The whole configuration, in JSON's types."""
    resumed_step: int | None
    """Of the checkpoint that the run goes on from; None for a fresh start."""


LOSSES = ("sft/loss", "dpo/loss", "reward_model/loss", "distill/loss")
"""What a run is judged by that has no rewards."""


class Tracker(Protocol):
    """One place where metrics and samples go."""

    name: str
    """As in `track_with`; for reports about the tracker itself."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the metrics of one step. Step 0 is what was measured before the first."""
        ...

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Record some of the step's rollouts, as many as the tracker keeps."""
        ...

    def close(self) -> None:
        """Bring everything to its place and give back threads, files and the terminal. The last call."""
        ...


def group_record(step: int, group: RolloutGroup) -> dict[str, Any]:
    """One group as it stands in `samples.jsonl`; lengths in tokens."""
    return {
        "step": step,
        "prompt_id": group.prompt.prompt_id,
        "domain": group.prompt.domain,
        "prompt": group.prompt.text,
        "prompt_length": len(group.prompt.token_ids),
        "responses": [_response_record(rollout) for rollout in group.rollouts],
    }


def sample_table(step: int, groups: Sequence[RolloutGroup]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows, one row for each response of the groups that go to a service."""
    rows = [
        [step, record["domain"], record["prompt"], response["text"], *(response[column] for column in COLUMNS[4:])]
        for record in (group_record(step, group) for group in groups[:GROUPS_PER_STEP])
        for response in record["responses"]
    ]
    return list(COLUMNS), rows


def sample_lines(step: int, groups: Sequence[RolloutGroup]) -> list[tuple[str, str]]:
    """The same rows as caption and text, for services without tables."""
    _, rows = sample_table(step, groups)
    return [(f"{row[1]}, reward {row[4]:g} ({row[5]})", f"{row[2]}{row[3]}") for row in rows]


def _response_record(rollout: Rollout) -> dict[str, Any]:
    return {
        "text": rollout.completion.text,
        "reward": rollout.reward.value,
        "outcome": str(rollout.reward.outcome),
        "parts": dict(rollout.reward.parts),
        "note": rollout.reward.note,
        "turns": [[turn.end, turn.value] for turn in rollout.reward.turns],
        "finish_reason": str(rollout.completion.finish_reason),
        "length": len(rollout.completion.token_ids),
    }
