"""The prompts of a self-teacher: those of the policy, with hints in the last message. Rendered and tokenised as the
policy's are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from roll.config.derived.hints import hint_templates
from roll.config.schema.model import DataConfig
from roll.config.schema.self_distillation import Hint, SelfDistillationConfig
from roll.data.chat import ChatTemplate, checked_renderer
from roll.data.rows import RowFault, prompt_conversation, template_arguments, value_at
from roll.data.tables import all_tokens
from roll.types import Ints

Hints = Mapping[Hint, str]
"""Texts that the teacher sees, by kind."""


@dataclass(frozen=True)
class TeacherPrompts:
    """Writes the prompts of a self-teacher."""

    keys: SelfDistillationConfig
    data_args: DataConfig
    tokenizer: PreTrainedTokenizerBase
    render: ChatTemplate

    def token_ids(self, asked: Sequence[tuple[Mapping[str, Any], Hints]]) -> list[Ints]:
        """Return the tokens of each prompt, for the row of the policy's prompt and the hints.

        Raises:
            RowFault, TemplateFault: a row cannot be rendered.
        """
        texts = [self.text(row, hints) for row, hints in asked]
        return [
            np.asarray(ids, np.int32) for ids in all_tokens(self.tokenizer, texts, self.data_args.template == "raw")
        ]

    def text(self, row: Mapping[str, Any], hints: Hints) -> str:
        """Return a prompt as text. A conversation that ends with the result of a tool gets a further user's message."""
        conversation = prompt_conversation(row, self.data_args)
        *before, last = conversation
        if last["role"] != "user":
            before, last = conversation, {"role": "user", "content": ""}
        further = {**(self.data_args.chat_template_kwargs or {}), **template_arguments(row)}
        return self.render([*before, last | {"content": self._hinted(last["content"], hints)}], True, further)

    def _hinted(self, prompt: str, hints: Hints) -> str:
        templates = hint_templates(self.keys)
        written = [templates[kind].format(**{kind: hints[kind]}) for kind in self.keys.sees if kind in hints]
        return self.keys.template.format(prompt=prompt, hints="\n\n".join(written))


def teacher_prompts(
    keys: SelfDistillationConfig, data_args: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> TeacherPrompts:
    """Return the writer of a self-teacher's prompts. Raises DataError if the template does not fit the tokenizer."""
    return TeacherPrompts(keys, data_args, tokenizer, checked_renderer(data_args, tokenizer))


def solution_at(row: Mapping[str, Any], column: str) -> str | None:
    """Return the solution of a row as text; None if the column is absent or empty.

    Raises:
        RowFault: the value is neither a text nor a number.
    """
    try:
        value = value_at(row, column, f"solution_column is '{column}'", "")
    except RowFault:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        problem = f"'{column}' is a {type(value).__name__}, which is no text to show to the teacher"
        remedy = "make it a text or a number, or name the key inside it: self_distillation.solution_column=column.key"
        raise RowFault(f"'{column}' is no text", problem, remedy, "wrong_type")
    return str(value).strip() or None
