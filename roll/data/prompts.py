"""Prompts for RL. All rows are checked, assigned to a reward domain, rendered and tokenised before training starts;
during training they are read from disk. Rows that are left out, or that name no domain, are warned about.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from roll.config.schema.environments import EnvironmentConfig
from roll.config.schema.model import DataConfig
from roll.config.schema.roles import RewardConfig
from roll.data.chat import ChatTemplate, Render, render_example, renderer, template_remedy
from roll.data.native import special_marks
from roll.data.rows import Conversation, RowFault, prompt_conversation, read_row, remarks_of, template_arguments
from roll.data.sources import find_sources
from roll.data.tables import (
    BATCH_ROWS,
    DOMAIN,
    Preparation,
    Texts,
    adds_space,
    check_ids,
    check_rows,
    column,
    continuation,
    count_by_file,
    count_remarks,
    cut_of,
    identity,
    left_open,
    place_of,
    prepared_table,
    row_faults,
)
from roll.data.unwritten import UNWRITTEN, Unwritten
from roll.errors import ConfigError, DataError, Fault
from roll.registry import nearest
from roll.types import Bools, Ints, Prompt

DEFAULT_DOMAIN = "math_rule"
"""Name of the reward domain of rows that name no domain, as in ROLL."""


class Label(NamedTuple):
    """The values of a row's two columns that decide its domain; None for an empty one."""

    domain: str | None
    tag: str | None


@dataclass(frozen=True)
class DomainRoutes:
    """Maps labels to reward domains."""

    domains: tuple[str, ...]
    """All domains: those in `rewards`, then those only in `environments`."""
    of_tag: Mapping[str, str]
    """Domain of each tag."""

    def labels(self, domains: NDArray, tags: NDArray) -> Sequence[Label]:
        """Return the labels [rows] of a table from its columns of domains and tags, with strings or None."""
        return [Label(*pair) for pair in zip(domains.tolist(), tags.tolist(), strict=True)]

    def domain_index(self, label: Label) -> int:
        """Return the index of a row's domain in `domains`, -1 if it has none."""
        found = self._named(label) or (DEFAULT_DOMAIN if DEFAULT_DOMAIN in self.domains else None)
        return self.domains.index(found) if found else -1

    def is_default(self, label: Label) -> bool:
        """Whether only `DEFAULT_DOMAIN` can take the row: neither its domain nor its tag leads to another."""
        return self._named(label) is None

    def _named(self, label: Label) -> str | None:
        if label.domain in self.domains:
            return label.domain
        if label.tag is not None:
            return self.of_tag.get(label.tag)
        return self.domains[0] if len(self.domains) == 1 else None

    def faults(self, labels: Sequence[Label], usable: Bools, tag_column: str) -> list[tuple[int, RowFault]]:
        """Return the position and the fault of each usable row that belongs to no domain."""
        if DEFAULT_DOMAIN in self.domains:
            return []
        wrong = [place for place, label in enumerate(labels) if usable[place] and self.domain_index(label) < 0]
        return [(place, self._fault(labels[place], tag_column)) for place in wrong]

    def _fault(self, label: Label, tag_column: str) -> RowFault:
        if label.tag is None:
            code, reason = "missing", f"no '{tag_column}'"
            problem = f"column '{tag_column}' is missing or empty, so no reward domain scores the row"
        else:
            hint = nearest(label.tag, list(self.of_tag))
            code, reason = "unknown_name", "tag without a domain"
            problem = f"no reward domain includes the tag '{label.tag}'{hint}"
        known = ", ".join(sorted(self.of_tag))
        remedy = f"list its tag in the `tag_included` of a reward, or set the row's '{tag_column}' to one of: {known}"
        return RowFault(
            reason, problem, f"{remedy}; or add a domain `{DEFAULT_DOMAIN}`, which takes all other rows", code
        )


def tag_routes(sections: Mapping[str, RewardConfig | EnvironmentConfig]) -> dict[str, str]:
    """Return the domain of each tag.

    Raises:
        ConfigError: two domains claim the same tag.
    """
    routes: dict[str, str] = {}
    faults: list[Fault] = []
    for domain, section in sections.items():
        for tag in section.tag_included or (domain,):
            if routes.setdefault(tag, domain) != domain:
                remedy = "a tag can belong to one domain only; remove it from one of the two `tag_included`"
                problem = f"claims the tag '{tag}', as does the domain '{routes[tag]}'"
                place = "environments" if isinstance(section, EnvironmentConfig) else "rewards"
                faults.append(Fault(f"{place}.{domain}.tag_included", problem, remedy, "duplicate"))
    if faults:
        raise ConfigError(faults)
    return routes


