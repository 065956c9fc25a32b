"""Prompts for RL. All rows are checked, assigned to a reward domain, rendered and tokenised before training starts;
during training they are read from disk. Rows that are left out, or that name no domain, are warned about.

Environments may generate their own tasks from seeds instead. Several sets can be joined.

Prompts are drawn deterministically: a draw depends only on the seed, the domain and the position. The state, from which
a sampler can be restored exactly, is therefore just the position of each stream.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from roll.config.schema.environments import EnvironmentConfig
from roll.config.schema.model import DataConfig
from roll.config.schema.roles import RewardConfig
from roll.data.chat import ChatTemplate, checked_renderer
from roll.data.picture_parts import pictures_of
from roll.data.pictures import Sight
from roll.data.routes import DEFAULT_DOMAIN, DOMAIN, DomainRoutes, tag_routes
from roll.data.rows import RowFault, only_given, prompt_conversation, read_row, remarks_of, template_arguments
from roll.data.sources import Source, find_sources, folder_of
from roll.data.tables import (
    BATCH_ROWS,
    Preparation,
    Texts,
    check_ids,
    check_rows,
    column,
    count_by_file,
    count_remarks,
    cut_of,
    identity,
    place_of,
    prepared_table,
    row_faults,
)
from roll.data.unwritten import UNWRITTEN, Unwritten
from roll.errors import DataError, Fault
from roll.registry import nearest
from roll.types import Prompt

LOG = logging.getLogger(__name__)
SEED = "seed"
"""Column with the seed from which the environment generates the task."""
FIRST_HELD_OUT = 1 << 30
"""First seed of held-out tasks, above all training seeds."""
MOST_NAMED = 20
"""Largest number of tags in a warning. Those with the most rows come first."""


@dataclass(frozen=True)
class PromptSet:
    """The usable prompts of a data set. Rows stay memory-mapped; a `Prompt` is built on demand."""

    names: tuple[str, ...]
    """Names of the sources of the rows."""
    domains: tuple[str, ...]
    """All domains: those in `rewards`, then those only in `environments`."""
    positions: NDArray[np.int64]
    """[prompts], position of each prompt's row in the table."""
    domain_index: NDArray[np.int16]
    """[prompts], index into `domains`."""
    too_long: Mapping[str, int]
    """Number of rows of each file that were dropped because their prompt exceeds `prompt_length`."""
    unknown_tags: Mapping[str, int]
    """Number of prompts by tag, for tags that no reward domain includes. `DEFAULT_DOMAIN` scores these prompts.
    """
    unknown_domains: Mapping[str, int]
    """Number of prompts by `domain`, for values that name no reward domain. The prompts' tag decides instead."""
    _data_args: DataConfig = field(repr=False)
    _table: datasets.Dataset = field(repr=False)
    remarks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Number of rows of each file by remark; see `Texts.remarks`. The rows stay in the set."""
    _sight: Sight | None = None

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def identity(self) -> str:
        """See `tables.identity`. It also depends on the domain of each prompt."""
        return identity(self._table, self.positions, np.array(self.domains)[self.domain_index])

    def prompt(self, index: int, prompt_id: int) -> Prompt:
        """Return the prompt at `index`, 0 <= index < len(self), with the given `prompt_id`."""
        entry = self._table[int(self.positions[index])]
        token_ids, place = np.asarray(entry["token_ids"], dtype=np.int32), place_of(entry, self.names)
        return Prompt(
            prompt_id=prompt_id,
            token_ids=token_ids,
            text=entry["text"],
            domain=self.domains[self.domain_index[index]],
            row=self._row(entry["row"]),
            place=place,
            shown=self._sight and self._sight.prompt_pictures(entry, token_ids, place),
        )

    def _row(self, text: str) -> dict[str, Any]:
        return read_row(json.loads(text), self._data_args, self._sight is not None)

    def rows(self, domain: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the index and the row of each prompt of a domain, in order."""
        indices = np.flatnonzero(self.domain_index == self.domains.index(domain))
        texts = self._table.data.column("row")
        for begin in range(0, len(indices), BATCH_ROWS):
            some = indices[begin : begin + BATCH_ROWS]
            for index, text in zip(some.tolist(), texts.take(self.positions[some]).to_pylist(), strict=True):
                yield index, self._row(text)

    def faults(self, found: Sequence[tuple[int, RowFault]]) -> list[Fault]:
        """Return the faults of prompts, given by their indices, as an error should report them (see `check_rows`)."""
        return row_faults(self._table, self.names, [(int(self.positions[index]), fault) for index, fault in found])


