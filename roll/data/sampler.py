"""Draws rows deterministically from a seed.

A draw depends only on the seed, the domain and the position. The state, from which a sampler can be restored exactly,
is therefore just the position of each stream.

Prompts for environments that generate their own tasks from seeds, and the concatenation of several sets of
prompts.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from roll.errors import DataError, Fault
from roll.registry import nearest
from roll.types import Prompt

SEED = "seed"
"""Column with the seed from which the environment generates the task."""
FIRST_HELD_OUT = 1 << 30
"""First seed of held-out tasks, above all training seeds."""


class Prompts(Protocol):
    """A sequence of prompts."""

    @property
    def domains(self) -> tuple[str, ...]:
        """Return all domains of the run."""
        ...

    @property
    def domain_index(self) -> NDArray[np.int16]:
        """Return the domain of each prompt, [prompts], as an index into `domains`."""
        ...

    @property
    def identity(self) -> str:
        """Return a text that identifies the prompts and their order. A resumed run must have the same."""
        ...

    def __len__(self) -> int: ...

    def prompt(self, index: int, prompt_id: int) -> Prompt:
        """Return the prompt at `index`, 0 <= index < len(self), with the given `prompt_id`."""
        ...


@dataclass(frozen=True)
class Tasks:
    """Implements `Prompts`: tasks that environments generate from seeds. The environment's reset returns the text."""

    domains: tuple[str, ...]
    counts: Mapping[str, int]
    """Number of tasks by domain."""
    first: int = 0
    """Seed of the first task of each domain."""

    @property
    def domain_index(self) -> NDArray[np.int16]:
        """See `Prompts`."""
        return np.repeat(
            np.array([self.domains.index(name) for name in self.counts], np.int16), list(self.counts.values())
        )

    @property
    def identity(self) -> str:
        """See `Prompts`."""
        counted = ", ".join(f"{count} of {domain}" for domain, count in self.counts.items())
        return f"tasks from seed {self.first}: {counted}"

    def __len__(self) -> int:
        return sum(self.counts.values())

    def prompt(self, index: int, prompt_id: int) -> Prompt:
        """See `Prompts`."""
        number = index
        for domain, count in self.counts.items():
            if number < count:
                return Prompt(prompt_id, np.zeros(0, np.int32), "", domain, {SEED: self.first + number})
            number -= count
        raise IndexError(index)


@dataclass(frozen=True)
class Joined:
    """Implements `Prompts`: concatenates several sets."""

    sets: Sequence[Prompts]
    """One or more sets with the same domains."""

    @property
    def domains(self) -> tuple[str, ...]:
        """See `Prompts`."""
        return self.sets[0].domains

    @property
    def domain_index(self) -> NDArray[np.int16]:
        """See `Prompts`."""
        return np.concatenate([one.domain_index for one in self.sets])

    @property
    def identity(self) -> str:
        """See `Prompts`."""
        return "; ".join(one.identity for one in self.sets)

    def __len__(self) -> int:
        return sum(map(len, self.sets))

    def prompt(self, index: int, prompt_id: int) -> Prompt:
        """See `Prompts`."""
        number = index
        for one in self.sets:
            if number < len(one):
                return one.prompt(number, prompt_id)
            number -= len(one)
        raise IndexError(index)


class Shuffle:
    """An endless stream of indices in [0, size): a new permutation in each epoch."""

    def __init__(self, size: int, seed: int, name: str = "") -> None:
        assert size > 0, "a stream needs at least one index"
        self.size = size
        self.position = 0
        """Number of draws so far, over all epochs."""
        self._key = (seed, zlib.crc32(name.encode()))
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    @property
    def epoch(self) -> int:
        """Return the number of completed epochs."""
        return self.position // self.size

    def draw(self) -> int:
        """Return the next index."""
        if self._epoch != self.epoch:
            self._epoch = self.epoch
            self._order = np.random.default_rng([*self._key, self._epoch]).permutation(self.size)
        index = int(self._order[self.position % self.size])
        self.position += 1
        return index

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.position = state["position"]


