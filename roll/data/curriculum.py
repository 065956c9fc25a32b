"""Draws prompts by their measured solve rate, from pools with shares.

The solve rate of a prompt is an exponential moving average, over its groups, of the share of responses that passed. It
decides to which pool the prompt belongs: unseen (not measured yet), hard, learnable or solved. Responses to a prompt
that is never or always solved have equal rewards, from which a comparison within the group learns nothing; prompts in
between teach the most (Bae et al., 2025, arXiv 2504.03380). Kimi k1.5 (arXiv 2501.12599) also
samples by tracked success rates.

Draws are deterministic: they depend on the seed, and on which groups each earlier step handed over.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll.config.schema.curriculum import CurriculumConfig
from roll.data.prompts import Prompts, domain_shares, members_of, most_behind
from roll.errors import CheckpointError
from roll.types import Metrics, Prompt, RolloutGroup

SolveRate = Callable[[RolloutGroup], float | None]
"""Returns the share of a group's responses that passed, from 0 to 1; None if no response has a verdict."""
POOLS = ("unseen", "hard", "learnable", "solved")
"""The pools, from hard to solved in the order of promotion."""
UNSEEN, HARD, LEARNABLE, SOLVED = range(len(POOLS))


class Pools:
    """The prompts of one domain that are not in flight, by pool, as numbers: the smallest of a pool is drawn first.

    A pool is drawn from by smooth weighted round-robin: at each draw every pool that has prompts gains its share among
    those pools, and the pool with the most pays 1. While the same pools have prompts, the number of draws of each stays
    within about one of its share.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        """`shares` has a share for each of `POOLS`."""
        self._shares = shares
        self._heaps: list[list[int]] = [[] for _ in POOLS]
        self.credits = [0.0] * len(POOLS)

    def add(self, pool: int, number: int) -> None:
        """Add a prompt to a pool."""
        heapq.heappush(self._heaps[pool], number)

    def fill(self, pools: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """Replace all prompts. Both arrays are [prompts]: the pool and the number of each."""
        self._heaps = [sorted(numbers[pools == pool].tolist()) for pool in range(len(POOLS))]  # sorted, it is a heap

    def draw(self) -> tuple[int, int] | None:
        """Remove a prompt; return its pool and its number. None if there is none.

        Pools with a share of 0 are used only if all others are empty; then the smallest number of any is drawn.
        """
        filled = [pool for pool, heap in enumerate(self._heaps) if heap]
        weights = {pool: self._shares[pool] for pool in filled if self._shares[pool] > 0}
        if weights:
            total = sum(weights.values())
            for pool, weight in weights.items():
                self.credits[pool] += weight / total
            chosen = max(weights, key=lambda pool: self.credits[pool])
            self.credits[chosen] -= 1
        elif filled:
            chosen = min(filled, key=lambda pool: self._heaps[pool][0])
        else:
            return None
        return chosen, heapq.heappop(self._heaps[chosen])

    @property
    def missing_share(self) -> float:
        """Return the share of the pools without prompts, from 0 to 1."""
        return sum(share for share, heap in zip(self._shares, self._heaps, strict=True) if not heap) / sum(self._shares)


class Curriculum:
    """Measures the solve rates of prompts, and chooses the next prompt.

    With shares of domains, the domain of a draw is chosen first, as `PromptSampler` does, and each domain has its own
    pools. Within a pool, the prompt that was drawn longest ago comes first; prompts that were never drawn are in an
    order that depends on the seed. A prompt in flight, whose group no step has been handed yet, is in no pool. It is
    drawn again only if all prompts of the domain are in flight.
    """

    def __init__(
        self,
        prompts: Prompts,
        seed: int,
        settings: CurriculumConfig,
        solve_rate: SolveRate,
        domain_interleave_probs: Mapping[str, float] | None = None,
    ) -> None:
        """Raises DataError as `PromptSampler` does."""
        self._settings, self._solve_rate = settings, solve_rate
        self._shares = None if domain_interleave_probs is None else domain_shares(prompts, domain_interleave_probs)
        members = members_of(prompts, self._shares)
        shares = [getattr(settings.shares, pool) for pool in POOLS]
        self._members, self._names = members, list(members)
        self._pools = {name: Pools(shares) for name in members}
        self._draws = dict.fromkeys(members, 0)  # number by domain
        self._order = np.random.default_rng([seed, zlib.crc32(b"curriculum")]).permutation(len(prompts))
        self._place: NDArray[np.int64] = np.empty(len(prompts), np.int64)  # position of each prompt in the order
        self._place[self._order] = np.arange(len(prompts))
        self._domain = np.full(len(prompts), -1, np.int16)  # index into the names; -1 for prompts that are never drawn
        for number, own in enumerate(members.values()):
            self._domain[own] = number
        self._rates = np.full(len(prompts), np.nan)
        self._last = np.full(len(prompts), -1, np.int64)  # `prompt_id` of each prompt's latest draw
        self._drawn: dict[int, int] = {}  # index by `prompt_id`, from the oldest in flight on
        self._in_flight: dict[int, int] = {}  # the same of prompts in flight alone
        self._copies: dict[int, int] = {}  # by index: how often a prompt is in flight
        self._step = StepDraws()
        self._metrics: Metrics = {}
        self._fill()

    def draw(self, prompt_id: int) -> int:
        """Return the index of the prompt with this id. It is the recorded one if it was drawn before a resume."""
        if prompt_id in self._drawn:
            return self._drawn[prompt_id]
        name = "" if self._shares is None else most_behind(self._shares, self._draws)
        pools = self._pools[name]
        missing, found = pools.missing_share, pools.draw()
        if found is None:
            number = min(self._number(index) for index in self._copies if self._name(index) == name)
            index = self._index(number)
            self._step.count(self._pool(index), missing, is_repeated=True)
        else:
            index = self._index(found[1])
            self._step.count(found[0], missing, is_repeated=False)
        self._draws[name] += 1
        self._last[index] = prompt_id
        self._drawn[prompt_id] = self._in_flight[prompt_id] = index
        self._copies[index] = self._copies.get(index, 0) + 1
        return index

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Measure the groups that a step was handed, those that it discards included. They are no longer in flight.

        A group without any verdict changes no solve rate.
        """
        promoted = demoted = 0
        for group in groups:
            index = self._in_flight.pop(group.prompt.prompt_id)
            before, rate = self._pool(index), self._solve_rate(group)
            if rate is not None:
                known, weight = self._rates[index], self._settings.update_rate
                self._rates[index] = rate if np.isnan(known) else (1 - weight) * known + weight * rate
            after = self._pool(index)
            promoted += UNSEEN < before < after
            demoted += after < before
            self._copies[index] -= 1
            if not self._copies[index]:
                del self._copies[index]
                self._pools[self._name(index)].add(after, self._number(index))
        first = next(iter(self._in_flight), None)
        self._drawn = {key: index for key, index in self._drawn.items() if first is not None and key >= first}
        self._metrics = self._measured() | self._step.metrics()
        self._metrics |= {"curriculum/promoted": float(promoted), "curriculum/demoted": float(demoted)}
        self._step = StepDraws()

    def metrics(self) -> Metrics:
        """Return the metrics of the last step."""
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values. It holds for the end of a step, when all its groups were observed."""
        known = np.flatnonzero(self._last >= 0)
        return {
            "prompts": known.tolist(),
            "last": self._last[known].tolist(),
            "rates": [None if np.isnan(rate) else float(rate) for rate in self._rates[known]],
            "drawn": [[prompt_id, index] for prompt_id, index in self._drawn.items()],
            "in_flight": list(self._in_flight),
            "draws": dict(self._draws),
            "credits": {name: list(pools.credits) for name, pools in self._pools.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned. Rows, seed and shares of domains must be the same.

        The thresholds, the update rate and the shares of pools may differ.
        """
        self._last[:], self._rates[:] = -1, np.nan
        self._last[state["prompts"]] = state["last"]
        self._rates[state["prompts"]] = [np.nan if rate is None else rate for rate in state["rates"]]
        self._drawn = dict(state["drawn"])
        self._in_flight = {prompt_id: self._drawn[prompt_id] for prompt_id in state["in_flight"]}
        self._copies = {}
        for index in self._in_flight.values():
            self._copies[index] = self._copies.get(index, 0) + 1
        self._draws = dict(state["draws"])
        for name, pools in self._pools.items():
            pools.credits = list(state["credits"][name])
        self._fill()

    def _fill(self) -> None:
        """Fill the pools with all prompts that are not in flight."""
        for name, members in self._members.items():
            free = members[~np.isin(members, list(self._copies))]
            self._pools[name].fill(self._pools_of(free), self._numbers(free))

    def _name(self, index: int) -> str:
        return self._names[self._domain[index]]

    def _number(self, index: int) -> int:
        return int(self._numbers(np.array(index)))

    def _numbers(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers by which prompts are ordered in a pool: by their latest draw, then by the seed's order."""
        return (self._last[indices] + 1) * len(self._order) + self._place[indices]

    def _index(self, number: int) -> int:
        return int(self._order[number % len(self._order)])

    def _pool(self, index: int) -> int:
        return int(self._pools_of(np.array(index)))

    def _pools_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        rates = self._rates[indices]
        is_in = [np.isnan(rates), rates <= self._settings.hard_at_most, rates >= self._settings.solved_at_least]
        return np.select(is_in, [UNSEEN, HARD, SOLVED], LEARNABLE)

    def _measured(self) -> Metrics:
        """Return the metrics of all prompts: the fraction in each pool, and the mean solve rate of the measured."""
        members = np.flatnonzero(self._domain >= 0)
        rates, counts = self._rates[members], np.bincount(self._pools_of(members), minlength=len(POOLS))
        unseen, hard, learnable, solved = (counts / len(members)).tolist()
        shares = {
            "curriculum/unseen_fraction": unseen,
            "curriculum/hard_fraction": hard,
            "curriculum/learnable_fraction": learnable,
            "curriculum/solved_fraction": solved,
        }
        known = rates[~np.isnan(rates)]
        return shares | ({"curriculum/solve_rate": float(known.mean())} if len(known) else {})


class StepDraws:
    """Counts the draws of a step."""

    def __init__(self) -> None:
        self._by_pool, self._missing, self._repeated = [0] * len(POOLS), 0.0, 0

    def count(self, pool: int, missing: float, is_repeated: bool) -> None:
        """Count a draw from a pool. `missing` is the share of the pools that had no prompt to draw."""
        self._by_pool[pool] += 1
        self._missing += missing
        self._repeated += is_repeated

    def metrics(self) -> Metrics:
        """Return the metrics of the draws; no metrics without draws."""
        if not (total := sum(self._by_pool)):
            return {}
        unseen, hard, learnable, solved = (count / total for count in self._by_pool)
        return {
            "curriculum/drawn_unseen": unseen,
            "curriculum/drawn_hard": hard,
            "curriculum/drawn_learnable": learnable,
            "curriculum/drawn_solved": solved,
            "curriculum/missing_share": self._missing / total,
            "curriculum/repeated": float(self._repeated),
        }


class CurriculumSampler:
    """Draws prompts in the order of a curriculum. Their `prompt_id` counts from 0 over the whole run."""

    def __init__(self, prompts: Prompts, curriculum: Curriculum) -> None:
        self._prompts, self._curriculum, self._next = prompts, curriculum, 0

    def draw(self, count: int) -> list[Prompt]:
        """Draw the next `count` prompts."""
        return [self._next_prompt() for _ in range(count)]

    def _next_prompt(self) -> Prompt:
        prompt_id, self._next = self._next, self._next + 1
        return self._prompts.prompt(self._curriculum.draw(prompt_id), prompt_id)

    def state_dict(self) -> dict[str, Any]:
        """Return the position. The state of the curriculum is saved by itself."""
        return {"drawn": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a position that `state_dict` returned. Raises CheckpointError if there was no curriculum."""
        if "drawn" not in state:
            problem = "the checkpoint was written without a curriculum"
            raise CheckpointError(f"{problem}; remove curriculum, or start a new run: another output_dir")
        self._next = state["drawn"]
