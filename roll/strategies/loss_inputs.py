"""From a micro-batch to what a loss sees of it: the fields of its response tokens, on the device."""

from __future__ import annotations

from torch import Tensor

from roll.algorithms.losses import LossInputs
from roll.models.packed_inputs import scored_only
from roll.types import Floats, TrainBatch


def loss_inputs(batch: TrainBatch, device: str) -> LossInputs:
    """The batch's fields at its S response tokens, in the order in which the policy scores them."""

    def scored(field: Floats) -> Tensor:
        return scored_only(field, batch.sequences, device)

    def if_given(field: Floats | None) -> Tensor | None:
        return None if field is None else scored(field)

    return LossInputs(
        advantages=scored(batch.advantages),
        behaviour_log_probs=if_given(batch.behaviour_log_probs),
        ref_log_probs=if_given(batch.ref_log_probs),
        proximal_log_probs=if_given(batch.proximal_log_probs),
    )