class PromptSampler:
    """Draws prompts over epochs.

    Without shares, each epoch is one shuffle of all prompts. With shares, every draw goes to the domain that is
    furthest behind its share, so that after any number of draws each domain is within about one prompt of its share.
    """

    def __init__(self, prompts: Prompts, seed: int, domain_interleave_probs: Mapping[str, float] | None = None) -> None:
        """
        Args:
            domain_interleave_probs: share of each domain among the draws; None draws all prompts equally often.

        Raises:
            DataError: the shares name an unknown or empty domain, leave out a domain, or are all 0.
        """
        self._prompts = prompts
        self._shares = None if domain_interleave_probs is None else _shares(prompts, domain_interleave_probs)
        if self._shares is None:
            self._members = {"": np.arange(len(prompts))}
        else:
            self._members = {
                name: np.flatnonzero(prompts.domain_index == prompts.domains.index(name)) for name in self._shares
            }
        self._streams = {name: Shuffle(len(members), seed, name) for name, members in self._members.items()}

    @property
    def drawn(self) -> int:
        """Return the number of prompts drawn so far. It is the `prompt_id` of the next prompt."""
        return sum(stream.position for stream in self._streams.values())

    def draw(self, count: int) -> list[Prompt]:
        """Draw the next `count` prompts. Their `prompt_id` counts from 0 over the whole run."""
        return [self._next() for _ in range(count)]

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON-serialisable values."""
        return {"streams": {name: stream.state_dict() for name, stream in self._streams.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position that `state_dict` returned. Rows, seed and shares must be the same."""
        for name, stream in self._streams.items():
            stream.load_state_dict(state["streams"][name])

    def _next(self) -> Prompt:
        prompt_id = self.drawn
        name = "" if self._shares is None else self._most_behind(self._shares, prompt_id)
        return self._prompts.prompt(int(self._members[name][self._streams[name].draw()]), prompt_id)

    def _most_behind(self, shares: Mapping[str, float], drawn: int) -> str:
        return max(shares, key=lambda name: shares[name] * (drawn + 1) - self._streams[name].position)


class ExampleSampler:
    """Draws rows that contain their responses (examples). Each epoch is one shuffle of the set."""

    def __init__(self, size: int, seed: int) -> None:
        self._seed = seed
        self._stream = Shuffle(size, seed)

    def draw(self, count: int) -> list[int]:
        """Return the indices of the next `count` examples. A batch may span two epochs."""
        return [self._stream.draw() for _ in range(count)]

    def ahead(self, count: int) -> list[int]:
        """Return the indices of the next `count` draws without drawing them."""
        copy = ExampleSampler(self._stream.size, self._seed)
        copy.load_state_dict(self.state_dict())
        return copy.draw(count)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON-serialisable values."""
        return {"stream": self._stream.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position that `state_dict` returned. Rows and seed must be the same."""
        self._stream.load_state_dict(state["stream"])


def _shares(prompts: Prompts, probabilities: Mapping[str, float]) -> dict[str, float]:
    """Return the positive shares, scaled so that they sum to 1. Raises DataError as `PromptSampler` does."""
    place = "data_args.domain_interleave_probs"
    rows = {name: int(np.count_nonzero(prompts.domain_index == index)) for index, name in enumerate(prompts.domains)}
    faults = [
        Fault(
            f"{place}.{name}",
            f"names no reward domain{nearest(name, rows)}",
            f"use only: {', '.join(rows)}",
            "unknown_name",
        )
        for name in probabilities
        if name not in rows
    ]
    faults += [
        Fault(
            f"{place}.{name}",
            f"is {share}, but no prompt belongs to that domain",
            "set it to 0, or add rows with one of its tags",
            "empty",
        )
        for name, share in probabilities.items()
        if share > 0 and rows.get(name) == 0
    ]
    faults += [
        Fault(
            place,
            f"leaves out the domain '{name}', which has {count} prompts",
            "give it a share; 0 leaves its prompts out",
            "missing",
        )
        for name, count in rows.items()
        if count and name not in probabilities
    ]
    total = sum(probabilities.values())
    if total <= 0:
        faults.append(Fault(place, "sums to 0", "give at least one domain a share above 0", "out_of_range"))
    if faults:
        raise DataError(faults)
    return {name: share / total for name, share in probabilities.items() if share > 0}
