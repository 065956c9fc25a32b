"""The marks around a model's thinking, and the text of a response, which keeps them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # reward processes do not import transformers
    from transformers import PreTrainedTokenizerBase

TAG = r"(?:[a-z]+[:_])?(?:think|thinking|thought|thoughts|reasoning)"
THINKING_END = re.compile(
    rf"</{TAG}>|\[/THINK\]|◁/think▷|<channel\|>|<\|channel\|>final<\|message\|>"
    r"|<\|/?end_of_thought\|>|<\|END_THINKING\|>|<\|inner_suffix\|>|<\|end_thinking\|>|<\|/think(?:ing)?\|>"
)
"""Matches what ends the thinking: of Qwen3 and DeepSeek (`</think>`), Seed-OSS (`</seed:think>`), LongCat, EXAONE Deep
(`</thought>`), open-r1's prompts (`</reasoning>`), Magistral, Kimi-VL, Gemma 4, gpt-oss, OpenThinker, Cohere and
Apertus.
"""
MARK = re.compile(
    rf"</?{TAG}>|\[/?THINK\]|◁/?think▷|<\|channel>|<channel\|>|<\|channel\|>|<\|message\|>|<\|(?:begin|end)_of_thought\|>"
    r"|<\|(?:START|END)_THINKING\|>|<\|inner_(?:pre|suf)fix\|>|<\|(?:start|end)_thinking\|>|<\|/?think(?:ing)?\|>"
)
"""Matches a token that is a mark of thinking, or a part of one."""


class ResponseTexts:
    """Decodes responses without special tokens, except those that mark the thinking.

    In some tokenizers, such as Magistral's and gpt-oss's, these marks are special tokens. Without them, a reward could
    not tell the answer from the thinking before it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._kept = {number for number, token in special.items() if MARK.fullmatch(token)}
        self._skipped = special.keys() - self._kept
        # A tokenizer in Python may raise an error for the padding of the embedding, which others decode to nothing.
        self._known = None if tokenizer.is_fast else len(tokenizer)

    def __call__(self, token_ids: Sequence[int]) -> str:
        """Return the text of a response."""
        return self.several([token_ids])[0]

    def several(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of responses."""
        if (known := self._known) is not None:
            responses = [[number for number in token_ids if number < known] for token_ids in responses]
        if not self._kept:
            return self._tokenizer.batch_decode(list(map(list, responses)), skip_special_tokens=True)
        left = [[number for number in token_ids if number not in self._skipped] for token_ids in responses]
        return self._tokenizer.batch_decode(left, skip_special_tokens=False)
