"""Sequence parallelism: two GPUs that split the tokens of each micro-batch score and train like one GPU."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from roll.algorithms.objectives import PolicyLoss
from roll.backend import Rank
from roll.config.schema.model import ModelConfig, TrainingConfig
from roll.models.load import load_policy
from roll.training.deepspeed.settings import DeepSpeedConfig, TrainSettings
from tests import limits
from tests.engines.ranks import free_port
from tests.gpu.conftest import need_devices
from tests.gpu.test_training import BUCKETS, micro_batches

pytestmark = pytest.mark.gpu
BUDGET = 4095
"""Token budget that gives packed rows of many lengths, most of them odd."""


def train(rank: Rank, model: Path, stage: int, lora: bool, keys: dict[str, Any]) -> dict[str, Any]:
    """Score and make two updates, with all ranks as one replica. Return the results."""
    from roll.training.deepspeed.strategy import DeepSpeedTrain

    adapter = {"lora_target": "all-linear", "lora_rank": 8} if lora else {}
    settings = TrainSettings(
        str(model),
        ModelConfig.model_validate({"dtype": "bf16"} | adapter | keys),
        TrainingConfig.model_validate({"learning_rate": 1e-4}),
        DeepSpeedConfig.model_validate(
            {"zero_optimization": {"stage": stage} | BUCKETS, "sequence_parallel_size": rank.world_size}
        ),
        max_grad_norm=1.0,
        total_updates=10,
        token_budget=BUDGET,
        seed=0,
        load=load_policy,
    )
    strategy = DeepSpeedTrain(settings, rank)
    parts, _ = micro_batches(BUDGET)
    sequences = [part.batch.sequences for part in parts]
    before = strategy.log_probs(sequences, 1.0, True)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    results = [strategy.train_step([parts[:1]], PolicyLoss(), 1.0, 0)]
    used = torch.cuda.max_memory_allocated() - held
    results.append(strategy.train_step([parts], PolicyLoss(), 1.0, 1))
    after = strategy.log_probs(sequences, 1.0, True)
    strategy.close()
    return {
        "grad_norms": [result.scalars["policy/grad_norm"] for result in results],
        "losses": [result.sums["policy/loss"] / result.tokens for result in results],
        "tokens": [result.tokens for result in results],
        "before": np.concatenate(before),
        "after": np.concatenate(after),
        "used": used,
    }


def _child(sender: Connection, rank: Rank, arguments: tuple[Any, ...]) -> None:
    try:
        sender.send(train(rank, *arguments))
    except BaseException:
        sender.send(traceback.format_exc())


def environment(rank: Rank) -> dict[str, str]:
    """Return the environment of a rank that sees one of this process's GPUs."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[rank.rank]
    place = {"RANK": str(rank.rank), "WORLD_SIZE": str(rank.world_size), "LOCAL_RANK": "0"}
    return place | {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": seen}


def on_gpus(count: int, *arguments: Any) -> list[dict[str, Any]]:
    """Run `train` on `count` GPUs, each in its own process that sees no other GPU."""
    context, port = multiprocessing.get_context("spawn"), free_port()
    ends, processes = [], []
    try:
        for number in range(count):
            receiver, sender = context.Pipe(duplex=False)
            rank = Rank("actor_train", number, count, "127.0.0.1", port, "cuda", limits.START, (number,), count)
            process = context.Process(target=_child, args=(sender, rank, arguments))
            with mock.patch.dict(os.environ, environment(rank)):  # set before the child imports torch
                process.start()
            sender.close()
            ends.append(receiver)
            processes.append(process)
        results = []
        for receiver in ends:
            assert receiver.poll(limits.START), "no result in time"
            results.append(receiver.recv())
            assert isinstance(results[-1], dict), results[-1]
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with two heads and one key-value head, which both GPUs replicate.

    Its layers are wide enough to measure activations.
    """
    from benchmarks.models import write

    folder = tmp_path_factory.mktemp("models") / "tiny"
    write(folder, "tiny")
    return folder


CASES = [(1, False, "none", False), (3, False, "auto", True), (3, True, "all", True)]


@pytest.mark.parametrize(("stage", "lora", "checkpointing", "compiled"), CASES)
def test_two_gpus_do_as_one(model: Path, stage: int, lora: bool, checkpointing: str, compiled: bool) -> None:
    need_devices(2)
    keys = {"gradient_checkpointing": checkpointing, "compile_layers": compiled}
    [one] = on_gpus(1, model, stage, lora, keys)
    two, other = on_gpus(2, model, stage, lora, keys)
    for name in ("before", "after"):
        np.testing.assert_array_equal(two[name], other[name])
    assert two["tokens"] == one["tokens"]
    np.testing.assert_allclose(two["grad_norms"], one["grad_norms"], rtol=0.03)
    np.testing.assert_allclose(two["losses"], one["losses"], atol=0.01)
    assert np.abs(two["before"] - one["before"]).mean() < 0.01
    assert np.abs(two["after"] - one["after"]).mean() < 0.02
    assert np.abs(two["after"] - two["before"]).mean() > 1e-4
    if checkpointing == "none":  # activations are most of a micro-batch's memory
        assert two["used"] < 0.75 * one["used"]
