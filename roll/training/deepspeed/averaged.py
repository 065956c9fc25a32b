"""An exponential moving average of the weights that a rank trains: the weights of a self-teacher.

      update, after each step:  average = (1 - rate) average + rate weights
      in_place, while scoring:  weights <- average; afterwards the weights are bitwise what they were

Each rank averages what it holds of a parameter: its partition under ZeRO-3, otherwise the whole. The average is fp32,
in host memory, so that it takes no room on a device and does not move with the role.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from roll.errors import CheckpointError
from roll.training.deepspeed.files import load


def averaged_file(folder: Path, rank: int) -> Path:
    """Return the path of the file with a rank's part of the average."""
    return folder / f"averaged_rank{rank}.pt"


class AveragedWeights:
    """The average of a model's trained parameters on one rank."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        """Start with the present weights. `rate` is the share of the newest weights, above 0 and at most 1."""
        self._trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._rate = rate
        self._average = {name: _to_host(held(one)) for name, one in self._trained.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Add the present weights to the average."""
        for name, parameter in self._trained.items():
            self._average[name].lerp_(_to_host(held(parameter)), self._rate)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the model has the averaged weights. Nothing may be trained or saved in it."""
        kept = {name: held(one).detach().to("cpu", copy=True) for name, one in self._trained.items()}
        try:
            self._write(self._average)
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        # Small parameters stay whole on all ranks under ZeRO-3. They must be gathered again from the new partitions.
        whole: list[Any] = [one for one in self._trained.values() if is_gathered(one)]
        if whole:
            whole[0].partition(param_list=whole)
        for name, parameter in self._trained.items():
            held(parameter).copy_(values[name])

    def save(self, folder: Path, rank: int) -> None:
        """Write the rank's part of the average."""
        torch.save(self._average, averaged_file(folder, rank))

    def load(self, folder: Path, rank: int) -> None:
        """Restore what `save` wrote on as many ranks.

        Raises:
            CheckpointError: the checkpoint has no average for this rank, or one of other parameters.
        """
        file = averaged_file(folder, rank)
        remedy = "resume with the teacher and the number of ranks that it was written with, or start a new run"
        if not file.is_file():
            raise CheckpointError(f"{folder} has no averaged weights of self_distillation for rank {rank}: {remedy}")
        saved: dict[str, Tensor] = load(file)
        shapes = {name: tuple(one.shape) for name, one in saved.items()}
        if shapes != {name: tuple(one.shape) for name, one in self._average.items()}:
            raise CheckpointError(f"{file} has averaged weights of other parameters, or other parts of them: {remedy}")
        self._average = saved


def held(parameter: Any) -> Tensor:
    """Return what this rank holds of a parameter: its partition under ZeRO-3, otherwise the whole parameter."""
    return parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter.data


def is_gathered(parameter: Any) -> bool:
    """Whether the parameter is partitioned, but whole on this rank at present."""
    return getattr(parameter, "ds_status", None) is ZeroParamStatus.AVAILABLE


def _to_host(values: Tensor) -> Tensor:
    return values.detach().to("cpu", torch.float32, copy=True)
