"""Reads and tokenises the conversation of a row, for rewards that need the question. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from roll.config.schema.model import DataConfig
from roll.data.chat import Render, render_example
from roll.data.native import special_marks
from roll.data.rows import Conversation, prompt_conversation
from roll.data.tables import adds_space, continuation, left_open
from roll.types import Ints


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
