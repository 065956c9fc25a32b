"""Scores responses: the facade of all domains, the Ray actors of a domain anywhere in the cluster, and the child
process (roll/hosted/process.py) in which each of them runs reward functions.

Waiting groups are sent to the child together. If a child is lost, the new child continues with the remaining calls. If
several calls were in progress, each is repeated alone to find the one at fault. A single call is also repeated, once,
if something outside roll killed or stopped the child.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from roll.backend import Rank
from roll.config.schema.roles import RewardConfig
from roll.hosted.process import HostedProcess, Hosting, Loss, settle
from roll.hosted.protocol import Reply
from roll.hosted.worker import SLACK, HostedSettings, HostedWorker
from roll.ray.group import WorkerGroup
from roll.ray.replacement import Replaced
from roll.rewards.verdicts import (
    Entry,
    PartTraits,
    RewardAssignment,
    crashed,
    normalised,
    parts_of,
    read_results,
    read_traits,
    summed,
    timed_out,
)
from roll.system.ranked import LeastBusy
from roll.system.sizes import GIB
from roll.system.tree import TreeBounds
from roll.types import Prompt, RewardResult

LOG = logging.getLogger(__name__)
CHILD = "roll.rewards.child"
MOST_AHEAD = 32
"""Largest number of groups that are sent together to a child that makes one call at a time. With several groups,
neither process has to wait for the other after each result.
"""
LINGER = 0.005
"""Seconds to wait for further results after the first, so that they are processed together."""
REPLACED = 30.0
"""Time in seconds for replacing a child process that was broken by a response."""


@dataclass(eq=False)
class _Group:
    """The responses to one prompt, to be scored."""

    prompt: Prompt
    responses: Sequence[str]
    results: dict[int, list[Any]]
    """By the index of the part: one `RewardResult` for each response, None until it is known."""
    missing: int
    """Number of results that are not known yet."""
    done: asyncio.Future[None]
    """Set when all results are known. Cancelled if the waiting caller is cancelled."""


@dataclass(eq=False)
class _Batch:
    """Calls of one part for consecutive responses of a group: one for each, or one for all of a group reward."""

    group: _Group
    part: int
    begin: int
    end: int
    """Index after the last response."""
    calls: int
    """Number of calls."""
    number: int = 0
    """Number of the first call, once the calls are sent. The other calls have the numbers after it."""
    was_disturbed: bool = False
    """Whether something outside roll killed or stopped the child during the call. The second time, it fails."""

    def responses(self, number: int) -> Sequence[str]:
        """Return the responses of a call."""
        begin = self.begin + number - self.number
        return self.group.responses[begin : begin + (self.end - self.begin) // self.calls]

    def settle(self, number: int, results: list[RewardResult]) -> None:
        """Store the results of a call."""
        group, begin = self.group, self.begin + number - self.number
        group.results[self.part][begin : begin + len(results)] = results
        group.missing -= len(results)
        if not group.missing and not group.done.done():
            group.done.set_result(None)


class RewardProcess(HostedProcess[_Batch, tuple[PartTraits, ...]]):
    """Scores the responses of one domain. Must be used from a single asyncio event loop."""

    def __init__(self, domain: str, section: RewardConfig, start_seconds: float, checks_rows: bool = False) -> None:
        """
        Args:
            section: the domain's block of the configuration.
            start_seconds: deadline for the child to start and to import its rewards.
            checks_rows: whether calls check rows (`row_check`) instead of computing rewards.
        """
        self._section, self._parts = section, parts_of(domain, section)
        bounds = TreeBounds(int(section.memory_gib * GIB), section.max_processes)
        assignment = RewardAssignment(
            domain, section.timeout, bounds.memory_bytes, self._parts, section.concurrency, checks_rows
        )
        place = f"rewards.{domain}"
        hosting = Hosting(CHILD, "reward", place, "verdict", assignment, section.system_envs, bounds, start_seconds)
        super().__init__(hosting, lambda traits: read_traits(traits, len(self._parts)), LINGER)
        self._reported: set[str] = set()
        self._waiting: deque[_Group] = deque()
        self._queue: deque[_Batch] = deque()
        """Batches to send before new groups: the rest of groups partly sent, and calls a lost child had not begun."""
        self._alone: deque[_Batch] = deque()
        """Calls that were in progress when a child was lost. Each is repeated alone."""

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        """Return one result for each response, in order. If the domain has parts, it is the weighted sum of the parts'
        results.

        The deadline (`timeout` of the domain) applies to each call separately. Results that are not SCORED count with
        `failed_value`; see `summed`.

        Raises:
            HostedProcessFailed: a lost child could not be replaced.
            RollError: the process is closed.
        """
        results = await self.results(prompt, responses, range(len(self._parts)))
        return summed(self._parts, results)

    async def results(self, prompt: Prompt, responses: Sequence[str], parts: Sequence[int]) -> list[list[RewardResult]]:
        """Return the results of the parts with these indices, [parts][responses]. Raises the same errors as `score`."""
        self._check_open()
        blank = {part: [None] * len(responses) for part in parts}
        group = _Group(
            prompt, responses, blank, len(parts) * len(responses), asyncio.get_running_loop().create_future()
        )
        if group.missing:
            self._waiting.append(group)
            self._serve_soon()
            try:
                await group.done
            except asyncio.CancelledError:
                self._forget(group)
                raise
        return [group.results[part] for part in parts]

    def _forget(self, group: _Group) -> None:
        """End the running call of a group whose caller is gone. Concurrent calls continue, because killing the child
        would end them all.
        """
        _, first = next(iter(self._sent.values()), (0, None))
        if self._section.concurrency == 1 and first and first.group is group and self._child is not None:
            self._child.end_process()

    @property
    def _concurrency(self) -> int:
        return self._section.concurrency

    def _has_waiting(self) -> bool:
        return bool(self._waiting or self._queue or self._alone)

    def _next_calls(self) -> list[Entry]:
        return [self._entry(batch) for batch in self._next_batches()]

    def _next_batches(self) -> list[_Batch]:
        if self._alone:
            return [] if self._sent else [self._alone.popleft()]
        concurrency, taken, count, groups = self._section.concurrency, [], len(self._sent), 0
        if concurrency == 1 and count:
            return []
        while (self._queue or self._waiting) and (groups < MOST_AHEAD if concurrency == 1 else count < 2 * concurrency):
            if not self._queue:
                groups += 1
                self._queue.extend(self._batches(self._waiting.popleft()))
            batch = self._queue.popleft()
            if not batch.group.done.done():
                taken.append(batch)
                count += batch.calls
        return taken

    def _batches(self, group: _Group) -> list[_Batch]:
        count = len(group.responses)
        return [_Batch(group, part, 0, count, 1 if self._parts[part].group else count) for part in group.results]

    def _entry(self, batch: _Batch) -> Entry:
        """Register a batch as sent, and return its message."""
        batch.number, seals = self._register(batch, batch.calls)
        return batch.number, batch.part, batch.group.prompt, batch.group.responses[batch.begin : batch.end], seals

    def _answered(self, call: _Batch, reply: Reply) -> None:
        results, replaced = read_results(reply, call.responses(reply.number))
        del self._sent[reply.number], self._begun[reply.number]
        call.settle(reply.number, results)
        if replaced:
            self._part_with(replaced)

    def _lost(self, sent: Mapping[int, _Batch], begun: Sequence[int], loss: Loss) -> None:
        """The running call gets a result without a verdict, and the other calls are queued again.

        Several running calls are repeated one at a time. A single one is repeated, once, if it was disturbed.
        """
        suspects = [_one(sent[number], number) for number in begun]
        self._put_back({number: batch for number, batch in sent.items() if number not in begun})
        if len(suspects) > 1 or (loss.disturbed and not any(batch.was_disturbed for batch in suspects)):
            if loss.disturbed:
                why = "it was stopped (SIGSTOP)" if loss.is_late else loss.why
                LOG.warning("%s: its process is lost, and the running calls are repeated: %s", self._hosting.place, why)
            self._alone.extend(replace(batch, was_disturbed=loss.disturbed) for batch in suspects)
            return
        result = timed_out(self._section.timeout) if loss.is_late else crashed(loss.why)
        for batch in suspects:
            batch.settle(batch.number, [result] * (batch.end - batch.begin))

    def _part_with(self, replaced: str) -> None:
        """End a child in which a definition was replaced, and queue its unanswered calls again."""
        if replaced not in self._reported:
            self._reported.add(replaced)
            LOG.warning(
                "%s: a reward function replaced %s. After each such call the next one runs in a new process, "
                "which is slow; let the function restore what it replaces",
                self._hosting.place,
                replaced,
            )
        self._end()
        self._put_back(self._withdraw_calls())

    def _put_back(self, sent: Mapping[int, _Batch]) -> None:
        """Queue unanswered calls of an ended child again."""
        self._queue.extendleft(reversed([_one(batch, number) for number, batch in sent.items()]))

    def _abandon(self, error: BaseException) -> None:
        begun = (batch.group for batch in (*self._alone, *self._queue, *(batch for _, batch in self._sent.values())))
        for group in (*self._waiting, *begun):
            settle(group.done, error)
        for held in (self._waiting, self._queue, self._alone):
            held.clear()


def _one(batch: _Batch, number: int) -> _Batch:
    """Return one call of a sent batch as a batch."""
    begin = batch.begin + number - batch.number
    return replace(batch, begin=begin, end=begin + (batch.end - batch.begin) // batch.calls, calls=1, number=number)


class RewardSettings(HostedSettings[RewardConfig]):
    """Settings of `RewardWorker`."""

    def build(self, rank: Rank) -> RewardWorker:
        return RewardWorker(self)


class RewardWorker(HostedWorker[RewardProcess]):
    """Scores responses in a Ray actor."""

    def __init__(self, settings: RewardSettings) -> None:
        super().__init__(RewardProcess(settings.domain, settings.section, settings.start_seconds))

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        """Return one result for each response."""
        return await self._process.score(prompt, responses)


class ModelReward(Protocol):
    """A model that scores a domain instead of reward functions."""

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
        """Return one result for each response, in order."""
        ...


class Rewards:
    """Facade of the reward groups: routes a prompt to the least busy worker of its domain, or to the domain's model.

    If a worker dies, its replacement scores the unanswered responses.
    """

    def __init__(
        self,
        groups: Mapping[str, WorkerGroup[RewardWorker]],
        sections: Mapping[str, RewardConfig],
        start_seconds: float,
        models: Mapping[str, ModelReward] | None = None,
    ) -> None:
        """`start_seconds` is a replacement's deadline for each part of its start; `models` those without a group."""
        self._workers = {domain: Replaced(group, start_seconds) for domain, group in groups.items()}
        self._sections, self._models = sections, models or {}
        self._waiting = {domain: LeastBusy(len(group)) for domain, group in groups.items()}

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
        """Return a result for each response to a prompt. If the domain `compares`, pass the group's at once."""
        if prompt.domain in self._models:
            return await self._models[prompt.domain].score(prompt, responses)
        workers, waiting = self._workers[prompt.domain], self._waiting[prompt.domain]
        worker, responses_there = waiting.take(len(responses))
        try:
            seconds = longest(self._sections[prompt.domain], responses_there)
            return await workers.one(worker, seconds, RewardWorker.score, replace(prompt, shown=None), responses)
        finally:
            waiting.leave(worker, len(responses))

    def compares(self, prompt: Prompt) -> bool:
        """Return whether a reward of the prompt's domain needs all responses of the group at once."""
        section = self._sections[prompt.domain]
        return section.group or any(part.group for part in section.parts.values())

    def combined(self, prompt: Prompt, results: Sequence[RewardResult]) -> Sequence[RewardResult]:
        """Combine the results of a group. With `normalise: group`, a reward is the sum of its normalised parts."""
        section = self._sections[prompt.domain]
        if section.normalise == "none":
            return results
        return normalised({name: part.weight for name, part in section.parts.items()}, results)


def longest(section: RewardConfig, responses: int) -> float:
    """Return the longest time in seconds for scoring these responses: every call times out and breaks its process."""
    tries = 1 if section.concurrency == 1 else 2  # once concurrently with others, once alone
    return (section.timeout + REPLACED) * responses * max(len(section.parts), 1) * tries + SLACK
