"""Builds the inputs of a loss from a micro-batch: the fields of its response tokens, on the device."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from roll.algorithms.losses import LossInputs
from roll.models.packed_inputs import scored_only, to_device
from roll.types import Bools, Floats, TrainBatch


def loss_inputs(batch: TrainBatch, device: str) -> LossInputs:
    """Return the fields of the batch at its S response tokens, in the order of the model's outputs."""

    def scored(field: Floats) -> Tensor:
        return scored_only(field, batch.sequences, device)

    def if_given(field: Floats | None) -> Tensor | None:
        return None if field is None else scored(field)

    mask = batch.sequences.response_mask
    lengths = np.add.reduceat(mask, batch.sequences.offsets[:-1], dtype=np.int64)
    return LossInputs(
        advantages=scored(batch.advantages),
        lengths=to_device(lengths, device),
        behaviour_log_probs=if_given(batch.behaviour_log_probs),
        proximal_log_probs=if_given(batch.proximal_log_probs),
        ref_log_probs=if_given(batch.ref_log_probs),
        token_selection=None if batch.token_selection is None else to_device(batch.token_selection[mask], device),
        labels=None if batch.labels is None else to_device(batch.labels, device),
        values=if_given(batch.values),
        returns=if_given(batch.returns),
    )


def spans_update(batch: TrainBatch) -> Bools:
    """Return a mask [S] of the response tokens whose sequence was sampled by more than one version of the policy."""
    mask, starts = batch.sequences.response_mask, batch.sequences.offsets[:-1]
    lowest = np.minimum.reduceat(np.where(mask, batch.policy_versions, np.iinfo(np.int32).max), starts)
    highest = np.maximum.reduceat(np.where(mask, batch.policy_versions, np.iinfo(np.int32).min), starts)
    return np.repeat(lowest < highest, batch.sequences.lengths)[mask]
