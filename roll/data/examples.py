"""Examples for SFT: the same sources and checks as for prompts, with the assistant's last response to learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from roll.config.schema_model import DataArgs
from roll.data.chat import Render, render_example
from roll.data.prompts import checked_renderer
from roll.data.rows import check_columns, example_conversation
from roll.data.sources import find_sources
from roll.data.tables import Preparation, check_rows, column, count_by_file, prepared_table
from roll.errors import DataError, Fault
from roll.types import Bools, Ints


@dataclass(frozen=True)
class Example:
    """One conversation to learn from."""

    token_ids: Ints
    """[T], the prompt's tokens and then the response's, the end of the turn included."""
    response_mask: Bools
    """[T], True on the tokens of the assistant's last response."""


@dataclass(frozen=True)
class ExampleSet:
    """The usable examples of a data set, memory-mapped."""

    positions: NDArray[np.int64]
    """[examples], where in the table each example stands."""
    too_long: Mapping[str, int]
    """By file, how many rows were dropped because prompt or response is longer than its limit."""
    _table: datasets.Dataset = field(repr=False)

    def __len__(self) -> int:
        return len(self.positions)

    def example(self, index: int) -> Example:
        """Example `index`, 0 <= index < len(self)."""
        entry = self._table[int(self.positions[index])]
        token_ids = np.asarray(entry["token_ids"], dtype=np.int32)
        return Example(token_ids, np.arange(len(token_ids)) >= entry["prompt_tokens"])


def prepare_examples(
    data_args: DataArgs,
    tokenizer: PreTrainedTokenizerBase,
    prompt_length: int,
    response_length: int,
    cache_folder: Path | None = None,
) -> ExampleSet:
    """As `prepare_prompts`, for rows that hold `messages` ending with the assistant's, or `prompt` and `response`.

    Prompt and response are tokenised apart, since that is where the policy takes over when it generates. Rows whose
    prompt exceeds `prompt_length` or whose response exceeds `response_length` tokens are dropped and counted.

    Raises:
        DataError: rows that cannot be used (each fault names `file:row`), no example is left, or the tokenizer has no
            end-of-sequence token.
    """
    check_columns(data_args, with_response=True)
    if not isinstance(tokenizer.eos_token, str):
        problem = f"the tokenizer of '{tokenizer.name_or_path}' has no end-of-sequence token"
        raise DataError([Fault("pretrain", problem, "set eos_token in its tokenizer_config.json")])
    sources = find_sources(data_args.file_name, data_args.split)
    render = checked_renderer(data_args, tokenizer)
    texts = partial(_example_texts, data_args=data_args, render=render, eos_token=tokenizer.eos_token)
    preparation = Preparation(texts, tokenizer, data_args.template == "raw", data_args)
    table = prepared_table(sources, preparation, "examples", cache_folder)
    check_rows(table, sources)
    fits = (column(table, "prompt_tokens") <= prompt_length) & (column(table, "response_tokens") <= response_length)
    too_long = count_by_file(table, np.flatnonzero(~fits), sources)
    if not fits.any():
        problem = f"no example fits prompt_length {prompt_length} and response_length {response_length}"
        raise DataError([Fault(name, f"{problem}; {count} rows", "raise the two lengths") for name, count in too_long.items()])
    return ExampleSet(np.flatnonzero(fits), too_long, table)


def _example_texts(row: Mapping[str, Any], data_args: DataArgs, render: Render, eos_token: str) -> tuple[str, str]:
    return render_example(example_conversation(row, data_args), render, eos_token)
