"""Training in bf16 and fp16 without ZeRO matches plain PyTorch, although DeepSpeed itself would not scale fp16's losses
there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.deepspeed_table import Cell
from roll.backend import Rank
from tests.engines.ranks import run_ranks
from tests.engines.training import fp16_on_any_cpu

pytestmark = pytest.mark.full

CELLS = [Cell("sft", 0, "none", dtype, lora) for dtype in ("bf16", "fp16") for lora in (False, True)]
CELLS += [Cell("sft", 0, "none", "bf16", False, "muon")]
REWARD = Cell("reward_model", 0, "none", "fp16", False)
"""A cell whose gradients overflow at fp16's initial loss scale."""


def curves(rank: Rank, folder: Path) -> list[tuple[float, int]]:
    """Return for each cell the largest difference from the plain curve, and the number of skipped updates."""
    import torch

    from benchmarks.deepspeed_cells import trained
    from benchmarks.deepspeed_plain import plain
    from benchmarks.deepspeed_tasks import Folders

    folders, out = Folders(folder / "model", folder / "model", folder), []
    with fp16_on_any_cpu():
        for cell in (*CELLS, REWARD):
            curve, skipped = trained(cell, folders, rank)
            out.append(
                (max(abs(mine - other) for mine, other in zip(curve, plain(cell, folders), strict=True)), skipped)
            )
    torch.distributed.destroy_process_group()
    return out


def test_the_curves_are_those_of_plain_pytorch(tmp_path: Path) -> None:
    from examples.tiny.make_model import write_model

    write_model(tmp_path / "model", seed=0)
    for said in run_ranks(curves, 2, tmp_path / "ranks", tmp_path):
        for cell, (difference, _) in zip((*CELLS, REWARD), said, strict=True):
            # Without loss scaling, the losses in fp16 would be off by 2. An extra first step would change those of both
            # dtypes by 0.05.
            assert difference <= cell.tolerance, cell.name
        assert not any(skipped for _, skipped in said[: len(CELLS)])
        assert said[-1][1] > 0, "the first updates must overflow and be skipped until the loss scale fits"
