"""Attention of models whose placeholders of a picture see each other in both directions, as in Gemma 3.

Other tokens see those before them. A placeholder also sees the rest of its picture, so that its keys are an unbroken
run: from the start of its sequence, or of its window, to the end of its picture. Kernels for packed sequences take
different numbers of queries and keys. So a second call, with the placeholders as queries, computes their rows, and the
first call computes all other rows causally.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, tuple[int, int]], Tensor]
"""(queries [Q, heads, D], keys and values [S, key-value heads, D], int32 offsets [K + 1] of both, longest part of both,
window) -> [Q, heads, D]. The last query of a part is at its last key. The window is the number of keys to the left and
to the right of a query's own that it sees, or (-1, -1) for all.
"""


@dataclass(frozen=True)
class SeenKeys:
    """The keys of the placeholders of each of K pictures."""

    rows: Tensor
    """int64 [S], places of the keys in the packed row, picture after picture."""
    offsets: Tensor
    """int32 [K + 1], start of each picture's keys, and the end of the last one's."""
    longest: int
    """Largest number of keys of a picture."""


@dataclass(frozen=True)
class PictureSpans:
    """The placeholders of K pictures of a micro-batch."""

    placeholders: Tensor
    """int64 [K x P], places of the placeholders in the packed row, picture after picture."""
    offsets: Tensor
    """int32 [K + 1], start of each picture's placeholders, and the end of the last one's."""
    length: int
    """P, number of placeholders of a picture."""
    whole: SeenKeys
    """The keys in layers without a window."""
    near: SeenKeys
    """The keys in layers with the model's sliding window."""


def picture_spans(
    places: NDArray[np.int64], length: int, window: int | None, device: torch.device
) -> PictureSpans | None:
    """Return the placeholders of the pictures of a micro-batch; None without a picture.

    Args:
        places: [K, 2], places in the packed row of the start of each picture's sequence, and of its first placeholder.
        length: P, number of placeholders of a picture.
        window: number of tokens that a token sees in layers with a sliding window, itself included.
    """
    if not len(places):
        return None
    starts, firsts = places.T
    nearest = starts if window is None else np.maximum(starts, firsts - window + 1)

    def moved(values: NDArray[np.int64], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(values).to(device, dtype, non_blocking=True)

    def keys(begins: NDArray[np.int64]) -> SeenKeys:
        counts = firsts + length - begins
        offsets = np.append(0, np.cumsum(counts))
        rows = np.repeat(begins - offsets[:-1], counts) + np.arange(offsets[-1])
        return SeenKeys(moved(rows), moved(offsets, torch.int32), int(counts.max()))

    placeholders = (firsts[:, None] + np.arange(length)).ravel()
    offsets = np.arange(len(places) + 1) * length
    return PictureSpans(moved(placeholders), moved(offsets, torch.int32), length, keys(starts), keys(nearest))


def with_pictures(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, spans: PictureSpans, window: int | None, kernel: Kernel
) -> Tensor:
    """Return the outputs of causal attention [T, heads, D], with those of the placeholders computed anew.

    Args:
        query: [T, heads, D].
        key, value: [T, key-value heads, D].
        window: number of tokens that a token sees, itself included: the model's sliding window, or None for all.
    """
    seen = spans.whole if window is None else spans.near
    sides = (-1, -1) if window is None else (window - 1, spans.length - 1)
    queries = query.index_select(0, spans.placeholders)
    keys, values = (part.index_select(0, seen.rows) for part in (key, value))
    rows = kernel(queries, keys, values, spans.offsets, seen.offsets, spans.length, seen.longest, sides)
    return out.index_copy(0, spans.placeholders, rows)


def seen_with_pictures(
    seen: Tensor, window: int | None, count: int, rows: Tensor, columns: Tensor, spans: PictureSpans
) -> Tensor:
    """Return which keys each query sees, in sequences side by side.

    Args:
        seen: bool [L, L], the keys that a query sees without pictures, by query and key.
        count: N, number of sequences.
        rows, columns: int64 [T], sequence and place in it of each token.

    Returns:
        bool [N, 1, L, L].
    """
    length = len(seen)
    pictures = torch.full((count, length), -1, device=seen.device)
    number = torch.arange(len(spans.offsets) - 1, device=seen.device).repeat_interleave(spans.length)
    pictures[rows[spans.placeholders], columns[spans.placeholders]] = number
    together = (pictures[:, :, None] == pictures[:, None, :]) & (pictures >= 0)[:, None, :]
    if window is not None:
        places = torch.arange(length, device=seen.device)
        together = together & (places[:, None] - places < window)
    return (seen | together)[:, None]
