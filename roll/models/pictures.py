"""The part of a model that sees pictures: its vision tower, with the projector into the text model.

Of each micro-batch, the tower sees all pictures at once. Their features take the places of the placeholder tokens, and
with Qwen the positions of these follow the grid of the picture, in each sequence from 0 (M-RoPE).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll.config.derived.model_shape import PATCHED, SQUARE, has_known_tower
from roll.config.schema.model import FrozenVision
from roll.errors import ConfigError, Fault
from roll.models.picture_spans import PictureSpans, picture_spans
from roll.models.vision_names import PROJECTOR_NAMES, is_of_vision
from roll.types import Pictures, Sequences

PROJECTORS = re.compile(rf"(^|\.)(visual\.(merger|deepstack_merger_list)|{'|'.join(PROJECTOR_NAMES)})\.")
"""In the names of parameters: the projector into the text model."""
GREY = 0.5
"""Value of the pixels of the picture that a tower sees if a micro-batch has none."""


@dataclass(frozen=True)
class ShownPictures:
    """The pictures of a micro-batch on the model's device."""

    values: Tensor
    """fp32 [R, D], see `types.Pictures`."""
    grids: Tensor
    """int64 [D, 2], height and width of each distinct picture in placeholder tokens; 0 for models that see tiles."""
    copies: tuple[int, ...] = ()
    """Which of the distinct pictures each of the K pictures is. Empty: each is its own, K = D."""
    rows: tuple[int, ...] = ()
    """Number of rows in `values` of each distinct picture, if there are copies."""
    places: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """[K, 2], on the host: place in the packed row of the start of each picture's sequence, and of its first
    placeholder.
    """


def shown_pictures(shown: Pictures, offsets: NDArray[np.int64], device: str) -> ShownPictures:
    """Return the pictures of a micro-batch on `device`, one copy of those that several sequences show.

    Args:
        offsets: [N + 1], those of the sequences.
    """
    firsts, which = shown.distinct()
    grids = to_device(shown.grids[firsts], device)
    is_copied = len(firsts) < len(which) or (np.diff(which) < 0).any()
    copies = (tuple(which.tolist()), tuple(shown.rows[firsts].tolist())) if is_copied else ((), ())
    starts = np.repeat(offsets[:-1], shown.counts)
    places = np.stack([starts, starts + shown.starts], axis=1)
    return ShownPictures(to_device(shown.values, device), grids, *copies, places)


def to_device(values: np.ndarray, device: str) -> Tensor:
    """Copy an array to the device. Copies to CUDA use pinned memory, so that the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device == "cuda" else tensor.to(device)


IS_BLIND = "roll_is_blind"


def blind(model: PreTrainedModel) -> None:
    """Freeze the tower of a model that is loaded to be trained on text alone (Gemma 3, which transformers loads whole).

    It has no gradient there, but the optimizer would still decay its weights.
    """
    if has_known_tower(model.config.model_type):
        freeze_vision(model, "all")
        setattr(model, IS_BLIND, True)


def sees(model: PreTrainedModel) -> bool:
    """Return whether a model has a tower that `PictureTower` runs, and was loaded to see pictures."""
    return has_known_tower(model.config.model_type) and not getattr(model, IS_BLIND, False)


def vision_parameters(causal: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of the tower and of its projector."""
    yield from ((name, each) for name, each in causal.named_parameters() if is_of_vision(name))


def freeze_vision(causal: PreTrainedModel, frozen: FrozenVision) -> None:
    """Freeze the tower, or the tower and its projector."""
    for name, parameter in vision_parameters(causal):
        if frozen == "all" or (frozen == "tower" and not PROJECTORS.search(name)):
            parameter.requires_grad_(False)


def text_targets(causal: PreTrainedModel, targets: list[str] | None) -> str:
    """Return an expression of the linear layers of the text model that an adapter gets, for PEFT.

    Args:
        targets: ends of the layers' names; None for all linear layers.

    Raises:
        ConfigError: a name is that of a layer of the vision tower, or of no linear layer at all.
    """
    head = causal.get_output_embeddings()
    linear = [name for name, module in causal.named_modules() if isinstance(module, nn.Linear) and module is not head]
    text = [name for name in linear if not is_of_vision(name)]
    for target in targets or ():
        if not any(f".{name}".endswith(f".{target}") for name in text):
            seen = any(f".{name}".endswith(f".{target}") for name in linear)
            why = "is a layer of the vision tower" if seen else "is the name of no linear layer"
            known = ", ".join(sorted({name.rpartition(".")[2] for name in text}))
            problem = f"'{target}' {why}, and adapters are trained on the text model of a model that sees pictures"
            remedy = f"use all-linear, or names of this list: {known}"
            raise ConfigError(Fault("model_args.lora_target", problem, remedy, "not_supported"))
    chosen = sorted({name.rpartition(".")[2] for name in text}) if targets is None else targets
    inner = next(name.rpartition(".layers.")[0] for name in text if ".layers." in name)
    return rf"{re.escape(inner)}\.layers\..*\.(?:{'|'.join(map(re.escape, chosen))})"


