"""Models with different vocabularies, whose token probabilities cannot be compared, are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from examples.tiny.make_model import build_tokenizer
from roll.errors import DataError
from roll.runs.role_models import check_same_vocabulary


def test_a_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    check_same_vocabulary(tokenizer, build_tokenizer(), "teacher")
    tokenizer.save_pretrained(tmp_path)
    other = AutoTokenizer.from_pretrained(tmp_path)
    other.add_tokens(["<tool>"])
    with pytest.raises(DataError, match=r"vocabulary \(260 tokens\) .* 1 tokens .*\(259\)"):
        check_same_vocabulary(tokenizer, other, "teacher.model_args.model_name_or_path")