def prepare_prompts(
    data_args: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompt_length: int,
    sections: Mapping[str, RewardConfig | EnvironmentConfig],
    cache_folder: Path | None = None,
    embedded: int | None = None,
    sight: Sight | None = None,
) -> PromptSet:
    """Read, check, render and tokenise all rows once. Later calls with the same files and tokenizer read the cache.

    Prompts longer than `prompt_length` tokens, placeholders of pictures included, are dropped and counted. A row
    belongs to the reward domain in its column `domain`, or else to the domain whose `tag_included` lists its tag, or
    else to `DEFAULT_DOMAIN` if it exists.
    If there is only one domain, rows without a tag belong to it.

    Args:
        sections: the configuration of each domain's reward or environment.
        cache_folder: folder of the prepared tables; by default the folder `roll` in the cache of `datasets`.
        embedded: see `check_ids`.
        sight: how the model sees pictures. None: it sees none.

    Raises:
        DataError: some rows cannot be used (each fault names `file:row`), or no prompt is left.
        ConfigError: two domains claim the same tag.
    """
    routes = DomainRoutes(tuple(sections), tag_routes(sections))
    sources = [replace(one, encodes_bytes=bool(sight)) for one in find_sources(data_args.file_name, data_args.split)]
    table = prepared_table(
        sources, _preparation(data_args, tokenizer, prompt_length, sight, sources), "prompts", cache_folder
    )
    labels = routes.labels(column(table, DOMAIN), column(table, "tag"))
    is_usable = column(table, "reason") == ""
    found = routes.faults(labels, is_usable, data_args.tag, lambda place: json.loads(table[place]["row"]))
    check_rows(table, sources, found)
    check_ids(table, sources, embedded)
    tokens = column(table, "prompt_tokens")
    fits = tokens <= prompt_length
    too_long = count_by_file(table, np.flatnonzero(~fits), sources)
    if not fits.any():
        raise DataError(
            *[_all_too_long(name, count, prompt_length, int(tokens.min())) for name, count in too_long.items()]
        )
    positions = np.flatnonzero(fits)
    used = [labels[position] for position in positions]
    unknown_tags = Counter(label.tag or "no tag" for label in used if routes.is_default(label))
    unknown_domains = Counter(label.domain for label in used if label.domain and label.domain not in sections)
    domain_index = np.fromiter(map(routes.domain_index, used), np.int16, count=len(used))
    names = tuple(source.name for source in sources)
    counts, remarks = (too_long, unknown_tags, unknown_domains), count_remarks(table, positions, sources)
    return PromptSet(names, routes.domains, positions, domain_index, *counts, data_args, table, remarks, sight)


def _preparation(
    data_args: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompt_length: int,
    sight: Sight | None,
    sources: Sequence[Source],
) -> Preparation:
    texts = partial(
        _prompt_text,
        data_args=data_args,
        render=checked_renderer(data_args, tokenizer),
        unwritten=Unwritten(),
        sees=sight is not None,
    )
    cut, folders = cut_of(prompt_length), tuple(folder_of(source) for source in sources)
    return Preparation(texts, tokenizer, data_args.template == "raw", data_args, cut, sight, folders, asks=True)


