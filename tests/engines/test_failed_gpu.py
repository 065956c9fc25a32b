"""An engine whose GPU fails during a weight sync exits, so that it can be replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from roll.errors import WeightSyncError
from roll.models.weights import WeightView
from tests import limits
from tests.engines.generating import Running, policy, running

FAULT = "CUDA error: mapping of buffer object failed"


class FailingReader:
    """A `BucketReader` on a GPU that fails."""

    def read(self, bucket: object) -> None:
        """Raise the error that torch raises."""
        raise torch.AcceleratorError(FAULT)

    def close(self) -> None:
        """Do nothing: no resource is open."""


def plant(worker: Any) -> None:
    """Replace the bucket reader of the worker. This runs in the engine's process."""
    worker.weight_transfer_engine._reader = FailingReader()


def test_the_engine_ends_and_says_why(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for `plant`
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    async def died(one: Running) -> str | None:
        await limits.comes_true(lambda: one.engine._engine.errored, "the engine has ended")  # pyright: ignore[reportAttributeAccessIssue]
        return await one.engine.cause_of_death()

    with running("vllm", small_model, tmp_path) as one:
        one.push(policy(small_model, seed=1))
        one.wait(one.engine._engine.collective_rpc(plant))  # pyright: ignore[reportAttributeAccessIssue]
        [first, *_] = one.buckets(WeightView(one.policy.model))
        with pytest.raises(WeightSyncError):
            one.wait(one.engine.load_bucket(first))
        assert "vLLM's engine process died" in str(one.wait(died(one)))
    assert FAULT in capfd.readouterr().err
