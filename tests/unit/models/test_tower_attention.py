"""The attention of Qwen's towers, called once for all windows, gives what transformers gives window by window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoModelForImageTextToText

from examples.tiny.make_seeing_model import write_seeing_model
from roll.config.schema.model import ModelConfig
from roll.models.load import load_seeing_model
from roll.models.tower_attention import NAME, tower_attention

FP32 = ModelConfig.model_validate({"dtype": "fp32", "sees_pictures": True})


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_features_and_gradients_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    write_seeing_model(tmp_path / "model", family, seed=0)
    ours: Any = load_seeing_model(str(tmp_path / "model"), FP32)
    theirs: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", attn_implementation="sdpa")
    vision, calls = ours.config.vision_config, list[int]()
    depth, merge = len(ours.model.visual.blocks), vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    grids = torch.tensor([[1, 4 * merge, 6 * merge], [1, 1 * merge, 1 * merge], [1, 9 * merge, 2 * merge]])
    pixels = torch.randn(int(grids.prod(1).sum()), width, generator=torch.Generator().manual_seed(0))

    def counted(*given: Any, **keys: Any) -> Any:
        calls.append(len(keys["cu_seq_lens_q"]))
        return tower_attention(*given, **keys)

    AttentionInterface.register(NAME, counted)
    try:
        found = [model.base_model.get_image_features(pixels, grids, return_dict=True) for model in (ours, theirs)]
    finally:
        AttentionInterface.register(NAME, tower_attention)
    assert len(calls) == depth and min(calls) >= len(grids) + 1
    mine, wanted = (torch.cat(list(each.pooler_output)) for each in found)
    torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
    for each in (mine, wanted):
        each.square().mean().backward()
    for (name, one), other in zip(ours.model.visual.named_parameters(), theirs.model.visual.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-6, msg=name)