def positions(sequences: Sequences) -> NDArray[np.int64]:
    """Return the positions of packed tokens: [T] from 0 in each sequence, or [3, T] if a picture has a grid.

    As in transformers' `Qwen2_5_VLModel.get_rope_index`: the three rows are time, height and width. A placeholder is at
    the start of its picture, plus its row in the height and its column in the width; the token after the picture
    follows the larger side.
    """
    plain = np.arange(len(sequences.token_ids)) - np.repeat(sequences.offsets[:-1], sequences.lengths)
    shown = sequences.shown
    if shown is None or not shown.grids.any():
        return plain
    found = np.broadcast_to(plain, (3, len(plain))).copy()
    of_picture = np.repeat(np.arange(len(sequences)), shown.counts)
    for sequence, start, (height, width) in zip(of_picture, shown.starts, shown.grids, strict=True):
        first, end = sequences.offsets[sequence] + start, sequences.offsets[sequence + 1]
        last, begun = first + height * width, found[0, first]
        found[:, first:last] = begun
        found[1, first:last] += np.repeat(np.arange(height), width)
        found[2, first:last] += np.tile(np.arange(width), height)
        found[:, last:end] -= height * width - max(height, width)
    return found


def with_copies(features: Any, shown: ShownPictures) -> Any:
    """Return the tower's output for each picture, given that for the distinct ones. Their gradients add up."""
    if not shown.copies:
        return features
    pooled = features.pooler_output
    tiles = isinstance(pooled, Tensor)  # [tiles, tokens of a tile, H]; else a part [tokens, H] for each picture
    parts = torch.split(pooled, list(shown.rows)) if tiles else pooled
    copied = [parts[picture] for picture in shown.copies]
    features.pooler_output = torch.cat(copied) if tiles else copied
    if (deep := getattr(features, "deepstack_features", None)) is not None:
        features.deepstack_features = [[layer[picture] for picture in shown.copies] for layer in deep]
    return features


class PictureTower:
    """Runs the vision tower of a model. It is no module, so that it does not hold the model's parameters twice."""

    def __init__(self, causal: PreTrainedModel) -> None:
        self._causal = causal
        self._config: Any = causal.config
        self._is_patched = causal.config.model_type in PATCHED
        self._is_square = causal.config.model_type in SQUARE

    def inputs(self, shown: ShownPictures | None, device: torch.device) -> tuple[dict[str, Any], Tensor | None]:
        """Return the arguments of the base model for these pictures, and None.

        Without a picture, the tower sees one of a single colour. Then return no arguments, and a number that is 0,
        to be added to the states: under ZeRO, all ranks must run the same layers in the same order, and have a gradient
        for the same parameters.
        """
        features = self.features(shown or self._nothing(device))
        if shown is not None:
            seen: dict[str, Any] = {"mm_encoder_outputs": {"image": with_copies(features, shown)}}
            if self._is_square:
                seen["spans"] = self._spans(shown, device)
            return seen, None
        pooled = features.pooler_output
        parts = [*(pooled if isinstance(pooled, tuple) else [pooled])]
        parts += [part for layer in getattr(features, "deepstack_features", None) or () for part in layer]
        return {}, 0.0 * torch.stack([part.float().mean() for part in parts]).sum()

    def features(self, shown: ShownPictures) -> Any:
        """Return the output of transformers' `get_image_features`. It has no gradient if all of the tower is frozen."""
        base: Any = self._causal.base_model
        is_trained = any(parameter.requires_grad for _, parameter in vision_parameters(self._causal))
        with nullcontext() if is_trained else torch.no_grad():
            if not self._is_patched:
                side = self._config.vision_config.image_size
                pixels = shown.values.view(-1, 3, side, side)
                return base.get_image_features(pixels if self._is_square else pixels[None], return_dict=True)
            merge = self._config.vision_config.spatial_merge_size
            grid = nn.functional.pad(shown.grids * merge, (1, 0), value=1)
            return base.get_image_features(shown.values, grid, return_dict=True)

    def _spans(self, shown: ShownPictures, device: torch.device) -> PictureSpans | None:
        window = self._config.get_text_config().sliding_window
        return picture_spans(shown.places, self._config.mm_tokens_per_image, window, device)

    def _nothing(self, device: torch.device) -> ShownPictures:
        vision = self._config.vision_config
        if not self._is_patched:
            rows, width, grid = 1, 3 * vision.image_size**2, 0
        else:
            width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            rows, grid = vision.spatial_merge_size**2, 1
        values = torch.full((rows, width), GREY, device=device)
        return ShownPictures(values, torch.full((1, 2), grid, dtype=torch.int64, device=device))
