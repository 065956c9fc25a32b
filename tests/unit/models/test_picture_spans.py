"""Attention in which the placeholders of a picture see each other, against all scores written out in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from roll.models.attention import packed_attention
from roll.models.load import flash_attention
from roll.models.picture_spans import PictureSpans, picture_spans

LENGTH = 4
"""Number of placeholders of a picture."""
SEQUENCES: Sequence[tuple[int, Sequence[int]]] = [(9, [3]), (5, []), (21, [0, 6, 12]), (4, [0]), (1, []), (12, [8])]
"""By sequence, its number of tokens and the places of its pictures: also at its start, at its end, and in a row."""
WINDOWS = [None, 2, 3, 6, 50]
"""Windows that are shorter than a picture, than a sequence, and than neither."""


def offsets() -> np.ndarray:
    return np.cumsum([0, *(length for length, _ in SEQUENCES)])


def places() -> np.ndarray:
    starts = offsets()
    return np.array([[starts[i], starts[i] + first] for i, (_, firsts) in enumerate(SEQUENCES) for first in firsts])


def seen(window: int | None) -> Tensor:
    """Return which tokens of the packed row each token sees, [T, T], by the definition."""
    count, starts = int(offsets()[-1]), offsets()
    of_sequence = np.searchsorted(starts, np.arange(count), side="right")
    picture = np.full(count, -1)
    for number, (_, first) in enumerate(places()):
        picture[first : first + LENGTH] = number
    query, key = np.indices((count, count))
    together = (picture[query] == picture[key]) & (picture[query] >= 0)
    near = query - key < (window or count)
    return torch.from_numpy((of_sequence[query] == of_sequence[key]) & ((key <= query) | together) & near)


def parts() -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [1, 4, T, 8], and keys and values [1, 2, T, 8]."""
    generator, count = torch.Generator().manual_seed(0), int(offsets()[-1])
    made = [torch.randn(1, heads, count, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    return made[0].requires_grad_(), made[1].requires_grad_(), made[2].requires_grad_()


def written_out(query: Tensor, key: Tensor, value: Tensor, window: int | None, softcap: float | None = None) -> Tensor:
    """Return the outputs [1, T, heads, D]."""
    key, value = (each.repeat_interleave(2, dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * 8**-0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return (scores.masked_fill(~seen(window), -torch.inf).softmax(-1) @ value).transpose(1, 2)


def kernel(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, *_: int, **given: Any) -> Tensor:
    """Compute flash-attn's `flash_attn_varlen_func`: the last query of a part is at its last key."""
    out = []
    left, right = given["window_size"]
    for part in range(len(q_offsets) - 1):
        own = slice(*q_offsets[part : part + 2].tolist())
        keys, values = (
            each[slice(*k_offsets[part : part + 2].tolist())].repeat_interleave(2, dim=1) for each in (k, v)
        )
        distance = torch.arange(len(keys)) - (torch.arange(len(q[own])) + len(keys) - len(q[own]))[:, None]
        hidden = (distance > 0) if given["causal"] else torch.zeros_like(distance, dtype=torch.bool)
        hidden |= (distance < -left) & (left >= 0)
        hidden |= (distance > right) & (right >= 0)
        scores = torch.einsum("qhd,khd->hqk", q[own], keys) * given["softmax_scale"]
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values))
    return torch.cat(out)


def spans(window: int | None) -> PictureSpans:
    found = picture_spans(places(), LENGTH, window, torch.device("cpu"))
    assert found is not None
    return found


def assert_same(
    found: Tensor, inputs: Sequence[Tensor], expected: Tensor, others: Sequence[Tensor], tolerance: float
) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for own, other in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), others),
        strict=True,
    ):
        torch.testing.assert_close(own, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", ["masked", "capped", "two_calls"])
def test_placeholders_see_their_picture_in_both_directions(kind: str, window: int | None) -> None:
    attend: Any = flash_attention(kernel) if kind == "two_calls" else packed_attention
    given: dict[str, Any] = {"max_length_q": 21, "cu_seq_lens_q": torch.from_numpy(offsets()).int()}
    given |= {"scaling": 8**-0.5, "sliding_window": window, "spans": spans(window)}
    cap = 2.0 if kind == "capped" else None
    inputs, others = parts(), parts()
    found, _ = attend(nn.Identity(), *inputs, None, softcap=cap, **given)
    # With a cap, the scores are in fp32.
    assert_same(found, inputs, written_out(*others, window, cap), others, 1e-12 if cap is None else 1e-5)


def test_micro_batch_without_pictures_has_no_spans() -> None:
    assert picture_spans(np.zeros((0, 2), np.int64), LENGTH, 6, torch.device("cpu")) is None


@pytest.mark.parametrize("window", [None, 3])
def test_keys_of_a_picture_are_an_unbroken_run(window: int | None) -> None:
    keys = spans(window).near
    runs = [run.tolist() for run in keys.rows.split(keys.offsets.diff().tolist())]
    assert keys.longest == max(map(len, runs))
    for (start, first), run in zip(places(), runs, strict=True):
        begin = start if window is None else max(start, first - window + 1)
        assert run == list(range(begin, first + LENGTH))
