"""Keeps prompts in flight and hands over finished groups.

    sampler ──draw──▶ prompts in flight (at most (1 + async_generation_ratio) x batch) ──take──▶ loop

With ratio 0, all groups of a step are drawn, finished and handed over before the trainer starts: synchronous training.
With ratio r, r batches are still being generated while the trainer works. By default groups are handed over in the
order in which they were drawn, so that a run is reproducible. With a wider window, groups that finish first are handed
over first (`Window`), but no group waits longer than the window's age limit.

No group is discarded, with two exceptions. A group is replaced by another if one of its environments failed. With
dynamic sampling, groups that `keep` rejects, such as groups whose rewards are all equal, are replaced up to a limit.

Decides which of the groups in flight a take (one call of `RolloutScheduler.take`) may hand over. Works on counts alone.

    in flight   2 5 6 7 8 9 | 10 11 ...       ordinals, in the order in which prompts were drawn
                the window  |

A take chooses among the oldest groups in flight, as many as the window is wide. With a window of one batch, groups are
first in, first out. With a wider one, a take may leave slow groups to a later take, but none for longer than `limit`
steps: it waits for the oldest groups if later takes have no room for all of them within the limit.

Saves finished groups that no step has used yet, so that a resumed run does not generate them again.

The saved groups are part of a checkpoint: one safetensors file with the concatenated tokens and log-probs of all
segments, and a JSON text with the structure of groups, episodes and segments.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from roll.config.derived.batch import age_limit
from roll.errors import CheckpointError, RollError
from roll.rollout.filters import Keep, failure, rewards_differ
from roll.rollout.group import GroupSampler, prompt_seed
from roll.rollout.record import observed
from roll.types import (
    Episode,
    Metrics,
    PartnerTurn,
    Prompt,
    RewardOutcome,
    RewardResult,
    RolloutGroup,
    Segment,
    StopReason,
    Trajectory,
    TurnReward,
    VersionRun,
)

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
        """Return the group with its prompt. Raises CheckpointError if it belongs to another."""
        if prompt.prompt_id != self.prompt_id:
            found = f"the checkpoint holds a group of prompt {self.prompt_id}, but prompt {prompt.prompt_id} was drawn"
            raise CheckpointError(f"{found}; resume from another checkpoint")
        return RolloutGroup(observed(prompt, self.episodes), self.episodes, self.baseline)


def write_groups(path: Path, groups: Mapping[int, StoredGroup]) -> None:
    """Write groups to a file, by the position of their prompts in the order of drawing from the oldest unused on."""
    tokens: list[Any] = [np.zeros(0, np.int32)]
    log_probs: list[Any] = [np.zeros(0, np.float32)]
    routes: list[Any] = [np.zeros(0, np.int16)]

    def segment(one: Segment) -> dict[str, Any]:
        tokens.append(one.token_ids)
        log_probs.append(np.zeros(0, np.float32) if one.log_probs is None else one.log_probs)
        runs = [[run.version, run.tokens] for run in one.versions]
        has_log_probs = one.log_probs is not None
        said = {"length": len(one.token_ids), "sampled": one.sampled, "log_probs": has_log_probs, "versions": runs}
        if one.routes is not None:
            routes.append(one.routes.reshape(-1))
            said["routes"] = one.routes.shape
        return said | {"text": one.text, "calls": list(map(dict, one.calls))}

    def episode(one: Episode) -> dict[str, Any]:
        paths = [
            {"segments": [segment(part) for part in path.segments], "stop": path.stop.value}
            for path in one.trajectories
        ]
        reward = one.reward
        turns = [[turn.end, turn.value] for turn in reward.turns]
        verdict = {"value": reward.value, "score": reward.score, "outcome": reward.outcome.value}
        said = verdict | {"parts": dict(reward.parts), "note": reward.note, "turns": turns}
        states: dict[str, Any] = {"turn_states": list(one.turn_states), "metrics": dict(one.metrics)}
        states["partner_turns"] = [[turn.after, turn.partner, turn.text] for turn in one.partner_turns]
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
    arrays = {
        "token_ids": np.concatenate(tokens),
        "log_probs": np.concatenate(log_probs),
        "routes": np.concatenate(routes),
    }
    save_file(arrays | {"groups": np.frombuffer(json.dumps(told).encode(), np.uint8)}, path)


def read_groups(path: Path) -> dict[int, StoredGroup]:
    """Return the groups of a file of `write_groups`, by its keys. Raises CheckpointError if it cannot be read."""
    try:
        return _read(load_file(path))
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path}: cannot read the finished groups: {error}; resume from another checkpoint"
        ) from error


def _read(arrays: Mapping[str, Any]) -> dict[int, StoredGroup]:
    token_ids, log_probs = _Cut(arrays["token_ids"]), _Cut(arrays["log_probs"])
    # Checkpoints of earlier versions have no routes.
    routes = _Cut(arrays.get("routes", np.zeros(0, np.int16)))

    def segment(said: dict[str, Any]) -> Segment:
        length = said["length"]
        kept = log_probs.next(length) if said["log_probs"] else None
        versions = tuple(VersionRun(*run) for run in said["versions"])
        laid = routes.next(math.prod(said["routes"])).reshape(said["routes"]) if "routes" in said else None
        return Segment(token_ids.next(length), said["sampled"], kept, versions, said["text"], said["calls"], laid)

    def episode(said: dict[str, Any]) -> Episode:
        paths = [
            Trajectory([segment(part) for part in path["segments"]], StopReason(path["stop"]))
            for path in said["trajectories"]
        ]
        reward, turns = said["reward"], tuple(TurnReward(*turn) for turn in said["reward"]["turns"])
        # Checkpoints of earlier versions have no score.
        outcome, score = RewardOutcome(reward["outcome"]), reward.get("score")
        result = RewardResult(reward["value"], outcome, reward["parts"], reward["note"], turns, score)
        # Checkpoints of earlier versions have no turns of partners.
        partners = tuple(PartnerTurn(*turn) for turn in said.get("partner_turns", ()))
        return Episode(paths, result, said["turn_rewards"], said["turn_states"], said["metrics"], partners)

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


@dataclass(frozen=True)
class Choice:
    """The groups that a take may choose from."""

    pool: list[int]
    """Ordinals of the groups, the oldest first."""
    count: int
    """Number of groups to hand over."""
    due: frozenset[int]
    """Ordinals that must be handed over now, because later steps could not hand over all groups within the age limit.
    """


class Window:
    """The ordinals of the groups in flight, and the step in which each was drawn."""

    def __init__(self, batch: int, ratio: float, width: int) -> None:
        """`width` is a multiple of `batch`; both count groups."""
        assert width % batch == 0, f"a window of {width} is not divisible by the batch size, {batch}"
        self._batch, self._ahead = batch, round(ratio * batch)
        self.slack = width - batch
        """Largest number of older groups that may still be in flight when a group is handed over."""
        self.limit = age_limit(ratio, width // batch)
        """Largest age of a group that is handed over, in steps."""
        self._next = self._step = 0
        self._drawn_at: dict[int, int] = {}  # step in which each group was drawn, by ordinal
        self._known_gone: set[int] = set()  # after a resume: ordinals that were handed over before it, to be skipped

    def has_room(self, wanted: int) -> bool:
        """Whether another group may be drawn while a take wants `wanted` groups."""
        return len(self._drawn_at) < wanted + self._ahead

    def draw(self) -> int | None:
        """Draw a group. Return its ordinal, or None if the group was handed over before a resume."""
        ordinal, self._next = self._next, self._next + 1
        if ordinal in self._known_gone:
            self._known_gone.remove(ordinal)
            return None
        self._drawn_at[ordinal] = self._step
        return ordinal

    def age(self, ordinal: int) -> int:
        """Return the number of steps since a group in flight was drawn."""
        return self._step - self._drawn_at[ordinal]

    def set_age(self, ordinal: int, steps: int) -> None:
        """Set the age of a group in flight that was drawn before a resume, in steps."""
        self._drawn_at[ordinal] = self._step - steps

    def choice(self, wanted: int) -> Choice:
        """Return the groups that a take of `wanted` may choose from. `Choice.count` is smaller if fewer are left."""
        assert self._drawn_at, "nothing is in flight"
        pool = list(islice(self._drawn_at, wanted + self.slack))
        due = sorted(pool, key=self._drawn_at.__getitem__)[: min(self._beyond_later_steps(), wanted)]
        return Choice(pool, min(wanted, len(pool)), frozenset(due))

    def _beyond_later_steps(self) -> int:
        """Return the number of groups for which later steps have no room within the age limit."""
        steps_left = (drawn + self.limit - self._step for drawn in sorted(self._drawn_at.values()))
        return max(0, *(count - self._batch * left for count, left in enumerate(steps_left, 1)))

    def remove(self, ordinals: Iterable[int]) -> None:
        """Record that groups were handed over."""
        for ordinal in ordinals:
            del self._drawn_at[ordinal]

    def next_step(self) -> None:
        """Record that a step has all its groups."""
        self._step += 1

    @property
    def head(self) -> int | None:
        """Return the oldest ordinal in flight; None if nothing is in flight."""
        return next(iter(self._drawn_at), None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values. A resumed run draws from the head, so ordinals are relative to it."""
        head = self._next if self.head is None else self.head
        gone = [ordinal - head for ordinal in range(head, self._next) if ordinal not in self._drawn_at]
        return {"gone": gone + [ordinal - head for ordinal in sorted(self._known_gone)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned. The head becomes ordinal 0."""
        self._known_gone = set(state["gone"])


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


class GroupObserver(Protocol):
    """What learns from the groups of each step, such as how hard their prompts are, for later draws of the source."""

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Take all groups that a step was handed, those included that it discards, in the order of handing over."""
        ...

    def metrics(self) -> Metrics:
        """Return the metrics of the last step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state after a step as JSON-serialisable values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state."""
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
        observer: GroupObserver | None = None,
    ) -> None:
        """
        Args:
            batch_size: number of groups of a step.
            seed: seed from which the seed of every prompt is derived; with None the engine chooses the seeds.
            window: number of groups from which `take` chooses, a multiple of `batch_size`; None means one batch.
            most_batches: limit of dynamic sampling: groups that `keep` rejects are replaced until this many batches are
                drawn for one step. None turns dynamic sampling off.
            keep: filter of dynamic sampling.
            finished: called with each group as soon as it is finished and scored, before a step takes it. It is not
                called with a group that will be replaced because one of its environments broke.
            observer: observes the groups of each step at its end. Its state is part of the scheduler's.
        """
        self._source, self._sampler = source, sampler
        self._batch_size = batch_size
        self._window = Window(batch_size, async_generation_ratio, window or batch_size)
        self._seed = seed
        self._is_dynamic, self._most_groups = most_batches is not None, (most_batches or 1) * batch_size
        self._keep: Keep = keep if self._is_dynamic else lambda group: True
        self._finished_one, self._observer = finished, observer
        self._in_flight: dict[int, _InFlight] = {}  # by ordinal, the oldest first
        self._stored: dict[
            int, StoredGroup
        ] = {}  # by ordinal: groups from the checkpoint whose prompts are not drawn again yet
        self._metrics: Metrics = {}
        self._failed_groups = 0  # number in this step

    async def take(self) -> list[RolloutGroup]:
        """Return `batch_size` groups, finished and scored, the oldest first.

        With dynamic sampling these are groups that `keep` accepts. If the limit of drawn batches is reached first, the
        step is filled up with the oldest rejected groups. A group is replaced by another if one of its environments
        broke in every attempt.

        Raises:
            RollError: sampling or scoring a prompt failed, or too many environments broke. `aclose` cancels the other
                groups.
        """
        self._failed_groups = 0
        kept: list[RolloutGroup] = []
        dropped: list[RolloutGroup] = []
        handed: list[RolloutGroup] = []
        while len(kept) < self._batch_size and (left := self._most_groups - len(kept) - len(dropped)):
            wanted = min(self._batch_size - len(kept), left)
            while self._window.has_room(wanted):
                position, [prompt] = self._source.state_dict(), self._source.draw(1)
                ordinal = self._window.draw()
                if ordinal is None:
                    continue
                group = self._restored(ordinal, prompt)
                if group is None:
                    seed = None if self._seed is None else prompt_seed(self._seed, TRAINING, prompt.prompt_id)
                    group = asyncio.create_task(self._sampled(prompt, seed))
                group.add_done_callback(self._announce_finished)
                self._in_flight[ordinal] = _InFlight(position, group)
            handed += (groups := await self._finished(wanted))
            for group in self._without_failed(groups):
                (kept if self._keep(group) else dropped).append(group)
        filling = dropped[: self._batch_size - len(kept)]
        if self._is_dynamic:
            self._count_dropped(kept, dropped, filling)
        if self._observer:
            self._observer.observe(handed)
        self._window.next_step()
        return kept + filling

    async def _sampled(self, prompt: Prompt, seed: int | None) -> RolloutGroup:
        """Return the group of a prompt, with the times at which its sampling began and ended."""
        began = time.time()
        group = await self._sampler.sample(prompt, seed)
        return group if group.ended is not None else replace(group, began=began, ended=time.time())

    def _count_dropped(
        self, kept: Sequence[RolloutGroup], dropped: Sequence[RolloutGroup], filling: Sequence[RolloutGroup]
    ) -> None:
        """Set the metrics of dynamic sampling, and warn of a step that is filled up."""
        if filling:
            message = "dynamic_sampling kept %d of %d drawn groups for a step of %d: the oldest dropped ones fill it up"
            LOG.warning(message, len(kept), len(kept) + len(dropped), self._batch_size)
        thrown_away = dropped[len(filling) :]
        self._metrics = {
            "sampling/drawn_groups": float(len(kept) + len(dropped)),
            "sampling/dropped_groups": float(len(thrown_away)),
            "sampling/dropped_tokens": float(
                sum(episode.length for group in thrown_away for episode in group.episodes)
            ),
        }

    def metrics(self) -> Metrics:
        """Return metrics of the last step: with dynamic sampling, the numbers of drawn and dropped groups and of
        dropped tokens.

        If environments failed, the number of groups that were replaced is included. So are the observer's metrics.
        """
        failed = {"episode/failed_groups": float(self._failed_groups)} if self._failed_groups else {}
        return self._metrics | failed | (self._observer.metrics() if self._observer else {})

    def _without_failed(self, groups: Sequence[RolloutGroup]) -> Iterator[RolloutGroup]:
        """Yield the groups without a failed environment, and count others. Raises RollError if they are too many."""
        for group in groups:
            if (why := failure(group)) is None:
                yield group
                continue
            self._failed_groups += 1
            broke = "prompt %d of domain %s is replaced by another because its environment failed: %s"
            LOG.warning(broke, group.prompt.prompt_id, group.prompt.domain, why)
            if self._failed_groups > MOST_FAILED * self._batch_size:
                many = f"{self._failed_groups} groups of one step were discarded because their environments failed"
                raise RollError(f"{many}; the last one, of domain {group.prompt.domain}: {why}; fix this environment")

    async def _finished(self, count: int) -> list[RolloutGroup]:
        """Wait for `count` groups, and return them in the order in which they were drawn."""
        groups: dict[int, RolloutGroup] = {}
        while count > len(groups):
            choice = self._window.choice(count - len(groups))
            chosen = await self._chosen(choice)
            self._window.remove(chosen)
            groups |= {ordinal: self._in_flight.pop(ordinal).task.result() for ordinal in chosen}
        return [groups[ordinal] for ordinal in sorted(groups)]

    async def _chosen(self, choice: Choice) -> list[int]:
        """Wait until `choice.count` groups are finished, including all that are due. Return the ordinals of the groups
        to hand over.

        They are those of the groups that are due and of the oldest other finished groups.
        """
        finished, due = set[int](), set(choice.due)
        news: asyncio.Queue[int] = asyncio.Queue()
        for ordinal in choice.pool:
            self._in_flight[ordinal].task.add_done_callback(lambda _, ordinal=ordinal: news.put_nowait(ordinal))
        while len(finished) < choice.count or due:
            ordinal = await news.get()
            self._in_flight[ordinal].task.result()  # raises a failure at once
            finished.add(ordinal)
            due.discard(ordinal)
        others = [ordinal for ordinal in choice.pool if ordinal in finished and ordinal not in choice.due]
        return [*choice.due, *others[: choice.count - len(choice.due)]]

    def _restored(self, ordinal: int, prompt: Prompt) -> asyncio.Future[RolloutGroup] | None:
        """Return the group of a prompt from the checkpoint. None if it has none, or one that must be sampled again."""
        stored = self._stored.pop(ordinal, None)
        if stored is None:
            return None
        if not self._sampler.yields(prompt, stored.episodes, stored.baseline):
            LOG.warning(
                "prompt %d is sampled again: its group in the checkpoint was sampled with other settings, or shows "
                "pictures of its environment, which a checkpoint does not keep",
                prompt.prompt_id,
            )
            return None
        self._window.set_age(ordinal, stored.age)
        finished = asyncio.get_running_loop().create_future()
        finished.set_result(stored.of(prompt))
        return finished

    def _announce_finished(self, done: asyncio.Future[RolloutGroup]) -> None:
        if self._finished_one and not done.cancelled() and not done.exception() and failure(done.result()) is None:
            self._finished_one(done.result())

    def state_dict(self) -> dict[str, Any]:
        """Return the position to resume from: the oldest prompt not handed over, and which later ones were."""
        head = self._window.head
        source = self._source.state_dict() if head is None else self._in_flight[head].position
        window = {"window": self._window.state_dict()} if self._window.slack else {}
        return {**source, **window, **({"observer": self._observer.state_dict()} if self._observer else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position. No group may be in flight."""
        assert not self._in_flight, "the scheduler is already running"
        self._source.load_state_dict({key: value for key, value in state.items() if key not in ("window", "observer")})
        if "window" in state:
            self._window.load_state_dict(state["window"])
        if self._observer:
            self._observer.load_state_dict(state["observer"])

    async def save(self, folder: Path) -> None:
        """Write the groups that are finished but not handed over yet. If there are none, write no file."""
        head = self._window.head or 0
        tasks = {ordinal: flight.task for ordinal, flight in self._in_flight.items() if flight.task.done()}
        finished = {
            ordinal: task.result() for ordinal, task in tasks.items() if not task.cancelled() and not task.exception()
        }
        groups = {
            ordinal - head: StoredGroup(
                group.prompt.prompt_id, self._window.age(ordinal), group.episodes, group.baseline
            )
            for ordinal, group in finished.items()
        }
        if groups:
            await asyncio.to_thread(write_groups, folder / FILE, groups)

    async def load(self, folder: Path) -> None:
        """Read the groups that `save` wrote, if any; none may be in flight. Raises CheckpointError if unreadable."""
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
