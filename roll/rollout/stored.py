"""Saves finished groups that no step has used yet, so that a resumed run does not generate them again.

The saved groups are part of a checkpoint: one safetensors file with the concatenated tokens and log-probs of all segments, and a JSON
text with the structure of groups, episodes and segments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from roll.errors import CheckpointError
from roll.rollout.record import observed
from roll.types import Episode, Prompt, RewardOutcome, RewardResult, RolloutGroup, Segment, StopReason, Trajectory, TurnReward, VersionRun

FILE = "rollouts.safetensors"
"""Name of the file in the checkpoint's folder."""


@dataclass(frozen=True)
class StoredGroup:
    """One finished group without its prompt, which the resumed run draws again."""

    prompt_id: int
    age: int
    """Number of steps since its prompt was drawn."""
    episodes: Sequence[Episode]
    baseline: Episode | None

    def of(self, prompt: Prompt) -> RolloutGroup:
        """Return the group with its prompt.

        Raises:
            CheckpointError: the group belongs to another prompt.
        """
        if prompt.prompt_id != self.prompt_id:
            found = f"the checkpoint holds a group of prompt {self.prompt_id}, but prompt {prompt.prompt_id} was drawn in its place"
            raise CheckpointError(f"{found}; resume from another checkpoint")
        return RolloutGroup(observed(prompt, self.episodes), self.episodes, self.baseline)


def write_groups(path: Path, groups: Mapping[int, StoredGroup]) -> None:
    """Write groups to a file.

    The key of a group is the position of its prompt in the order of drawing; 0 is the oldest prompt that no step has used yet.
    """
    tokens: list[Any] = [np.zeros(0, np.int32)]
    log_probs: list[Any] = [np.zeros(0, np.float32)]

    def segment(one: Segment) -> dict[str, Any]:
        tokens.append(one.token_ids)
        log_probs.append(np.zeros(0, np.float32) if one.log_probs is None else one.log_probs)
        runs = [[run.version, run.tokens] for run in one.versions]
        has_log_probs = one.log_probs is not None
        said = {"length": len(one.token_ids), "sampled": one.sampled, "log_probs": has_log_probs, "versions": runs}
        return said | {"text": one.text, "calls": list(map(dict, one.calls))}

    def episode(one: Episode) -> dict[str, Any]:
        paths = [{"segments": [segment(part) for part in path.segments], "stop": path.stop.value} for path in one.trajectories]
        reward = one.reward
        turns = [[turn.end, turn.value] for turn in reward.turns]
        verdict = {"value": reward.value, "score": reward.score, "outcome": reward.outcome.value}
        said = verdict | {"parts": dict(reward.parts), "note": reward.note, "turns": turns}
        states = {"turn_states": list(one.turn_states), "metrics": dict(one.metrics)}
        return {"trajectories": paths, "reward": said, "turn_rewards": list(one.turn_rewards)} | states

    told = [
        {
            "number": number,
            "prompt_id": group.prompt_id,
            "age": group.age,
            "episodes": [episode(one) for one in group.episodes],
            "baseline": None if group.baseline is None else episode(group.baseline),
        }
        for number, group in groups.items()
    ]
    arrays = {"token_ids": np.concatenate(tokens), "log_probs": np.concatenate(log_probs)}
    save_file(arrays | {"groups": np.frombuffer(json.dumps(told).encode(), np.uint8)}, path)


def read_groups(path: Path) -> dict[int, StoredGroup]:
    """Return the groups of a file that `write_groups` wrote, with the same keys.

    Raises:
        CheckpointError: the file cannot be read, or has another format.
    """
    try:
        return _read(load_file(path))
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot read the finished groups: {error}; resume from another checkpoint") from error


def _read(arrays: Mapping[str, Any]) -> dict[int, StoredGroup]:
    token_ids, log_probs = _Cut(arrays["token_ids"]), _Cut(arrays["log_probs"])

    def segment(said: dict[str, Any]) -> Segment:
        length = said["length"]
        kept = log_probs.next(length) if said["log_probs"] else None
        versions = tuple(VersionRun(*run) for run in said["versions"])
        return Segment(token_ids.next(length), said["sampled"], kept, versions, said["text"], said["calls"])

    def episode(said: dict[str, Any]) -> Episode:
        paths = [Trajectory([segment(part) for part in path["segments"]], StopReason(path["stop"])) for path in said["trajectories"]]
        reward, turns = said["reward"], tuple(TurnReward(*turn) for turn in said["reward"]["turns"])
        outcome, score = RewardOutcome(reward["outcome"]), reward.get("score")  # checkpoints of earlier versions have no score
        result = RewardResult(reward["value"], outcome, reward["parts"], reward["note"], turns, score)
        return Episode(paths, result, said["turn_rewards"], said["turn_states"], said["metrics"])

    groups = {}
    for one in json.loads(arrays["groups"].tobytes()):
        episodes = [episode(said) for said in one["episodes"]]
        baseline = None if one["baseline"] is None else episode(one["baseline"])
        groups[one["number"]] = StoredGroup(one["prompt_id"], one["age"], episodes, baseline)
    return groups


class _Cut:
    """Cuts successive pieces off the front of an array."""

    def __init__(self, values: Any) -> None:
        self._values, self._begin = values, 0

    def next(self, count: int) -> Any:
        """Return the next `count` values."""
        begin, self._begin = self._begin, self._begin + count
        if self._begin > len(self._values):
            raise ValueError(f"an array of {len(self._values)} values is too short")
        return self._values[begin : self._begin]
