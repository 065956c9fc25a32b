"""Sums of token metrics over the micro-batches of a step, kept on the device and read once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from roll.algorithms.losses import Counted
from roll.strategies.base import TrainResult
from roll.types import Metrics

WITHIN = ("mismatch/logprob_abs_diff_mean", "mismatch/kl")
"""Prefix of metrics of responses that one version sampled."""
SPANNING = ("mismatch/spanning/logprob_abs_diff_mean", "mismatch/spanning/kl")
"""Prefix of metrics of responses that several versions sampled."""


class MetricSums:
    """Adds up metrics without waiting for the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counted: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._tokens = 0

    def add(self, metrics: Mapping[str, Tensor], tokens: int) -> None:
        """Add token metrics [S] of a micro-batch with S = `tokens` response tokens."""
        for name, values in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + values.sum(dtype=torch.float64)
        self._tokens += tokens

    def count(self, metrics: Mapping[str, Counted]) -> None:
        """Add metrics of some of a micro-batch's tokens, sequences or pairs."""
        for name, (values, counts_in) in metrics.items():
            self._counted[name] = self._counted.get(name, 0.0) + torch.where(counts_in, values, 0.0).sum(dtype=torch.float64)
            self._counts[name] = self._counts.get(name, 0.0) + counts_in.sum(dtype=torch.float64)

    def weigh(self, metrics: Mapping[str, Tensor], tokens: int) -> None:
        """Add scalars of a micro-batch, weighted by its tokens including prompts."""
        for name, value in metrics.items():
            self._counted[name] = self._counted.get(name, 0.0) + value.double() * tokens
            self._counts[name] = self._counts.get(name, 0.0) + torch.full_like(value, tokens, dtype=torch.float64)

    def add_mismatch(self, difference: Tensor, current: Tensor, spanning: Tensor) -> None:
        """Add metrics of the trainer's log-probs against the engine's.

        Args:
            difference: [S], log-probs of the trainer minus those of the engine; the KL is k3 of engine against trainer.
            current: bool [S], tokens that the current version sampled; the others are left out.
            spanning: bool [S], tokens of responses that several versions sampled: the engine may have kept what an older version
                computed of the tokens before.
        """
        compared = torch.where(current, difference.double(), 0.0)
        values = (compared.abs(), torch.expm1(compared) - compared)
        for names, chosen in ((WITHIN, current & ~spanning), (SPANNING, current & spanning)):
            self.count({name: (value, chosen) for name, value in zip(names, values, strict=True)})

    def result(self, scalars: Metrics) -> TrainResult:
        """Return all sums, copied to the host at once."""
        tables = (self._sums, self._counted, self._counts)
        there = [value for table in tables for value in table.values()]
        values = iter(torch.stack(there).tolist() if there else [])
        sums, counted, counts = ({name: next(values) for name in table} for table in tables)
        return TrainResult(sums, self._tokens, scalars, counted, counts)
