"""Training on a GPU: the chunked head, recomputed and compiled layers, ZeRO stages, and shortage of memory."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.algorithms.objectives import PolicyLoss
from roll.backend import MicroBatch, Rank
from roll.config.schema.model import ModelConfig, TrainingConfig
from roll.data import packing
from roll.data.packing import loss_weights
from roll.models.load import load_policy
from roll.models.packed import chunked_log_probs
from roll.training.deepspeed.settings import DeepSpeedConfig, TrainSettings
from roll.types import TrainBatch
from tests import limits
from tests.engines.ranks import free_port

pytestmark = pytest.mark.gpu
LENGTH, COUNT, VOCABULARY = 256, 32, 2048
BUCKETS = {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6, "stage3_prefetch_bucket_size": 10**6}
"""Sizes of small buckets, in elements: DeepSpeed's default buckets take a GiB each, and one test has less memory."""


def whole_formula(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies from a float64 log-softmax over whole logits."""
    log_p = (hidden.double() @ weight.double().t() / 0.8).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_the_compiled_head_against_float64(
    dtype: torch.dtype, entropy_coef: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll.models.packed.head_tokens", lambda vocabulary: 128)
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(700, 256, device="cuda", generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(5000, 256, device="cuda", generator=generator).div(8).to(dtype).requires_grad_()
    targets = torch.randint(5000, (700,), device="cuda", generator=generator)
    direction = torch.randn(700, device="cuda", generator=generator)
    seen = []
    for log_probs, entropy in (chunked_log_probs(hidden, weight, targets, 0.8), whole_formula(hidden, weight, targets)):
        objective = (log_probs * direction).sum() + (
            entropy_coef * (entropy * direction).sum() if entropy_coef else 0.0
        )
        seen.append((log_probs, entropy, *torch.autograd.grad(objective, (hidden, weight))))
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for mine, theirs in zip(*seen, strict=True):
        error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
        assert error < tolerance
    assert (seen[0][0].double() - seen[1][0]).abs().max() < 1e-3


def test_memory_does_not_grow_with_the_vocabulary() -> None:
    """32k tokens with a frozen head, as with LoRA."""
    peaks = []
    for vocabulary in (152_064, 2 * 152_064):
        hidden = torch.randn(32_768, 1536, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(vocabulary, 1536, device="cuda", dtype=torch.bfloat16)
        targets = torch.randint(vocabulary, (32_768,), device="cuda")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        log_probs, _ = chunked_log_probs(hidden, weight, targets)
        log_probs.sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del hidden, weight, targets, log_probs
    assert peaks[1] < 1.02 * peaks[0]


def micro_batches(token_budget: int) -> tuple[list[MicroBatch], np.ndarray]:
    """Return the micro-batches of one update and, for each of their tokens in order, its position in the batch."""
    generator = np.random.default_rng(0)
    lengths = [LENGTH - 8 * (number % 5) for number in range(COUNT)]
    sequences = packing.concatenate(
        [generator.integers(0, VOCABULARY, length).astype(np.int32) for length in lengths],
        [np.arange(length) >= 32 for length in lengths],
    )
    mask = sequences.response_mask
    advantages = np.where(mask, generator.normal(size=len(mask)), 0).astype(np.float32)
    behaviour = np.where(mask, -np.log(VOCABULARY), 0).astype(np.float32)
    batch = TrainBatch(sequences, advantages, behaviour, np.zeros(len(mask), np.int32), None)
    weights = loss_weights(sequences, "token-mean")
    (forwards,) = packing.split_to_budget(sequences.lengths, 1, token_budget).ranks
    parts = [
        MicroBatch(packing.take_sequences(batch, indices), packing.select_tokens(weights, sequences, indices))
        for indices in forwards
    ]
    return parts, np.concatenate([packing.token_positions(sequences.offsets, indices) for indices in forwards])


def train(
    model: Path, stage: int, lora: bool, token_budget: int, fraction: float | None, keys: dict[str, Any]
) -> dict[str, Any]:
    """Score and make three updates, in this process. Return the results."""
    from roll.training.deepspeed.strategy import DeepSpeedTrain

    adapter = {"lora_target": "all-linear", "lora_rank": 8} if lora else {}
    settings = TrainSettings(
        str(model),
        ModelConfig.model_validate({"dtype": "bf16"} | adapter | keys),
        TrainingConfig.model_validate({"learning_rate": 1e-4}),
        DeepSpeedConfig.model_validate({"zero_optimization": {"stage": stage} | BUCKETS}),
        max_grad_norm=1.0,
        total_updates=10,
        token_budget=token_budget,
        seed=0,
        load=load_policy,
    )
    strategy = DeepSpeedTrain(settings, Rank("actor_train", 0, 1, "127.0.0.1", free_port(), "cuda", limits.START))
    parts, places = micro_batches(token_budget)
    before = strategy.log_probs([part.batch.sequences for part in parts], 1.0, True)
    if fraction is not None:
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + fraction * 2**30) / total)
    results = [strategy.train_step([parts], PolicyLoss(), 1.0, number) for number in range(3)]
    torch.cuda.set_per_process_memory_fraction(1.0)
    after = strategy.log_probs([part.batch.sequences for part in parts], 1.0, True)
    strategy.close()
    return {
        "grad_norms": [result.scalars["policy/grad_norm"] for result in results],
        "losses": [result.sums["policy/loss"] / result.tokens for result in results],
        "budgets": [result.scalars["memory/actor_train/token_budget"] for result in results],
        "before": np.concatenate(before)[np.argsort(places)],
        "after": np.concatenate(after)[np.argsort(places)],
    }


def _child(sender: Connection, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cuda"}
    try:
        sender.send(call(*arguments))
    except BaseException:
        sender.send(traceback.format_exc())


def alone(*arguments: Any) -> Any:
    """Run `train` in a new process, so that no state of DeepSpeed or of compiled code remains for the next call."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, train, arguments))
    process.start()
    sender.close()
    try:
        assert receiver.poll(limits.START), "no result in time"
        result = receiver.recv()
    finally:
        process.kill()
        process.join()
    assert isinstance(result, dict), result
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with heads of size 64, which FlashAttention supports."""
    from benchmarks.models import write

    folder = tmp_path_factory.mktemp("models") / "tiny"
    write(folder, "tiny")
    return folder


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[bool, dict[str, Any]]:
    """Return the results of uncompiled training with ZeRO-1 and all layers recomputed. Key: whether LoRA is used."""
    keys = {"gradient_checkpointing": "all", "compile_layers": False}
    return {lora: alone(model, 1, lora, 4096, None, keys) for lora in (False, True)}


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that two results agree within bf16's precision."""
    np.testing.assert_allclose(got["grad_norms"], expected["grad_norms"], rtol=0.03)
    np.testing.assert_allclose(got["losses"], expected["losses"], atol=0.01)
    assert np.abs(got["before"] - expected["before"]).mean() < 0.01
    assert np.abs(got["after"] - expected["after"]).mean() < 0.02


CASES = [
    (stage, lora, checkpointing, compiled)
    for stage in (1, 2, 3)
    for lora in (False, True)
    for checkpointing, compiled in (("auto", True), ("none", False), (2, True))
]


@pytest.mark.parametrize(("stage", "lora", "checkpointing", "compiled"), CASES)
def test_stage_recomputation_and_compilation_change_nothing(
    model: Path, plain: dict[bool, dict[str, Any]], stage: int, lora: bool, checkpointing: str | int, compiled: bool
) -> None:
    keys = {"gradient_checkpointing": checkpointing, "compile_layers": compiled}
    got = alone(model, stage, lora, 4096, None, keys)
    assert_same(got, plain[lora])
    assert got["budgets"] == [4096] * 3
    assert np.abs(got["after"] - got["before"]).mean() > 1e-4


@pytest.mark.parametrize("stage", [1, 3])
def test_out_of_memory_halves_budget_without_changing_training(
    model: Path, plain: dict[bool, dict[str, Any]], stage: int
) -> None:
    keys = {"gradient_checkpointing": "none", "compile_layers": False}
    got = alone(model, stage, True, 16384, 0.3, keys)
    assert got["budgets"][0] < 16384
    assert got["budgets"] == sorted(got["budgets"], reverse=True)
    assert_same(got, plain[True])