def _prompt_text(
    row: Mapping[str, Any], data_args: DataConfig, render: ChatTemplate, unwritten: Unwritten, sees: bool
) -> Texts:
    render_row = partial(
        render, generate=True, further={**(data_args.chat_template_kwargs or {}), **template_arguments(row)}
    )
    conversation = prompt_conversation(only_given(read_row(row, data_args, sees), row), data_args, sees)
    text = render_row(conversation)
    remarks = remarks_of(row, data_args)
    return Texts(
        text,
        remarks=remarks
        + tuple(UNWRITTEN.format(place) for place in unwritten.in_context(conversation, text, render_row)),
        pictures=pictures_of(conversation),
    )


def _all_too_long(name: str, count: int, prompt_length: int, shortest: int) -> Fault:
    problem = f"all of its {count} prompts are longer than prompt_length, {prompt_length} tokens"
    return Fault(
        name,
        problem,
        f"raise prompt_length: the shortest prompt needs at least {shortest}, template included",
        "too_large",
    )


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
        return np.repeat(
            np.array([self.domains.index(name) for name in self.counts], np.int16), list(self.counts.values())
        )

    @property
    def identity(self) -> str:
        counted = ", ".join(f"{count} of {domain}" for domain, count in self.counts.items())
        return f"tasks from seed {self.first}: {counted}"

    def __len__(self) -> int:
        return sum(self.counts.values())

    def prompt(self, index: int, prompt_id: int) -> Prompt:
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
        return self.sets[0].domains

    @property
    def domain_index(self) -> NDArray[np.int16]:
        return np.concatenate([one.domain_index for one in self.sets])

    @property
    def identity(self) -> str:
        return "; ".join(one.identity for one in self.sets)

    def __len__(self) -> int:
        return sum(map(len, self.sets))

    def prompt(self, index: int, prompt_id: int) -> Prompt:
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
        self._shares = None if domain_interleave_probs is None else domain_shares(prompts, domain_interleave_probs)
        self._members = members_of(prompts, self._shares)
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
        name = ""
        if self._shares is not None:
            positions = {domain: stream.position for domain, stream in self._streams.items()}
            name = most_behind(self._shares, positions)
        return self._prompts.prompt(int(self._members[name][self._streams[name].draw()]), prompt_id)


def members_of(prompts: Prompts, shares: Mapping[str, float] | None) -> dict[str, NDArray[np.int64]]:
    """Return the indices of the prompts of each domain with a share; without shares, those of all as domain ``."""
    if shares is None:
        return {"": np.arange(len(prompts))}
    return {name: np.flatnonzero(prompts.domain_index == prompts.domains.index(name)) for name in shares}


def most_behind(shares: Mapping[str, float], draws: Mapping[str, int]) -> str:
    """Return the domain whose number of draws is furthest behind its share."""
    total = sum(draws.values())
    return max(shares, key=lambda name: shares[name] * (total + 1) - draws[name])


def domain_shares(prompts: Prompts, probabilities: Mapping[str, float]) -> dict[str, float]:
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
        raise DataError(*faults)
    return {name: share / total for name, share in probabilities.items() if share > 0}


def warn_of_rows(counts: Mapping[str, int], what: str) -> None:
    """Log a warning for each file. `counts` is the number of rows by file; `what` continues "3 of its rows"."""
    for file, count in counts.items():
        LOG.warning("%s: %d of its rows %s", file, count, what)


def warn_of_routes(prompts: PromptSet) -> None:
    """Log warnings about prompts whose tag or domain names no reward domain of this run."""
    names = ", ".join(prompts.names)
    if prompts.unknown_tags:
        text = "%s: no reward domain includes the tag of %d rows (%s); they are scored by %s"
        LOG.warning(text, names, sum(prompts.unknown_tags.values()), _counted(prompts.unknown_tags), DEFAULT_DOMAIN)
    if prompts.unknown_domains:
        text = "%s: the column 'domain' of %d rows names no reward domain (%s); their tags decide which one scores them"
        LOG.warning(text, names, sum(prompts.unknown_domains.values()), _counted(prompts.unknown_domains))


def _counted(counts: Mapping[str, int]) -> str:
    most = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    listed = ", ".join(f"{name}: {count}" for name, count in most[:MOST_NAMED])
    return f"{listed}, and {len(most) - MOST_NAMED} others" if len(most) > MOST_NAMED else listed
