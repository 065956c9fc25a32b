"""Code that `test_nvme.py` runs on each rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from roll.backend import Rank
from roll.training.deepspeed.settings import DeepSpeedConfig
from tests.engines.elastic import Trained, checkpoint_of, continue_training
from tests.engines.training import LOSS, SEED, TEMPERATURE, VERSION, Case, Work, settings, trainer_of


def swap_folder(folder: Path) -> Path:
    """Return the folder that takes the place of an NVMe device."""
    return folder / "nvme"


def train_or_resume(
    rank: Rank, cases: Sequence[Case], model: Path, works: Sequence[Work], folder: Path, resumes: bool
) -> list[Trained]:
    """For each case, make one update and save a checkpoint, or load that checkpoint if `resumes`; then make three more
    updates.
    """
    place = {"device": "nvme", "nvme_path": str(swap_folder(folder)), "buffer_count": 5}
    zero = {"stage": 3, "offload_optimizer": place, "offload_param": place | {"buffer_size": 10**6}}
    out = []
    for case in cases:
        chosen = settings(case, model, SEED + 1 if resumes else SEED)
        chosen = dataclasses.replace(chosen, deepspeed=DeepSpeedConfig.model_validate({"zero_optimization": zero}))
        checkpoint = checkpoint_of(folder, case)
        with trainer_of(chosen, rank) as strategy:
            if resumes:
                strategy.load(checkpoint)
            else:
                checkpoint.mkdir(parents=True, exist_ok=True)
                strategy.train_step(works[rank.rank].first, LOSS, TEMPERATURE, VERSION)
                strategy.save(checkpoint)
            out.append(continue_training(strategy, case, works[rank.rank], folder))
    torch.distributed.destroy_process_group()
    return out
