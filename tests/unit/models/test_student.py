"""The output matrix of a teacher, which a student reads from the teacher's checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForCausalLM

from examples.tiny.make_model import build_model
from roll.errors import DataError
from roll.models.student import output_names, read_tensor


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shard", ["10GB", "500KB"], ids=["one_file", "shards"])
def test_the_output_matrix_is_read_from_the_checkpoint(tmp_path: Path, tied: bool, shard: str) -> None:
    config = build_model(0).config
    config.tie_word_embeddings = tied
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    names = output_names(str(tmp_path), trust_remote_code=False)
    assert set(names) == ({"lm_head.weight", "model.embed_tokens.weight"} if tied else {"lm_head.weight"})
    assert torch.equal(read_tensor(str(tmp_path), names), model.lm_head.weight)


def test_a_checkpoint_without_the_matrix_is_refused(tmp_path: Path) -> None:
    build_model(0).save_pretrained(tmp_path)
    with pytest.raises(DataError) as raised:
        read_tensor(str(tmp_path), ["output.weight"])
    [fault] = raised.value.faults
    assert fault.code == "not_found" and "output.weight" in fault.problem
