"""What the policy was asked, for rewards that read it: the conversation of a row, and its text. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from roll.config.schema.model import DataConfig
from roll.data.chat import Render
from roll.data.rows import Conversation, prompt_conversation
from roll.types import Ints


def conversation_of(row: Mapping[str, Any], sources: Sequence[DataConfig]) -> Conversation:
    """The messages that the policy was to answer.

    Args:
        sources: the columns of the data sets that the row may be of; the first whose column the row has is taken.

    Raises:
        RowFault: the row, which was checked when it was prepared, is of none of them.
    """
    of_row = [columns for columns in sources if row.get(columns.messages or columns.prompt or "") is not None]
    return prompt_conversation(row, (of_row or sources)[0])


def question_text(conversation: Conversation) -> str:
    """The user's message; of several turns each with its role. System messages are left out."""
    turns = [message for message in conversation if message["role"] != "system"]
    if len(turns) == 1:
        return turns[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in turns)


def message_encoder(render: Render, tokenizer: PreTrainedTokenizerBase, adds_special_tokens: bool) -> Callable[[str], Ints]:
    """From a user's message to the tokens that a model answers; raises TemplateFault if the template refuses the message."""

    def encode(message: str) -> Ints:
        text = render([{"role": "user", "content": message}], True)
        return np.asarray(tokenizer.encode(text, add_special_tokens=adds_special_tokens), np.int32)

    return encode
