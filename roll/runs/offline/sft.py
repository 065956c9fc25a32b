"""Wires SFT into the offline loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.algorithms.losses import Loss, NegativeLogLikelihood
from roll.config.schema.offline import SftConfig
from roll.data.example_batch import given_batch
from roll.data.examples import Example
from roll.runs.offline.batches import Models
from roll.runs.offline.wiring import OfflinePipeline, prepare_rows
from roll.runs.run_context import PreparedRun
from roll.types import Metrics, TrainBatch


def prepare_sft(config: SftConfig) -> PreparedRun:
    """Check the model's files and prepare all examples. Return the loop, ready to run.

    Raises:
        BadInput: the model or the data cannot be used.
    """
    kind = "turns" if config.loss_on == "assistant" else "responses"
    rows = prepare_rows(config, kind, learn_all=config.loss_on == "all")
    return OfflinePipeline(rows, sft_batch, sft_metrics).prepared(config)


async def sft_batch(examples: Sequence[Example], models: Models) -> tuple[TrainBatch, Loss]:
    """Return the batch of the rows and its loss, without using other models."""
    return given_batch(examples), NegativeLogLikelihood()


def sft_metrics(name: str, metrics: Metrics) -> Metrics:
    """Return the validation metrics: the cross-entropy in nats per token, and the perplexity."""
    loss = metrics["sft/loss"]
    return {f"val/{name}/loss": loss, f"val/{name}/perplexity": float(np.exp(loss))}
