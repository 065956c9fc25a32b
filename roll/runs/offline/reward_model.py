"""Wires the training of reward models into the offline loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from roll.algorithms.losses import Loss
from roll.algorithms.ranking import BradleyTerry
from roll.config.schema.offline import RewardModelConfig
from roll.data.example_batch import given_batch
from roll.data.examples import Example, ExampleSequence
from roll.models.score import load_scores, pad_token, scored_token
from roll.runs.offline.batches import Models
from roll.runs.offline.wiring import OfflinePipeline, prepare_rows
from roll.runs.role_models import model_path
from roll.runs.run_context import PreparedRun
from roll.types import Metrics, TrainBatch


def prepare_reward_model(config: RewardModelConfig) -> PreparedRun:
    """Check the model's files and prepare all pairs. Return the loop, ready to run.

    Raises:
        BadInput: the model or the data cannot be used.
    """
    rows = prepare_rows(config, "pairs")
    model_args = config.reward_train.model_args
    pad = pad_token(model_path(config, model_args), model_args)
    return OfflinePipeline(rows, partial(reward_model_batch, pad), reward_model_metrics, load_scores).prepared(config)


async def reward_model_batch(pad: int | None, examples: Sequence[Example], models: Models) -> tuple[TrainBatch, Loss]:
    """Return the batch of the pairs and its loss. The batch marks the token of each sequence at which its score is
    read.
    """
    scored = [
        replace(example, sequences=tuple(_scored(sequence, pad) for sequence in example.sequences))
        for example in examples
    ]
    return given_batch(scored), BradleyTerry()


def _scored(sequence: ExampleSequence, pad: int | None) -> ExampleSequence:
    return ExampleSequence(sequence.token_ids, scored_token(sequence.token_ids, pad))


def reward_model_metrics(name: str, metrics: Metrics) -> Metrics:
    """Return the validation metrics: the loss, and the accuracy and the reward margin of the chosen response."""
    return {
        f"val/{name}/loss": metrics["reward_model/loss"],
        f"val/{name}/accuracy": metrics["reward_model/accuracy"],
        f"val/{name}/reward_margin": metrics["reward_model/margin"],
    }
