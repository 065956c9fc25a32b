"""Prompts for environments that generate their own tasks from seeds, and the concatenation of several sets of
prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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
    """Implements `Prompts`: tasks that environments generate from seeds. Prompts are empty: the environment's reset
    returns the text.
    """

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
