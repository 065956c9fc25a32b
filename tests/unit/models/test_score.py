"""The token at which a reward model reads its score, and scores of an exported reward model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from examples.tiny.make_model import build_tokenizer, write_model
from examples.tiny.make_seeing_model import write_seeing_model
from roll.config.schema.model import ModelConfig
from roll.data.packing import concatenate
from roll.errors import DataError
from roll.models import export
from roll.models.packed import packed_inputs
from roll.models.value import load_scores, scored_token
from roll.tracking.card import loading_call
from tests.faults import assert_fault

FP32 = ModelConfig.model_validate({"dtype": "fp32"})


@pytest.mark.parametrize(
    ("token_ids", "pad", "where"),
    [
        ([5, 6, 7], 9, 2),
        ([5, 6, 9], 9, 1),
        ([5, 9, 6, 9, 9], 9, 2),
        ([5, 6, 9], None, 2),
        ([9, 9, 9], 9, 2),
        ([5, 9], 9, 1),
    ],
)
def test_score_is_read_at_last_unpadded_token(token_ids: list[int], pad: int | None, where: int) -> None:
    mask = scored_token(np.array(token_ids, np.int32), pad)
    assert np.flatnonzero(mask).tolist() == [where]


def test_transformers_reproduces_exported_reward_model_scores(tmp_path: Path) -> None:
    write_model(tmp_path / "base", seed=0)
    scores = load_scores(
        str(tmp_path / "base"), ModelConfig.model_validate({"dtype": "fp32", "gradient_checkpointing": "none"}), seed=0
    )
    torch.nn.init.normal_(scores.causal.get_parameter("score.weight"), generator=torch.Generator().manual_seed(0))
    tensors = {name: parameter.detach() for name, parameter in scores.causal.named_parameters()}
    export.write_model(tmp_path / "export", iter([tensors]), scores.causal, build_tokenizer())

    rows = [np.arange(20, 20 + length, dtype=np.int32) for length in (5, 9, 3)]
    sequences = concatenate(rows, [scored_token(row, scores.causal.config.pad_token_id) for row in rows])
    with torch.no_grad():
        ours = scores(packed_inputs(sequences, "cpu"))[0]
        loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()
        pad = loaded.config.pad_token_id
        padded = torch.tensor([[*row.tolist(), *[pad] * (9 - len(row))] for row in rows])
        theirs = loaded(input_ids=padded, attention_mask=(padded != pad).long()).logits[:, 0]
    assert loaded.config.num_labels == 1 and loaded.config.architectures == [type(loaded).__name__]
    assert "AutoModelForSequenceClassification" in loading_call(
        tmp_path / "export", "export", ModelConfig.model_validate({})
    )
    assert ours.std() > 1e-2
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_weights_that_files_lack_are_a_fault(tmp_path: Path) -> None:
    write_seeing_model(tmp_path / "model", "qwen2_5_vl", seed=0)
    [file] = (tmp_path / "model").glob("*.safetensors")
    tensors = load_file(file)
    lost = next(name for name in tensors if name.endswith("o_proj.weight"))
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file, metadata={"format": "pt"})
    with pytest.raises(DataError) as caught:
        load_scores(str(tmp_path / "model"), FP32, 0)
    assert_fault(caught.value.faults, "pretrain", "unreadable", "lack 1 of its weights", "all weights")
