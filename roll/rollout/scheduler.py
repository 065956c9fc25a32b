"""Keeps prompts in flight and hands over finished groups.

    sampler ──draw──▶ prompts in flight (at most (1 + async_generation_ratio) x batch) ──take──▶ loop

With ratio 0, all groups of a step are drawn, finished and handed over before the trainer starts: synchronous training. With ratio r,
r batches are still being generated while the trainer works. By default groups are handed over in the order in which they were drawn,
so that a run is reproducible. With a wider window, groups that finish first are handed over first (`Window`), but no group waits longer
than the window's age limit.

No group is discarded, with two exceptions. A group is replaced by another if one of its environments failed. With dynamic sampling, groups
that `keep` rejects, such as groups whose rewards are all equal, are replaced up to a limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from roll.errors import RollError
from roll.rollout.batch import failure, rewards_differ
from roll.rollout.filters import Keep
from roll.rollout.group import GroupSampler, prompt_seed
from roll.rollout.stored import FILE, StoredGroup, read_groups, write_groups
from roll.rollout.window import Choice, Window
from roll.types import Metrics, Prompt, RolloutGroup

LOG = logging.getLogger(__name__)
TRAINING = 0
"""Seed stream of training prompts."""
MOST_FAILED = 4
"""Largest number of groups of one step that may fail in their environments, in multiples of the batch."""


class PromptSource(Protocol):
    """A source of prompts whose position can be saved."""

    def draw(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON-serialisable values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position."""
        ...


@dataclass
class _InFlight:
    position: dict[str, Any]
    """The source's state before this prompt was drawn."""
    task: asyncio.Future[RolloutGroup]


