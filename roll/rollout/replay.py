"""Replays rare successes: whole groups of rarely solved prompts, in the place of groups that teach nothing.

    groups of a step ──▶ those that teach nothing ──replaced by──▶ the oldest buffered groups ──▶ trained on
                   └──▶ rare successes ──▶ buffer, for later steps

A group is replayed whole. A right response alone, in the place of a wrong one, would lose the negative advantage of the
wrong one. Replayed tokens keep the log-probs and the policy versions with which they were sampled, so that the loss
weights them by the ratio to the policy that sampled them, as it does with tokens generated ahead of training.

Groups are chosen by how many of their responses passed. With rewards of two values and an advantage that depends only
on the rewards of its group, this leaves the direction of a prompt's expected gradient as it is, and changes its weight
among the prompts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Protocol

import numpy as np

from roll.errors import CheckpointError
from roll.rollout.scheduler import StoredGroup, read_groups, write_groups
from roll.types import Metrics, Prompt, RolloutGroup

FILE, PROMPTS_FILE = "rare_successes.safetensors", "rare_successes.json"
"""Names of the files in the checkpoint's folder: the groups, and their prompts without tokens."""


class GroupReplay:
    """The buffer of rare successes, the oldest first. A replayed group leaves it."""

    def __init__(
        self,
        is_rare: Callable[[RolloutGroup], bool],
        teaches: Callable[[RolloutGroup], bool],
        most_replayed: int,
        buffer_size: int,
        staleness_at_most: int,
    ) -> None:
        """
        Args:
            is_rare: whether a group is a rare success.
            teaches: whether anything is learnt from a group. If not, it may be replaced, and is not buffered.
            most_replayed: largest number of replayed groups in a step.
            buffer_size: largest number of buffered groups.
            staleness_at_most: largest `staleness` of a replayed group.
        """
        self._is_rare, self._teaches = is_rare, teaches
        self._most, self._size, self._oldest = most_replayed, buffer_size, staleness_at_most
        self._groups: list[RolloutGroup] = []
        self._metrics: Metrics = {}

    def trained(self, groups: Sequence[RolloutGroup], policy_version: int) -> list[RolloutGroup]:
        """Return the groups to train on, and buffer the rare successes among `groups` for later steps.

        The first groups that teach nothing are replaced by buffered ones, the oldest first, and the others stay where
        they are.

        Args:
            groups: the groups that the step was handed.
            policy_version: the policy's version before the step's first update.
        """
        fresh = [group for group in self._groups if staleness(group, policy_version) <= self._oldest]
        dropped = len(self._groups) - len(fresh)
        useless = [number for number, group in enumerate(groups) if not self._teaches(group)]
        places = useless[: min(self._most, len(fresh))]
        replayed, waiting = fresh[: len(places)], fresh[len(places) :]
        trained = list(groups)
        for place, group in zip(places, replayed, strict=True):
            trained[place] = group
        waiting += [group for group in groups if self._teaches(group) and self._is_rare(group)]
        self._groups = waiting[-self._size :]
        self._metrics = {
            "curriculum/replayed": float(len(replayed)),
            "curriculum/buffered": float(len(self._groups)),
            "curriculum/unreplayed": float(dropped + len(waiting) - len(self._groups)),
        }
        if replayed:
            ages = [staleness(group, policy_version) for group in replayed]
            self._metrics |= {"curriculum/replayed_staleness": fmean(ages)}
        return trained

    def metrics(self) -> Metrics:
        """Return the metrics of the last step."""
        return self._metrics

    async def save(self, folder: Path) -> None:
        """Write the buffer. If it is empty, write no file."""
        if not self._groups:
            return
        stored = {
            number: StoredGroup(group.prompt.prompt_id, 0, group.episodes, group.baseline)
            for number, group in enumerate(self._groups)
        }
        prompts = [_told(group.prompt) for group in self._groups]
        (folder / PROMPTS_FILE).write_text(json.dumps(prompts), encoding="utf-8")
        await asyncio.to_thread(write_groups, folder / FILE, stored)

    async def load(self, folder: Path) -> None:
        """Read the buffer that `save` wrote, if any. Raises CheckpointError if it cannot be read."""
        self._groups = []
        if not (folder / FILE).exists():
            return
        stored = await asyncio.to_thread(read_groups, folder / FILE)
        path = folder / PROMPTS_FILE
        try:
            prompts = [_prompt(*one) for one in json.loads(path.read_text(encoding="utf-8"))]
        except (OSError, ValueError, TypeError) as error:
            problem = f"{path}: cannot read the prompts of the buffered groups: {error}"
            raise CheckpointError(f"{problem}; resume from another checkpoint") from error
        self._groups = [stored[number].of(prompt) for number, prompt in enumerate(prompts)]


def _told(prompt: Prompt) -> tuple[int, str, object, str]:
    assert prompt.shown is None, "the buffer holds no pictures"
    return prompt.prompt_id, prompt.domain, dict(prompt.row), prompt.place


def _prompt(prompt_id: int, domain: str, row: dict[str, object], place: str) -> Prompt:
    """Return a prompt without its tokens and its text, which `StoredGroup.of` adds."""
    return Prompt(prompt_id, np.zeros(0, np.int32), "", domain, row, place)


def staleness(group: RolloutGroup, policy_version: int) -> int:
    """Return the number of optimizer updates since the oldest token of a group was sampled; 0 without any token."""
    segments = [segment for episode in group.episodes for segment in episode.sampled]
    versions = [run.version for segment in segments for run in segment.versions if run.tokens]
    return policy_version - min(versions, default=policy_version)


class Unconsumed(Protocol):
    """What is saved in checkpoints for later steps."""

    async def save(self, folder: Path) -> None:
        """Write it, if there is any."""
        ...

    async def load(self, folder: Path) -> None:
        """Read what `save` wrote, if any."""
        ...


class SavedTogether:
    """Saves several holders of groups for later steps in the same checkpoint. Their files have different names."""

    def __init__(self, *parts: Unconsumed) -> None:
        self._parts = parts

    async def save(self, folder: Path) -> None:
        """Write what all parts hold."""
        for part in self._parts:
            await part.save(folder)

    async def load(self, folder: Path) -> None:
        """Read what all parts wrote."""
        for part in self._parts:
            await part.load(folder)
