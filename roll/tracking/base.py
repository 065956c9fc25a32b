"""What a tracker is, and how a group of rollouts reads on paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from roll.types import Metrics, Rollout, RolloutGroup


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


def _response_record(rollout: Rollout) -> dict[str, Any]:
    return {
        "text": rollout.completion.text,
        "reward": rollout.reward.value,
        "outcome": str(rollout.reward.outcome),
        "parts": dict(rollout.reward.parts),
        "note": rollout.reward.note,
        "finish_reason": str(rollout.completion.finish_reason),
        "length": len(rollout.completion.token_ids),
    }
