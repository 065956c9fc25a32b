"""A run with optimizer states and parameters on NVMe resumes bitwise identically, which DeepSpeed alone does not do.
Needs libaio.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed.ops.op_builder import AsyncIOBuilder  # pyright: ignore[reportAttributeAccessIssue]

from roll.errors import CheckpointError
from roll.training.actor_train import merge
from roll.training.deepspeed.files import to_universal, trained_weights
from roll.types import TrainBatch
from tests.engines.elastic import checkpoint_of
from tests.engines.ranks import run_ranks
from tests.engines.swapping import swap_folder, train_or_resume
from tests.engines.test_train import assert_close, batch, shares  # noqa: F401  (the fixture)
from tests.engines.training import Case

pytestmark = pytest.mark.full

CASES = [Case(3, False), Case(3, True, dtype="bf16")]


@pytest.mark.skipif(not AsyncIOBuilder().is_compatible(), reason="needs libaio and its headers")
def test_a_resumed_run_goes_on_to_the_bit(batch: TrainBatch, small_model: Path, tmp_path: Path) -> None:  # noqa: F811
    swap_folder(tmp_path).mkdir()
    works = shares(batch, 2, whole=False)
    whole, resumed = (
        run_ranks(train_or_resume, 2, tmp_path, CASES, small_model, works, tmp_path, resumes)
        for resumes in (False, True)
    )
    for number, case in enumerate(CASES):
        for update in range(3):
            expected, found = (merge([rank[number].curve[update] for rank in ranks]) for ranks in (whole, resumed))
            for metric in ("policy/loss", "policy/grad_norm", "policy/lr"):
                assert found[metric] == expected[metric], f"{case.name}: {metric} of update {update}"
        assert_close(resumed[0][number].saved, whole[0][number].saved, 0.0)
        assert_close(resumed[0][number].weights, whole[0][number].weights, 0.0)
        for convert in (
            lambda folder: trained_weights(folder, as_held=True),
            lambda folder: to_universal(folder, tmp_path / "out"),
        ):
            with pytest.raises(CheckpointError, match="on NVMe: resume"):
                convert(checkpoint_of(tmp_path, case))
    assert not list(swap_folder(tmp_path).iterdir())
