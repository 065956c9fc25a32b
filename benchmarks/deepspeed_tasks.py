"""The tasks of the DeepSpeed matrix: loss, metric of the curve, model and batches of each pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.deepspeed_table import Cell
from roll.algorithms.divergence import Distillation
from roll.algorithms.losses import Loss, NegativeLogLikelihood, ValueLoss
from roll.algorithms.objectives import PolicyLoss
from roll.algorithms.preference import BradleyTerry, Dpo, PreferenceLoss
from roll.config.schema.model import ModelConfig, TrainingConfig
from roll.data import packing
from roll.types import TrainBatch

UPDATES = 6
EXAMPLES, TOKEN_BUDGET = 4, 24
"""Number of responses or pairs per update, and largest number of tokens per micro-batch."""
SEED, LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM = 3, 2e-3, 0.1, 0.5


@dataclass(frozen=True)
class Task:
    """The loss of a pipeline."""

    loss: Loss
    metric: str
    """Metric of the loss curve."""
    loss_agg_mode: str
    sequences_per_example: int = 1
    """Number of sequences in an example: 2 for pairs."""


TASKS = {
    "rlvr": Task(PolicyLoss(kl_coef=0.05, entropy_coef=0.01), "policy/loss", "token-mean"),
    "critic": Task(ValueLoss(clip=0.5), "critic/loss", "token-mean"),
    "sft": Task(NegativeLogLikelihood(), "sft/loss", "token-mean"),
    "dpo": Task(PreferenceLoss(Dpo()), "dpo/loss", "seq-mean-token-mean", sequences_per_example=2),
    "reward_model": Task(BradleyTerry(), "reward_model/loss", "seq-mean-token-mean", sequences_per_example=2),
    "distill": Task(Distillation(0.75), "distill/loss", "token-mean"),
}


@dataclass(frozen=True)
class Folders:
    """Folders of the models and of the swap files."""

    model: Path
    teacher: Path
    """Teacher of `distill`: the same model with other random weights."""
    swap: Path
    """Folder for the offload `nvme`."""


def batches(pipeline: str) -> list[TrainBatch]:
    """Return two batches that alternate. The reference's log-probs for `dpo` and the teacher's states are not in them
    yet.
    """
    sequences_per_example, out = TASKS[pipeline].sequences_per_example, []
    for seed in (0, 1):
        generator = np.random.default_rng(seed)
        lengths = generator.integers(
            *((6, 16) if sequences_per_example == 1 else (5, 12)), EXAMPLES * sequences_per_example
        ).tolist()
        ids = [generator.integers(0, 250, length).astype(np.int32) for length in lengths]
        learnt_from = [length - 1 if pipeline == "reward_model" else 2 for length in lengths]
        sequences = packing.concatenate(
            ids, [np.arange(len(row)) >= first for row, first in zip(ids, learnt_from, strict=True)]
        )
        mask = sequences.response_mask
        advantages, behaviour, ref, values, returns = (
            np.where(mask, generator.normal(mean, 0.5, len(mask)), 0).astype(np.float32) for mean in (0, -6, -6, 0, 1)
        )
        versions, margins = np.zeros(len(mask), np.int32), np.full(len(lengths), 0.5, np.float32)
        out.append(
            TrainBatch(
                sequences,
                advantages,
                behaviour,
                versions,
                ref,
                labels=margins,
                sequences_per_example=sequences_per_example,
                values=values,
                returns=returns,
            )
        )
    return out


def model_args(cell: Cell) -> ModelConfig:
    """Return the keys of the trained model. Layers are not compiled, because that would take longer than the
    training.
    """
    keys = {
        "dtype": cell.dtype,
        "lora_target": "all-linear" if cell.lora else None,
        "lora_rank": 4,
        "lora_alpha": 16.0,
        "compile_layers": False,
    }
    return ModelConfig.model_validate(keys)


def training_args(cell: Cell) -> TrainingConfig:
    """Return the keys of the optimizer and its schedule."""
    keys = {
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "optimizer": cell.optimizer,
        "lr_scheduler_type": "cosine",
    }
    return TrainingConfig.model_validate(keys | {"warmup_steps": 1, "adam_epsilon": 1e-6})