def requested_conversation(row: Mapping[str, Any], sources: Sequence[DataConfig]) -> Conversation:
    """Return the messages that the policy was asked to answer.

    Args:
        sources: settings of the data sets that the row may come from. The first one whose prompt column the row has is
            used.

    Raises:
        RowFault: the row fits none of the data sets. This cannot happen for a row that was checked when it was
            prepared.
    """
    of_row = [columns for columns in sources if row.get(columns.messages or columns.prompt or "") is not None]
    return prompt_conversation(row, (of_row or sources)[0])


def question_text(conversation: Conversation) -> str:
    """Return the conversation as text: the message alone if there is one, or else every message with its role.

    System messages are left out.
    """
    turns = [message for message in conversation if message["role"] != "system"]
    if len(turns) == 1:
        return turns[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in turns)


def message_encoder(render: Render, tokenizer: PreTrainedTokenizerBase, special_tokens: bool) -> Callable[[str], Ints]:
    """Return the function that converts a user's message to the tokens of a prompt. It raises TemplateFault if the
    template rejects one.

    Args:
        special_tokens: whether the tokenizer adds the special tokens that begin a text. False if the template writes
            them.
    """
    return lambda message: open_tokens(render([{"role": "user", "content": message}], True), tokenizer, special_tokens)


def answered_encoder(
    render: Render, tokenizer: PreTrainedTokenizerBase, special_tokens: bool
) -> Callable[[Conversation, str], Ints]:
    """Return the function that converts a conversation and its response to tokens, as for training a reward model
    (`prepare_examples`).

    It raises TemplateFault if the template rejects the conversation.
    """
    end = tokenizer.eos_token if isinstance(tokenizer.eos_token, str) else ""
    marks = special_marks(tokenizer, str(tokenizer.chat_template or ""))

    def encode(conversation: Conversation, response: str) -> Ints:
        prompt, answer = render_example([*conversation, {"role": "assistant", "content": response}], render, end, marks)
        given = open_tokens(prompt, tokenizer, special_tokens)
        plain: Any = tokenizer.encode(answer, add_special_tokens=False)
        continued = continuation(tokenizer, prompt, answer) if adds_space(tokenizer) else plain
        return np.concatenate([given, np.asarray(continued, np.int32)])

    return encode


