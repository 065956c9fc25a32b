"""Runs reward functions in a separate process that can be killed, so that they cannot hang, crash or block the run.

The child process (child.py) makes one call at a time, or up to `concurrency` calls concurrently. Waiting groups are
sent to it together.

A child is replaced if it dies. It is killed and replaced in three cases: a call exceeds its deadline and the child does
not end it itself; the child and its descendants exceed their limit of memory or processes; or the child sends a message
that does not answer a call in progress. The new child continues with the remaining calls. If several calls were in
progress, each is repeated alone to find the one at fault. A single call is also repeated, once, if something outside
roll killed or stopped the child.

A child is a fresh interpreter, never a fork of this process, and imports only the modules that its rewards need.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from roll.config.schema.roles import RewardConfig
from roll.errors import ConfigError, RollError
from roll.hosted.contained import CANCEL_SECONDS, Child, ChildDied
from roll.hosted.frames import Garbled, new_seals
from roll.rewards.hosting.messages import (
    Entry,
    PartTraits,
    RewardAssignment,
    RewardOutcomeMessage,
    RewardsReady,
    read_answer,
    read_rewards_ready,
    results_of,
)
from roll.rewards.parts import parts_of, summed
from roll.rewards.verdicts import crashed, timed_out
from roll.system.sizes import GIB
from roll.system.tree import TreeBounds
from roll.types import Prompt, RewardResult

LOG = logging.getLogger(__name__)
CHILD = "roll.rewards.hosting.child"
MOST_AHEAD = 32
"""Largest number of groups that are sent together to a child that makes one call at a time. With several groups,
neither process has to wait for the other after each result.
"""
LINGER = 0.005
"""Seconds to wait for further results after the first, so that they are processed together."""


class RewardProcessFailed(RollError):
    """A reward process did not start."""


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
    """Calls of one part for consecutive responses of a group: one call for each response, or one for all if it is a
    group reward.
    """

    group: _Group
    part: int
    begin: int
    end: int
    """Index after the last response."""
    calls: int
    """Number of calls."""
    number: int = 0
    """Number of the first call, once the calls are sent. The other calls have the numbers after it."""
    seals: Sequence[int] = ()
    """Seals of the calls (see roll/hosted/frames.py), once they are sent."""
    was_disturbed: bool = False
    """Whether something outside roll killed or stopped the child during the call. If that happens again, the call
    fails.
    """

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


class RewardProcess:
    """Scores the responses of one domain. Must be used from a single asyncio event loop.

    Linux ends the child when the thread that started it ends, so the thread of the event loop must outlive this object.
    """

    def __init__(self, domain: str, section: RewardConfig, start_seconds: float, checks_rows: bool = False) -> None:
        """
        Args:
            section: the domain's block of the configuration.
            start_seconds: deadline for the child to start and to import its rewards.
            checks_rows: whether calls check rows (`row_check`) instead of computing rewards.
        """
        self._section, self._start_seconds = section, start_seconds
        self._parts = parts_of(domain, section)
        self._bounds = TreeBounds(int(section.memory_gib * GIB), section.max_processes)
        memory = self._bounds.memory_bytes
        self._assignment = RewardAssignment(
            domain, self._parts, section.concurrency, section.timeout, memory, checks_rows
        )
        self._child: Child | None = None
        self._watching: asyncio.Task[None] | None = None
        self._told: set[str] = set()
        self._ready = RewardsReady(())
        self._turn = asyncio.Lock()
        self._closed = False
        self._serving: asyncio.Task[None] | None = None
        self._waiting: deque[_Group] = deque()
        self._queue: deque[_Batch] = deque()
        """Batches to send before new groups: the rest of groups that were partly sent, and calls that a lost child had
        not begun.
        """
        self._alone: deque[_Batch] = deque()
        """Calls that were in progress when a child was lost. Each is repeated alone."""
        self._sent: dict[int, _Batch] = {}
        """Calls sent to the child and not yet answered, by number, in the order in which they start."""
        self._begun: dict[int, float] = {}
        """Start times of the calls in progress (the first `concurrency` of `_sent`), by number. They may be slightly
        late, never early.
        """
        self._number = 0

    async def start(self) -> tuple[PartTraits, ...]:
        """Start the child, so that a reward function that cannot be loaded is reported before training.

        Returns:
            The declared traits of each part.

        Raises:
            ConfigError: a reward function is not found, does not accept its `reward_args`, or cannot run concurrently
                as configured.
            RewardProcessFailed: the child died or did not start in time.
        """
        async with self._turn:
            await self._started()
            return self._ready.traits

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        """Return one result for each response, in order. If the domain has parts, it is the weighted sum of the parts'
        results.

        The deadline (`timeout` of the domain) applies to each call separately. Results that are not SCORED count with
        `failed_value`; see `summed`.

        Raises:
            RewardProcessFailed: a lost child could not be replaced.
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
            self._see_to_it()
            try:
                await group.done
            except asyncio.CancelledError:
                self._forget(group)
                raise
        return [group.results[part] for part in parts]

    def _see_to_it(self) -> None:
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        elif self._section.concurrency > 1 and self._child is not None:
            self._child.wake()

    def _forget(self, group: _Group) -> None:
        """End the running call of a group whose caller is gone. Concurrent calls continue, because killing the child
        would end them all.
        """
        first = next(iter(self._sent.values()), None)
        if self._section.concurrency == 1 and first and first.group is group and self._child is not None:
            self._child.end_process()

    async def close(self) -> None:
        """Kill the child. Calls of `score` in progress raise RollError."""
        self._closed = True
        if self._child is not None:
            self._child.end_process()  # this also wakes the task that waits for its messages
        async with self._turn:
            self._end()

    def _check_open(self) -> None:
        if self._closed:
            raise RollError("the reward process is closed")

    async def _serve(self) -> None:
        """Score all waiting groups."""
        async with self._turn:
            try:
                while self._waiting or self._queue or self._alone or self._sent:
                    self._check_open()
                    await self._exchange()
            except BaseException as error:
                self._end()
                begun = (batch.group for batch in (*self._alone, *self._queue, *self._sent.values()))
                for group in (*self._waiting, *begun):
                    _fail(group.done, error)
                for held in (self._waiting, self._queue, self._alone, self._sent, self._begun):
                    held.clear()
                if not isinstance(error, Exception):
                    raise

    async def _exchange(self) -> None:
        """Send calls, and process at least one answer or the loss of the child."""
        # a child that has died is replaced only after its unanswered calls are processed
        child = self._child if self._sent and self._child else await self._started()
        seconds = self._section.timeout + (CANCEL_SECONDS if self._ready.ends_calls else 0.0)
        loop = asyncio.get_running_loop()
        entries = [self._entry(batch) for batch in self._next_calls()]
        self._begin(loop.time())
        if not self._sent:
            return
        try:
            if entries:
                await child.send(entries, seconds)
            left = next(iter(self._begun.values())) + seconds - loop.time()
            messages = await child.receive(left, LINGER if len(self._sent) > 1 else 0.0)
            now = loop.time()
            for message in messages:
                if replaced := self._store(read_answer(message), now):
                    self._part_with(replaced)
                    break
        except TimeoutError:
            self._lose(timed_out(self._section.timeout), child.is_stopped())
        except ChildDied as died:
            self._lose(crashed(str(died)), child.was_killed())
        except Garbled as garbled:
            self._lose(crashed(f"its process sent an invalid verdict: {garbled}"))

    def _store(self, answer: RewardOutcomeMessage, now: float) -> str:
        """Store the results of a call. Return the name of a definition that was replaced during the call, or an empty
        string.

        Raises:
            Garbled: the answer is malformed, or does not belong to a call in progress.
        """
        number = answer.number
        if number not in self._begun:
            self._begin(now)
        if number not in self._begun or answer.seal != (batch := self._sent[number]).seals[number - batch.number]:
            raise Garbled("it does not carry the number of a call in progress")
        results = results_of(answer.results, batch.responses(number))
        del self._sent[number], self._begun[number]
        batch.settle(number, results)
        return answer.replaced

    def _next_calls(self) -> list[_Batch]:
        """Return the calls to send now. A child that makes one call at a time reads no messages during a call, so later
        calls wait.
        """
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
        batch.number = self._number
        self._number += batch.calls
        batch.seals = new_seals(batch.calls)
        self._sent.update(dict.fromkeys(range(batch.number, self._number), batch))
        return batch.number, batch.part, batch.group.prompt, batch.group.responses[batch.begin : batch.end], batch.seals

    def _begin(self, now: float) -> None:
        for number in islice(self._sent, self._section.concurrency):
            self._begun.setdefault(number, now)

    def _lose(self, result: RewardResult, disturbed: bool = False) -> None:
        """End a lost child. Its running call gets this result, and its other calls are queued again.

        Several running calls are repeated one at a time. A single one is repeated, once, if `disturbed`: something
        outside roll killed or stopped the child.
        """
        self._check_open()
        self._end()
        self._begin(asyncio.get_running_loop().time())
        suspects = [_one(self._sent.pop(number), number) for number in self._begun]
        self._put_back()
        if len(suspects) > 1 or (disturbed and not any(batch.was_disturbed for batch in suspects)):
            self._alone.extend(replace(batch, was_disturbed=disturbed) for batch in suspects)
            return
        for batch in suspects:
            batch.settle(batch.number, [result] * (batch.end - batch.begin))

    def _part_with(self, replaced: str) -> None:
        """End a child in which a definition was replaced, and queue its unanswered calls again."""
        if replaced not in self._told:
            self._told.add(replaced)
            LOG.warning(
                "rewards.%s: a reward function replaced %s. After each such call the next one runs in a new process, "
                "which is slow; let the function restore what it replaces",
                self._assignment.domain,
                replaced,
            )
        self._end()
        self._put_back()

    def _put_back(self) -> None:
        """Queue the unanswered calls of an ended child again."""
        self._queue.extendleft(reversed([_one(batch, number) for number, batch in self._sent.items()]))
        self._begun.clear()
        self._sent.clear()

    async def _started(self) -> Child:
        """Return the child, started if necessary."""
        if self._child is not None and self._child.alive():
            return self._child
        self._end()
        self._child = Child(CHILD, self._section.system_envs)
        try:
            self._watching = asyncio.create_task(self._child.watch(f"rewards.{self._assignment.domain}", self._bounds))
            await self._child.send(self._assignment, self._start_seconds)
            message, *_ = await self._child.receive(self._start_seconds)
            self._ready = read_rewards_ready(message, len(self._parts))
        except BaseException as error:
            self._end()
            if isinstance(error, TimeoutError):
                raise RewardProcessFailed(
                    f"the reward process was not ready after {self._start_seconds:g} s"
                ) from error
            if isinstance(error, ChildDied | Garbled):
                raise RewardProcessFailed(f"the reward process did not start: {error}") from error
            raise
        if self._ready.faults:
            self._end()
            raise ConfigError(self._ready.faults)
        return self._child

    def _end(self) -> None:
        """End the child, if there is one, and close its socket. No task may be waiting for a message from it."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if self._child is not None:
            self._child.kill()
            self._child = None


def _one(batch: _Batch, number: int) -> _Batch:
    """Return one call of a sent batch as a batch."""
    begin = batch.begin + number - batch.number
    return replace(
        batch, begin=begin, end=begin + (batch.end - batch.begin) // batch.calls, calls=1, number=number, seals=()
    )


def _fail(done: asyncio.Future[None], error: BaseException) -> None:
    """Make the waiting caller raise an error."""
    if done.done():
        return
    if isinstance(error, asyncio.CancelledError):
        done.cancel()
    else:
        done.set_exception(error)
