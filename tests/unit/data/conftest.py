"""Fixtures for tests of data: a small tokenizer trained on the spot, and a writer of JSON Lines files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from roll.config.schema.roles import RewardConfig

CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE tokenizer trained on a few lines of text, with ChatML's special tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["What is one and one?", "The answer is two.", "user assistant system"] * 20, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    made.chat_template = CHAT_TEMPLATE
    return made


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes rows to a JSON Lines file and returns its path. Rows that are strings are written
    unchanged.
    """

    def write(rows: Sequence[Any], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
        return str(path)

    return write


@pytest.fixture
def one_domain() -> dict[str, RewardConfig]:
    return {"math_rule": RewardConfig.model_validate({})}
