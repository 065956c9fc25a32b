"""Skips updates with a non-finite loss or gradient on all ranks, and reports where the non-finite value came from.

Gradients are reduced over ranks, so a non-finite gradient reaches every rank. DeepSpeed detects it in the gradient norm
and skips the step before weights, optimizer states or the schedule change. DeepSpeed does not detect a non-finite loss
with finite gradients, so this module makes its gradients non-finite. It also verifies that DeepSpeed did skip the
update. The host waits for the device only after a skipped update and at the end of a training step.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roll.backend import MicroBatch, Rank
from roll.errors import NonFiniteError

LOG = logging.getLogger(__name__)
LOSS = "loss"


@dataclass(frozen=True, order=True)
class Culprit:
    """The first non-finite value of a skipped update."""

    micro_batch: int
    """Index of the micro-batch in the rank's update, starting at 0."""
    rank: int
    what: str
    """`loss`, or the name of the parameter whose gradient was the first non-finite one in the backward pass."""
    samples: tuple[int, ...]
    """Positions of the micro-batch's sequences in the step's batch."""

    def __str__(self) -> str:
        what = "the loss" if self.what == LOSS else f"the gradient of {self.what}"
        of = f"samples {', '.join(map(str, self.samples))} of the step" if self.samples else "a filler without samples"
        return f"{what} is not finite in micro-batch {self.micro_batch} of rank {self.rank} ({of})"


@dataclass(frozen=True)
class _Seen:
    """A micro-batch's loss and sums of gradients, on the device. A non-finite term makes its sum non-finite."""

    samples: tuple[int, ...]
    names: tuple[str, ...]
    values: Tensor


def exchange(found: Culprit | None, device: str) -> list[Culprit | None]:
    """Return every rank's `found`. Collective.

    It travels as JSON: torch's exchange of objects unpickles what arrives, and so could execute it.

    Raises:
        ValueError: a rank sent something else.
    """
    text = json.dumps(None if found is None else astuple(found)).encode()
    sizes = gathered(torch.tensor([len(text)], device=device))
    longest = max(int(size) for size in sizes)
    texts = gathered(torch.tensor(list(text.ljust(longest)), dtype=torch.uint8, device=device))
    return [read_culprit(json.loads(bytes(row.tolist()))) for row in texts]


def gathered(own: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks, which have the same shape. Collective."""
    everyone = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everyone, own)
    return everyone


def read_culprit(parts: Any) -> Culprit | None:
    """Build the culprit that another rank sent. Raises ValueError if it sent none."""
    match parts:
        case None:
            return None
        case [int() as micro_batch, int() as rank, str() as what, list() as samples] if all(
            isinstance(sample, int) for sample in samples
        ):
            return Culprit(micro_batch, rank, what, tuple(samples))
    raise ValueError("a rank sent no description of a value that is not finite")


class FiniteWatch:
    """Records the losses of a trainer, and its gradients before they are reduced."""

    def __init__(self, model: nn.Module, rank: Rank, max_consecutive: int) -> None:
        """Watch `model`'s trained parameters. `max_consecutive` skipped updates in a row are an error; 0: no limit."""
        self._rank, self._max_consecutive = rank, max_consecutive
        self._loss: Tensor | None = None
        self._sums: list[tuple[str, Tensor]] = []
        self._seen: list[_Seen] = []
        self._applied: list[Tensor] = []
        self._in_a_row = 0
        self._first: str = ""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def note(gradient: Tensor) -> None:
            self._sums.append((name, gradient.detach().sum(dtype=torch.float32)))

        return note

    def loss(self, value: Tensor) -> Tensor:
        """Record a micro-batch's loss. Return it; if it is non-finite, changed to make all gradients so."""
        self._sums.clear()
        self._loss = value.detach().float()
        return value * torch.where(torch.isfinite(value.detach()), 1.0, torch.nan)

    def ran(self, micro_batch: MicroBatch) -> None:
        """Record the end of the micro-batch's backward pass."""
        assert self._loss is not None, "`loss` was not called before the backward pass"
        names, sums = (LOSS, *(name for name, _ in self._sums)), [self._loss, *(each for _, each in self._sums)]
        self._seen.append(_Seen(micro_batch.samples, names, torch.stack(sums)))
        self._sums.clear()

    def settle(self, skipped: bool) -> None:
        """Record the end of the update, on all ranks with the same `skipped`. Raises NonFiniteError for too many."""
        seen, self._seen = self._seen, []
        if not skipped:
            self._applied += [torch.isfinite(each.values).all() for each in seen]
            self._in_a_row = 0
            return
        reason = str(
            self._culprit(seen) or "every micro-batch is finite, but the sum of their gradients over the update is not"
        )
        self._first = self._first if self._in_a_row else reason
        self._in_a_row += 1
        if self._rank.rank == 0:
            LOG.warning("%s: an update was skipped: %s", self._rank.role, reason)
        if self._in_a_row == self._max_consecutive:
            raise NonFiniteError(f"{self._in_a_row} updates in a row were skipped; the first because {self._first}")

    def check(self) -> None:
        """Check that all applied updates were finite, and wait for the device. Raises NonFiniteError if not."""
        applied, self._applied = self._applied, []
        if applied and not bool(torch.stack(applied).all()):
            raise NonFiniteError(
                "DeepSpeed made an update with a gradient that is not finite; resume from an earlier checkpoint"
            )

    def _culprit(self, seen: Sequence[_Seen]) -> Culprit | None:
        """Return the first non-finite value over all ranks. Collective; the result is the same on all ranks."""
        found = self._first_here(seen)
        if self._rank.world_size == 1:
            return found
        return min((each for each in exchange(found, self._rank.device) if each is not None), default=None)

    def _first_here(self, seen: Sequence[_Seen]) -> Culprit | None:
        for number, each in enumerate(seen):
            finite = torch.isfinite(each.values).tolist()
            if not all(finite):
                return Culprit(number, self._rank.rank, each.names[finite.index(False)], each.samples)
        return None
