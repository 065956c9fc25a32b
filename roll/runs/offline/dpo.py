"""Wires preference optimisation into the offline loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from roll.algorithms.losses import Loss
from roll.algorithms.preference import LABELLED_LOSSES, PAIR_OBJECTIVES, Kto, Mixture, PreferenceLoss
from roll.config.derived.methods import added_losses
from roll.config.plan.plan import Plan
from roll.config.schema.offline import DpoConfig
from roll.data.example_batch import given_batch, mismatched
from roll.data.examples import Example
from roll.runs.offline.batches import Models
from roll.runs.offline.wiring import OfflinePipeline, OtherModel, prepare_rows
from roll.runs.role_models import check_same_tokens
from roll.runs.roles import Roles
from roll.runs.run_context import PreparedRun
from roll.training.actor_train import ActorTrain
from roll.types import Metrics, Sequences, TrainBatch


def prepare_dpo(config: DpoConfig) -> PreparedRun:
    """Check the models' files and prepare all rows. Return the loop, ready to run.

    Raises:
        BadInput: a model or the data cannot be used.
    """
    if config.reference:
        check_same_tokens(config, config.actor_train.model_args, config.reference.model_args, "reference")
    rows = prepare_rows(config, config.preference_loss.traits.rows)
    make = partial(dpo_batch, preference_loss(config))
    return OfflinePipeline(rows, make, dpo_metrics, other_model=partial(reference_model, config)).prepared(config)


def reference_model(config: DpoConfig, plan: Plan, roles: Roles, actor_train: ActorTrain) -> OtherModel | None:
    """Return the reference: a separate role, or the policy with its adapter off. Return None if the loss does not use a
    reference.
    """
    beforehand = config.reference_log_probs == "precomputed"
    match plan.reference:
        case "role":
            assert config.reference is not None
            scorer = roles.score("reference", config.reference, temperature=1.0)
            return OtherModel("reference", part="reference", ask=scorer.ref_log_probs, beforehand=beforehand)
        case "unused":
            return None
        case _:
            return OtherModel("actor_train", part="reference", ask=actor_train.ref_log_probs, beforehand=beforehand)


async def dpo_batch(loss: Loss, examples: Sequence[Example], models: Models) -> tuple[TrainBatch, Loss]:
    """Return the batch and its loss. Add the reference's log-probs if the loss uses them, and the estimate of the KL
    for KTO.
    """
    batch = given_batch(examples)
    if isinstance(loss, Kto):
        loss = replace(loss, kl=await kto_kl(mismatched(examples), models))
    if models.other is None:
        return batch, loss
    return replace(batch, ref_log_probs=await models.other(batch.sequences)), loss


async def kto_kl(sequences: Sequences, models: Models) -> float:
    """Return KTO's estimate of the KL, at least 0: the mean log-ratio of policy to reference on mismatched responses,
    in nats.
    """
    assert models.other is not None, "KTO needs a reference"
    log_ratio = await models.log_probs(sequences) - await models.other(sequences)
    return max(0.0, float(log_ratio.sum(dtype=np.float64)) / len(sequences))


def preference_loss(config: DpoConfig) -> Loss:
    """Return the loss that the configuration names, with its arguments."""
    method = config.preference_loss
    if method.traits.rows == "labelled":
        return LABELLED_LOSSES[method.name](**method.arguments(config))
    first = PAIR_OBJECTIVES.find(method.name)(**method.arguments(config), **config.preference_loss_args)
    added = added_losses(config).items()
    others = tuple((weight, PAIR_OBJECTIVES[other.name](**other.arguments(config))) for other, weight in added)
    return PreferenceLoss(Mixture(first, others) if others else first)


def dpo_metrics(name: str, metrics: Metrics) -> Metrics:
    """Return the validation metrics: the loss, and for pairs also the accuracy and the reward margin of the chosen
    response.
    """
    found = {f"val/{name}/loss": metrics["dpo/loss"]}
    if "dpo/accuracy" in metrics:
        found |= {
            f"val/{name}/accuracy": metrics["dpo/accuracy"],
            f"val/{name}/reward_margin": metrics["dpo/reward_margin"],
        }
    return found
