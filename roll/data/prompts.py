"""Prompts for RL: every row checked, rendered and tokenised before training starts, and drawn from disk afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from roll.config.schema.model import DataConfig
from roll.config.schema.roles import RewardConfig
from roll.data.chat import Render, renderer
from roll.data.rows import RowFault, prompt_conversation
from roll.data.sources import find_sources
from roll.data.tables import Preparation, Texts, check_rows, column, count_by_file, identity, prepared_table
from roll.errors import ConfigError, DataError, Fault
from roll.registry import nearest
from roll.types import Bools, Prompt


@dataclass(frozen=True)
class PromptSet:
    """The usable prompts of a data set. Rows stay memory-mapped; a `Prompt` is built when it is asked for."""

    domains: tuple[str, ...]
    """All domains, in the order of `rewards`."""
    positions: NDArray[np.int64]
    """[prompts], where in the table each prompt stands."""
    domain_index: NDArray[np.int16]
    """[prompts], into `domains`."""
    too_long: Mapping[str, int]
    """By file, how many rows were dropped because their prompt is longer than `prompt_length`."""
    _table: datasets.Dataset = field(repr=False)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def identity(self) -> str:
        """See `tables.identity`; the domains tell prompts apart, too."""
        return identity(self._table, self.positions, np.array(self.domains)[self.domain_index])

    def prompt(self, index: int, prompt_id: int) -> Prompt:
        """Prompt `index` of the set, 0 <= index < len(self), as draw number `prompt_id` of the run."""
        entry = self._table[int(self.positions[index])]
        return Prompt(
            prompt_id=prompt_id,
            token_ids=np.asarray(entry["token_ids"], dtype=np.int32),
            text=entry["text"],
            domain=self.domains[self.domain_index[index]],
            row=json.loads(entry["row"]),
        )


def prepare_prompts(
    data_args: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompt_length: int,
    rewards: Mapping[str, RewardConfig],
    cache_folder: Path | None = None,
) -> PromptSet:
    """Reads, checks, renders and tokenises all rows once; later calls with the same files and tokenizer read the cache.

    Prompts longer than `prompt_length` tokens are dropped and counted. A row's tag routes it to the domain whose
    `tag_included` names it; in a data set without tags all rows belong to the only domain.

    Args:
        cache_folder: where prepared tables are kept; a folder `roll` in the cache of `datasets` if not given.

    Raises:
        DataError: rows that cannot be used (each fault names `file:row`), or no prompt is left.
        ConfigError: two domains claim the same tag.
    """
    domain_of_tag = tag_routes(rewards)
    sources = find_sources(data_args.file_name, data_args.split)
    texts = partial(_prompt_text, data_args=data_args, render=checked_renderer(data_args, tokenizer))
    preparation = Preparation(texts, tokenizer, data_args.template == "raw", data_args)
    table = prepared_table(sources, preparation, "prompts", cache_folder)
    domains = tuple(rewards)
    domain_index, faults = _route(column(table, "tag"), column(table, "reason") == "", domain_of_tag, domains, data_args.tag)
    check_rows(table, sources, faults)
    fits = column(table, "prompt_tokens") <= prompt_length
    too_long = count_by_file(table, np.flatnonzero(~fits), sources)
    if not fits.any():
        raise DataError([_all_too_long(name, count, prompt_length) for name, count in too_long.items()])
    positions = np.flatnonzero(fits)
    return PromptSet(domains, positions, domain_index[positions], too_long, table)


def tag_routes(rewards: Mapping[str, RewardConfig]) -> dict[str, str]:
    """The domain of each tag.

    Raises:
        ConfigError: two domains claim the same tag.
    """
    routes: dict[str, str] = {}
    faults: list[Fault] = []
    for domain, reward in rewards.items():
        for tag in reward.tag_included or (domain,):
            if routes.setdefault(tag, domain) != domain:
                remedy = "a tag belongs to one domain; name it in one `tag_included` only"
                problem = f"claims the tag '{tag}', as does the domain '{routes[tag]}'"
                faults.append(Fault(f"rewards.{domain}.tag_included", problem, remedy))
    if faults:
        raise ConfigError(faults)
    return routes


def checked_renderer(data_args: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Render:
    """`renderer` of `data_args.template`, its complaint as a DataError."""
    try:
        return renderer(data_args.template, tokenizer)
    except ValueError as error:
        remedy = "set it to `chatml`, `qwen2_5` or `raw`, or use a tokenizer that has one"
        raise DataError([Fault("data_args.template", f"is '{data_args.template}', but {error}", remedy)]) from error


def _prompt_text(row: Mapping[str, Any], data_args: DataConfig, render: Render) -> Texts:
    return Texts(render(prompt_conversation(row, data_args), True))


def _route(
    tags: NDArray[np.object_], usable: Bools, domain_of_tag: Mapping[str, str], domains: tuple[str, ...], tag_column: str
) -> tuple[NDArray[np.int16], list[tuple[int, RowFault]]]:
    """[rows] index of each row's domain, and a fault for each usable row that has none."""
    if len(domains) == 1 and all(tag is None for tag in tags):
        return np.zeros(len(tags), dtype=np.int16), []
    tag_index = {tag: domains.index(domain) for tag, domain in domain_of_tag.items()}
    domain_index = np.fromiter((tag_index.get(tag, -1) for tag in tags), dtype=np.int16, count=len(tags))
    known = ", ".join(sorted(domain_of_tag))
    faults: list[tuple[int, RowFault]] = []
    for position in np.flatnonzero((domain_index < 0) & usable):
        tag: str | None = tags.item(position)
        if tag is None:
            reason, problem = f"no '{tag_column}'", f"column '{tag_column}' is missing or null, so no reward domain scores the row"
        else:
            reason, problem = "tag without a domain", f"no reward domain includes the tag '{tag}'{nearest(tag, list(domain_of_tag))}"
        remedy = f"name it in the `tag_included` of a reward, or set the row's '{tag_column}' to one of: {known}"
        faults.append((int(position), RowFault(reason, problem, remedy)))
    return domain_index, faults


def _all_too_long(name: str, count: int, prompt_length: int) -> Fault:
    return Fault(name, f"all of its {count} prompts are longer than prompt_length, {prompt_length} tokens", "raise prompt_length")
