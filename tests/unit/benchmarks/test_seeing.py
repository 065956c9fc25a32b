"""The models of the benchmark with pictures have the published sizes, and a twin's rows have as many tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from benchmarks.seeing import seen, shape, twin, write_rows
from examples.tiny.make_seeing_model import FAMILIES, build_seeing_tokenizer


def test_models_have_the_published_sizes() -> None:
    seeing = shape("3b")
    with torch.device("meta"):
        models = (
            AutoModelForImageTextToText.from_config(seeing),
            AutoModelForCausalLM.from_config(twin(seeing)),
        )
    # Those of Qwen2.5-VL-3B-Instruct and Qwen2.5-3B, without the tied head.
    assert [model.num_parameters() for model in models] == [3_754_622_976, 3_085_938_688]


@pytest.mark.parametrize(("side", "size"), [(560, "3b"), (96, "tiny")])
def test_a_twins_row_is_longer_by_the_picture(side: int, size: str, tmp_path: Path) -> None:
    write_rows(tmp_path, 2, side, 50, seen(side, size))
    tokenizer = build_seeing_tokenizer(FAMILIES[0])
    rows = [json.loads((tmp_path / f"{name}.jsonl").read_text().splitlines()[0]) for name in ("seeing", "text")]
    texts = [str(tokenizer.apply_chat_template(row["messages"], tokenize=False)) for row in rows]
    lengths = [len(tokenizer.encode(text)) for text in texts]
    assert lengths[1] - lengths[0] == seen(side, size) - 3, "a placeholder and the two marks around it"
