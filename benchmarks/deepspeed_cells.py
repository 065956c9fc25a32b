"""One cell of the DeepSpeed matrix: a loss curve of roll's trainer on this rank, and the same by plain PyTorch in float64."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from roll.algorithms.losses import Loss, LossInputs, NegativeLogLikelihood
from roll.algorithms.policy_loss import PolicyLoss
from roll.config.schema_engine import DeepSpeedConfig
from roll.config.schema_model import ModelArgs, TrainingArgs
from roll.data import packing
from roll.models.load import add_lora, load_causal_model
from roll.strategies.base import Rank
from roll.strategies.deepspeed_optimizers import Place, make_optimizer
from roll.strategies.deepspeed_train import DeepSpeedTrain, TrainSettings
from roll.types import TrainBatch
from roll.workers.actor_train import TrainShape, merge, micro_batches_of

UPDATES = 6
SEQUENCES, TOKEN_BUDGET = 4, 24
SEED, LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM = 3, 2e-3, 0.1, 0.5
LOSSES: dict[str, tuple[Loss, str]] = {
    "rlvr": (PolicyLoss(kl_coef=0.05, entropy_coef=0.01), "policy/loss"),
    "sft": (NegativeLogLikelihood(), "sft/loss"),
}
"""By pipeline: the loss, and the metric that makes the curve."""


@dataclass(frozen=True)
class Cell:
    """One way to train."""

    pipeline: str
    stage: int
    offload: str
    """`none`; `optimizer`; `all`, parameters too."""
    dtype: str
    lora: bool
    optimizer: str = "adamw"


def batches() -> list[TrainBatch]:
    """One for each update: two that take turns."""
    out = []
    for seed in (0, 1):
        generator = np.random.default_rng(seed)
        lengths = generator.integers(6, 16, SEQUENCES).tolist()
        ids = [generator.integers(0, 250, length).astype(np.int32) for length in lengths]
        sequences = packing.concatenate(ids, [np.arange(length) >= 2 for length in lengths])
        mask = sequences.response_mask
        advantages, behaviour, ref = (np.where(mask, generator.normal(mean, 0.5, len(mask)), 0) for mean in (0, -6, -6))
        versions = np.zeros(len(mask), np.int32)
        fields = (advantages.astype(np.float32), behaviour.astype(np.float32), versions, ref.astype(np.float32))
        out.append(TrainBatch(sequences, *fields))
    return [out[number % 2] for number in range(UPDATES)]


def model_args(cell: Cell) -> ModelArgs:
    """Of the policy."""
    keys = {"dtype": cell.dtype, "lora_target": "all-linear" if cell.lora else None, "lora_rank": 4}
    return ModelArgs.model_validate(keys)


def training_args(cell: Cell) -> TrainingArgs:
    """The optimizer and its schedule."""
    keys = {"learning_rate": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "optimizer": cell.optimizer, "lr_scheduler_type": "cosine"}
    return TrainingArgs.model_validate(keys | {"warmup_steps": 1, "adam_epsilon": 1e-6})


def trained(cell: Cell, model: Path, rank: Rank) -> list[float]:
    """The curve by DeepSpeed, the same on every rank. The process group stays for the next cell."""
    zero: dict[str, Any] = {"stage": cell.stage}
    if cell.stage == 3:
        zero["stage3_param_persistence_threshold"] = 0  # shard tensors as small as these too
    if cell.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if cell.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    config = DeepSpeedConfig.model_validate({"zero_optimization": zero})
    settings = TrainSettings(
        str(model),
        model_args(cell),
        training_args(cell),
        config,
        MAX_GRAD_NORM,
        total_updates=UPDATES,
        token_budget=TOKEN_BUDGET,
        seed=SEED,
    )
    loss, metric = LOSSES[cell.pipeline]
    shape = TrainShape(1, 1, TOKEN_BUDGET, "token-mean", temperature=1.0)
    strategy, curve = DeepSpeedTrain(settings, rank), []
    for number, batch in enumerate(batches()):
        mine = micro_batches_of(batch, range(len(batch)), rank.world_size, shape)[rank.rank]
        everyone: list[Any] = [None] * rank.world_size
        torch.distributed.all_gather_object(everyone, strategy.train_step([mine], loss, 1.0, number))
        curve.append(merge(everyone)[metric])
    with mock.patch.object(torch.distributed, "destroy_process_group"):
        strategy.close()
    del strategy
    gc.collect()
    return curve


def plain(cell: Cell, model: Path) -> list[float]:
    """The same curve in one process, in float64, from transformers' logits. ZeRO, offload and precision of the cell play no part."""
    arguments = model_args(cell).model_copy(update={"dtype": "fp32"})
    loaded = load_causal_model(str(model), arguments, packed=False)
    causal = (add_lora(loaded, arguments, SEED) if cell.lora else loaded).double()
    trains = [parameter for parameter in causal.parameters() if parameter.requires_grad]
    optimizer = _optimizer(cell, causal, trains)
    peaks = copy.copy([group["lr"] for group in optimizer.param_groups])
    loss, metric = LOSSES[cell.pipeline]
    curve = []
    for number, batch in enumerate(batches()):
        share = (
            0.0 if number == 0 else 0.5 * (1 + np.cos(np.pi * (number - 1) / (UPDATES - 1)))
        )  # one update of warm-up, then half a cosine
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * share
        said = loss(*_statistics(causal, batch), _inputs(batch))
        optimizer.zero_grad()
        said.losses.mean().backward()
        nn.utils.clip_grad_norm_(trains, MAX_GRAD_NORM)
        optimizer.step()
        curve.append(float(said.metrics[metric].mean()))
    return curve


def _optimizer(cell: Cell, causal: nn.Module, trains: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's AdamW with its groups written out; another one as roll makes it, alone and without ZeRO."""
    if cell.optimizer != "adamw":
        return make_optimizer(causal, training_args(cell), Place(Rank("oracle", 0, 1, "", 0, "cpu", 1.0), stage=0, offloaded=False))
    groups = [
        {"params": [parameter for parameter in trains if parameter.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [parameter for parameter in trains if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=LEARNING_RATE, eps=1e-6)


def _statistics(causal: nn.Module, batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [S] of the response tokens, a sequence at a time."""
    sequences, log_probs, entropies = batch.sequences, [], []
    for begin, end in zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True):
        ids = torch.from_numpy(sequences.token_ids[begin:end]).long()
        log_p = causal(input_ids=ids[None]).logits[0].log_softmax(-1)
        where = torch.from_numpy(np.flatnonzero(sequences.response_mask[begin:end]))
        log_probs.append(log_p[where - 1].gather(1, ids[where][:, None])[:, 0])
        entropies.append(-(log_p[where - 1].exp() * log_p[where - 1]).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def _inputs(batch: TrainBatch) -> LossInputs:
    mask, offsets = batch.sequences.response_mask, batch.sequences.offsets
    assert batch.behaviour_log_probs is not None and batch.ref_log_probs is not None
    fields = [torch.from_numpy(field[mask]).double() for field in (batch.advantages, batch.behaviour_log_probs, batch.ref_log_probs)]
    lengths = torch.from_numpy(np.add.reduceat(mask, offsets[:-1], dtype=np.int64))
    return LossInputs(fields[0], lengths, fields[1], ref_log_probs=fields[2])
