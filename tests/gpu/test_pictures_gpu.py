"""Models that see pictures on a GPU: placeholders that see each other, by the variable-length kernel, and packed
sequences in 16 bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from examples.tiny.make_seeing_model import write_seeing_model
from roll.backend_settings import choose_algorithms
from roll.config.schema.model import ModelConfig
from roll.data import packing
from roll.models.attention import packed_attention
from roll.models.layers import compile_layers
from roll.models.load import load_seeing_policy
from roll.models.packed import packed_inputs
from roll.models.picture_spans import picture_spans
from roll.types import Sequences
from tests.engines.seeing import batch_of
from tests.unit.models.test_picture_spans import LENGTH, WINDOWS, offsets, parts, places, written_out

pytestmark = pytest.mark.gpu
FAMILIES = ("gemma3", "qwen3_5")


@pytest.mark.parametrize("window", WINDOWS)
def test_kernel_sees_pictures_in_both_directions(window: int | None) -> None:
    exact = parts()
    inputs = [each.detach().to("cuda", torch.bfloat16).requires_grad_() for each in exact]
    spans = picture_spans(places(), LENGTH, window, torch.device("cuda"))
    given: dict[str, Any] = {"max_length_q": 21, "cu_seq_lens_q": torch.from_numpy(offsets()).int().cuda()}
    attend: Any = packed_attention
    out, _ = attend(nn.Identity(), *inputs, None, sliding_window=window, spans=spans, **given)
    expected = written_out(*exact, window)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=3e-2)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = torch.autograd.grad((out.double() * weights.cuda()).sum(), inputs)
    for own, other in zip(found, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
        torch.testing.assert_close(own.double().cpu(), other, rtol=0, atol=6e-2)


@pytest.fixture(scope="module", params=FAMILIES)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sequences]:
    folder = tmp_path_factory.mktemp("seeing") / request.param
    write_seeing_model(folder, request.param, seed=0)
    return folder, batch_of(request.param, AutoConfig.from_pretrained(folder).image_token_id).sequences


def said(
    seeing: tuple[Path, Sequences], dtype: str, device: str, alone: bool = False, compiled: bool = False
) -> Tensor:
    """Return the log-probs of the tokens in the loss, fp32 [S]."""
    folder, sequences = seeing
    model_args = ModelConfig.model_validate({"dtype": dtype, "sees_pictures": True})
    choose_algorithms(deterministic=False)  # as every role that trains or scores does
    policy = load_seeing_policy(str(folder), model_args, seed=0).to(device).eval()
    if compiled:
        compile_layers(policy.causal)
    chosen = [[row] for row in range(len(sequences))] if alone else [[*range(len(sequences))]]
    with torch.no_grad():
        found = [policy(packed_inputs(packing.select(sequences, rows), device))[0] for rows in chosen]
    return torch.cat(found).cpu()


def test_log_probs_are_those_of_the_cpu(seeing: tuple[Path, Sequences]) -> None:
    torch.testing.assert_close(said(seeing, "fp32", "cuda"), said(seeing, "fp32", "cpu"), rtol=0, atol=1e-4)
    assert (said(seeing, "bf16", "cuda") - said(seeing, "fp32", "cpu")).abs().mean() < 3e-2


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_is_alone_in_16_bits(seeing: tuple[Path, Sequences], compiled: bool) -> None:
    packed, alone = said(seeing, "bf16", "cuda", compiled=compiled), said(seeing, "bf16", "cuda", alone=True)
    assert (packed - alone).abs().mean() < 2e-2