class RolloutScheduler:
    """Draws prompts, keeps them in flight, and hands finished groups to the training loop.

    Must be used inside one event loop, and closed.
    """

    def __init__(
        self,
        source: PromptSource,
        sampler: GroupSampler,
        batch_size: int,
        async_generation_ratio: float,
        seed: int | None,
        window: int | None = None,
        most_batches: int | None = None,
        keep: Keep = rewards_differ,
        finished: Callable[[RolloutGroup], None] | None = None,
    ) -> None:
        """
        Args:
            batch_size: number of groups of a step.
            seed: seed from which the seed of every prompt is derived; with None the engine chooses the seeds.
            window: number of groups from which `take` chooses, a multiple of `batch_size`; None means one batch.
            most_batches: limit of dynamic sampling: groups that `keep` rejects are replaced until this many batches are drawn for
                one step. None turns dynamic sampling off.
            keep: filter of dynamic sampling.
            finished: called with each group as soon as it is finished and scored, before a step takes it. It is not called with a
                group that will be replaced because one of its environments broke.
        """
        self._source, self._sampler = source, sampler
        self._batch_size = batch_size
        self._window = Window(batch_size, async_generation_ratio, window or batch_size)
        self._seed = seed
        self._most_batches, self._keep, self._finished_one = most_batches, keep, finished
        self._in_flight: dict[int, _InFlight] = {}  # by ordinal, the oldest first
        self._stored: dict[int, StoredGroup] = {}  # by ordinal: groups from the checkpoint whose prompts are not drawn again yet
        self._metrics: Metrics = {}
        self._failed_groups = 0  # number in this step

    async def take(self) -> list[RolloutGroup]:
        """Return `batch_size` groups, finished and scored, the oldest first.

        With dynamic sampling these are groups that `keep` accepts. If the limit of drawn batches is reached first, the step is filled
        up with the oldest rejected groups. A group is replaced by another if one of its environments broke in every attempt.

        Raises:
            RollError: sampling or scoring a prompt failed, or too many environments broke. `aclose` cancels the other groups.
        """
        self._failed_groups = 0
        if self._most_batches is None:
            groups = await self._whole(self._batch_size)
            self._window.next_step()
            return groups
        kept: list[RolloutGroup] = []
        dropped: list[RolloutGroup] = []
        left = self._most_batches * self._batch_size
        while left and len(kept) < self._batch_size:
            groups = await self._whole(min(self._batch_size - len(kept), left))
            left -= len(groups)
            for group in groups:
                (kept if self._keep(group) else dropped).append(group)
        missing = self._batch_size - len(kept)
        if missing:
            message = "dynamic_sampling kept %d of %d drawn groups, but a step has %d: it is filled up with the oldest dropped groups"
            LOG.warning(message, len(kept), len(kept) + len(dropped), self._batch_size)
        thrown_away = dropped[missing:]
        self._metrics = {
            "sampling/drawn_groups": float(len(kept) + len(dropped)),
            "sampling/dropped_groups": float(len(thrown_away)),
            "sampling/dropped_tokens": float(sum(episode.length for group in thrown_away for episode in group.episodes)),
        }
        self._window.next_step()
        return kept + dropped[:missing]

    def metrics(self) -> Metrics:
        """Return metrics of the last step: with dynamic sampling, the numbers of drawn and dropped groups and of dropped tokens.

        If environments failed, the number of groups that were replaced is included.
        """
        return self._metrics | ({"episode/failed_groups": float(self._failed_groups)} if self._failed_groups else {})

    async def _whole(self, count: int) -> list[RolloutGroup]:
        """Return the next `count` finished groups without a failed environment."""
        groups: list[RolloutGroup] = []
        while len(groups) < count:
            for group in await self._finished(count - len(groups)):
                if (why := failure(group)) is None:
                    groups.append(group)
                    continue
                self._failed_groups += 1
                broke = "prompt %d of domain %s is replaced by another because its environment failed: %s"
                LOG.warning(broke, group.prompt.prompt_id, group.prompt.domain, why)
                if self._failed_groups > MOST_FAILED * self._batch_size:
                    many = f"{self._failed_groups} groups of one step were discarded because their environments failed"
                    raise RollError(f"{many}; the last one, of domain {group.prompt.domain}: {why}; fix this environment")
        return groups

    async def _finished(self, count: int) -> list[RolloutGroup]:
        while self._window.has_room(count):
            self._admit()
        groups: dict[int, RolloutGroup] = {}
        while count > len(groups):
            choice = self._window.choice(count - len(groups))
            chosen = await self._chosen(choice)
            self._window.remove(chosen)
            groups |= {ordinal: self._in_flight.pop(ordinal).task.result() for ordinal in chosen}
        return [groups[ordinal] for ordinal in sorted(groups)]

    async def _chosen(self, choice: Choice) -> list[int]:
        """Wait until `choice.count` groups are finished, including all that are due. Return the ordinals of the groups to hand over.

        They are those of the groups that are due and of the oldest other finished groups.
        """
        finished: set[int] = set()
        news: asyncio.Queue[int] = asyncio.Queue()
        for ordinal in choice.pool:
            self._in_flight[ordinal].task.add_done_callback(lambda _, ordinal=ordinal: news.put_nowait(ordinal))
        while len(finished) < choice.count or not choice.due <= finished:
            ordinal = await news.get()
            self._in_flight[ordinal].task.result()  # raises a failure at once
            finished.add(ordinal)
        others = [ordinal for ordinal in choice.pool if ordinal in finished and ordinal not in choice.due]
        return [*choice.due, *others[: choice.count - len(choice.due)]]

    def _admit(self) -> None:
        position = self._source.state_dict()
        [prompt] = self._source.draw(1)
        ordinal = self._window.draw()
        if ordinal is None:
            return
        stored = self._stored.pop(ordinal, None)
        if stored and self._sampler.yields(prompt, stored.episodes, stored.baseline):
            finished = asyncio.get_running_loop().create_future()
            self._window.set_age(ordinal, stored.age)
            finished.set_result(self._told(stored.of(prompt)))
            self._in_flight[ordinal] = _InFlight(position, finished)
            return
        if stored:
            LOG.warning("prompt %d is sampled again: its group in the checkpoint was sampled with other settings", prompt.prompt_id)
        seed = None if self._seed is None else prompt_seed(self._seed, TRAINING, prompt.prompt_id)
        self._in_flight[ordinal] = _InFlight(position, asyncio.create_task(self._sample(prompt, seed)))

    async def _sample(self, prompt: Prompt, seed: int | None) -> RolloutGroup:
        return self._told(await self._sampler.sample(prompt, seed))

    def _told(self, group: RolloutGroup) -> RolloutGroup:
        if self._finished_one and failure(group) is None:
            self._finished_one(group)
        return group

    def state_dict(self) -> dict[str, Any]:
        """Return the position to resume from: the oldest prompt not handed over yet, and which of the later ones were handed over."""
        head = self._window.head
        source = self._source.state_dict() if head is None else self._in_flight[head].position
        return {**source, "window": self._window.state_dict()} if self._window.slack else source

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position. No group may be in flight."""
        assert not self._in_flight, "the scheduler is already running"
        self._source.load_state_dict({key: value for key, value in state.items() if key != "window"})
        if "window" in state:
            self._window.load_state_dict(state["window"])

    async def save(self, folder: Path) -> None:
        """Write the groups that are finished but not handed over yet. If there are none, write no file."""
        head = self._window.head or 0
        tasks = {ordinal: flight.task for ordinal, flight in self._in_flight.items() if flight.task.done()}
        finished = {ordinal: task.result() for ordinal, task in tasks.items() if not task.cancelled() and not task.exception()}
        groups = {
            ordinal - head: StoredGroup(group.prompt.prompt_id, self._window.age(ordinal), group.episodes, group.baseline)
            for ordinal, group in finished.items()
        }
        if groups:
            await asyncio.to_thread(write_groups, folder / FILE, groups)

    async def load(self, folder: Path) -> None:
        """Read the groups that `save` wrote, if any. No group may be in flight.

        Raises:
            CheckpointError: the file cannot be read.
        """
        if not (folder / FILE).exists():
            return
        self._stored = await asyncio.to_thread(read_groups, folder / FILE)

    async def aclose(self) -> None:
        """Cancel the groups in flight."""
        tasks = [flight.task for flight in self._in_flight.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._window.remove(self._in_flight)
        self._in_flight.clear()