def open_tokens(text: str, tokenizer: PreTrainedTokenizerBase, special_tokens: bool) -> Ints:
    """Return the tokens of a text that another one continues, without the special tokens that the tokenizer appends."""
    found = tokenizer(text, add_special_tokens=special_tokens, return_special_tokens_mask=True, verbose=False)
    token_ids: Any = found["input_ids"]
    added: Any = found["special_tokens_mask"]
    return np.asarray(left_open(token_ids, added) if special_tokens else token_ids, np.int32)


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
    """Number of prompts by tag, for tags that no reward domain includes. `routes.DEFAULT_DOMAIN` scores these prompts.
    """
    unknown_domains: Mapping[str, int]
    """Number of prompts by `domain`, for values that name no reward domain. The prompts' tag decides instead."""
    _data_args: DataConfig = field(repr=False)
    _table: datasets.Dataset = field(repr=False)
    remarks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Number of rows of each file by remark; see `Texts.remarks`. The rows stay in the set."""

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def identity(self) -> str:
        """See `tables.identity`. It also depends on the domain of each prompt."""
        return identity(self._table, self.positions, np.array(self.domains)[self.domain_index])

    def prompt(self, index: int, prompt_id: int) -> Prompt:
        """Return the prompt at `index`, 0 <= index < len(self), with the given `prompt_id`."""
        entry = self._table[int(self.positions[index])]
        return Prompt(
            prompt_id=prompt_id,
            token_ids=np.asarray(entry["token_ids"], dtype=np.int32),
            text=entry["text"],
            domain=self.domains[self.domain_index[index]],
            row=read_row(json.loads(entry["row"]), self._data_args),
            place=place_of(entry, self.names),
        )

    def rows(self, domain: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the index and the row of each prompt of a domain, in order."""
        indices = np.flatnonzero(self.domain_index == self.domains.index(domain))
        texts = self._table.data.column("row")
        for begin in range(0, len(indices), BATCH_ROWS):
            some = indices[begin : begin + BATCH_ROWS]
            for index, text in zip(some.tolist(), texts.take(self.positions[some]).to_pylist(), strict=True):
                yield index, read_row(json.loads(text), self._data_args)

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
) -> PromptSet:
    """Read, check, render and tokenise all rows once. Later calls with the same files and tokenizer read the cache.

    Prompts longer than `prompt_length` tokens are dropped and counted. A row belongs to the reward domain in its column
    `domain`, or else to the domain whose `tag_included` lists its tag, or else to `routes.DEFAULT_DOMAIN` if it exists.
    If there is only one domain, rows without a tag belong to it.

    Args:
        sections: the configuration of each domain's reward or environment.
        cache_folder: folder of the prepared tables; by default the folder `roll` in the cache of `datasets`.
        embedded: see `check_ids`.

    Raises:
        DataError: some rows cannot be used (each fault names `file:row`), or no prompt is left.
        ConfigError: two domains claim the same tag.
    """
    routes = DomainRoutes(tuple(sections), tag_routes(sections))
    sources = find_sources(data_args.file_name, data_args.split)
    texts = partial(
        _prompt_text, data_args=data_args, render=checked_renderer(data_args, tokenizer), unwritten=Unwritten()
    )
    preparation = Preparation(texts, tokenizer, data_args.template == "raw", data_args, cut_of(prompt_length))
    table = prepared_table(sources, preparation, "prompts", cache_folder)
    labels = routes.labels(column(table, DOMAIN), column(table, "tag"))
    check_rows(table, sources, routes.faults(labels, column(table, "reason") == "", data_args.tag))
    check_ids(table, sources, embedded)
    tokens = column(table, "prompt_tokens")
    fits = tokens <= prompt_length
    too_long = count_by_file(table, np.flatnonzero(~fits), sources)
    if not fits.any():
        raise DataError(
            [_all_too_long(name, count, prompt_length, int(tokens.min())) for name, count in too_long.items()]
        )
    positions = np.flatnonzero(fits)
    used = [labels[position] for position in positions]
    unknown_tags = Counter(label.tag or "no tag" for label in used if routes.is_default(label))
    unknown_domains = Counter(label.domain for label in used if label.domain and label.domain not in sections)
    domain_index = np.fromiter(map(routes.domain_index, used), np.int16, count=len(used))
    names = tuple(source.name for source in sources)
    remarks = count_remarks(table, positions, sources)
    return PromptSet(
        names,
        routes.domains,
        positions,
        domain_index,
        too_long,
        unknown_tags,
        unknown_domains,
        data_args,
        table,
        remarks,
    )


def checked_renderer(data_args: DataConfig, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """Return the renderer of `data_args.template`.

    Raises:
        DataError: the template does not fit the tokenizer, or does not read a key of `chat_template_kwargs`.
    """
    try:
        found = renderer(data_args.template, tokenizer)
    except ValueError as error:
        problem = f"is '{data_args.template}', but {error}"
        raise DataError([Fault("data_args.template", problem, template_remedy(data_args.template), "unfit")]) from error
    if unread := found.unread(data_args.chat_template_kwargs or {}):
        problem = f"has '{unread[0]}', which the template '{data_args.template}' does not read"
        raise DataError(
            [
                Fault(
                    "data_args.chat_template_kwargs",
                    problem,
                    "remove it, or use a tokenizer whose template reads it",
                    "unread",
                )
            ]
        )
    return found


def _prompt_text(row: Mapping[str, Any], data_args: DataConfig, render: ChatTemplate, unwritten: Unwritten) -> Texts:
    render_row = partial(
        render, generate=True, further={**(data_args.chat_template_kwargs or {}), **template_arguments(row)}
    )
    conversation = prompt_conversation(read_row(row, data_args), data_args)
    text = render_row(conversation)
    remarks = remarks_of(row, data_args)
    return Texts(
        text,
        remarks=remarks
        + tuple(UNWRITTEN.format(place) for place in unwritten.in_context(conversation, text, render_row)),
    )


def _all_too_long(name: str, count: int, prompt_length: int, shortest: int) -> Fault:
    problem = f"all of its {count} prompts are longer than prompt_length, {prompt_length} tokens"
    return Fault(
        name,
        problem,
        f"raise prompt_length: the shortest prompt needs at least {shortest}, template included",
        "too_large",
    )


LOG = logging.getLogger(__name__)
MOST_NAMED = 20
"""Largest number of tags in a warning. Those with the most rows come first."""


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
