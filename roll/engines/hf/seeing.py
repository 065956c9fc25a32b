"""The arguments with which a model of transformers generates from a prompt with pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from roll.config.derived.model_shape import SQUARE, TILED
from roll.data.picture_files import decoded
from roll.data.pictures import Sight
from roll.types import AskedPictures, Ints


def picture_inputs(
    sight: Sight, shown: AskedPictures | None, token_ids: Ints, samples: int, device: str
) -> dict[str, Tensor]:
    """Return the arguments for `samples` rows of the same prompt. Nothing without pictures.

    Args:
        token_ids: [P], the prompt, with as many placeholders as the model needs.
    """
    if shown is None:
        return {}
    values, _, grids = sight.pixels([decoded(file) for file in shown.files])
    pixels = torch.from_numpy(values).to(device)
    if sight.model_type in TILED:
        side = _side(values)
        tiles = pixels.view(1, -1, 3, side, side).repeat(samples, 1, 1, 1, 1)
        return {"pixel_values": tiles, "pixel_attention_mask": torch.ones_like(tiles[:, :, 0], dtype=torch.bool)}
    kinds = torch.from_numpy((token_ids == sight.token_id).astype(np.int64)).to(device)
    if sight.model_type in SQUARE:
        side = _side(values)
        return {
            "pixel_values": pixels.view(-1, 3, side, side).repeat(samples, 1, 1, 1),
            "token_type_ids": kinds.repeat(samples, 1),
        }
    merge: Any = sight.processor.merge_size
    sizes = nn.functional.pad(torch.from_numpy(grids * merge), (1, 0), value=1).to(device)
    return {
        "pixel_values": pixels.repeat(samples, 1),
        "image_grid_thw": sizes.repeat(samples, 1),
        "mm_token_type_ids": kinds.repeat(samples, 1),
    }


def _side(values: np.ndarray) -> int:
    """Return the height and width of square tiles or pictures [R, 3 x side x side], in pixels."""
    return round((values.shape[1] / 3) ** 0.5)
