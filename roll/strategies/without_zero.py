"""bf16 and fp16 without ZeRO, where DeepSpeed 0.19 leaves two things undone that its ZeRO optimizers do."""

from __future__ import annotations

from typing import Any


def undo_first_step(engine: Any) -> None:
    """Leave the optimizer as it was before DeepSpeed made its states by a step of its own.

    That step has gradients of zero but counts: Adam would correct its moments for one update too many. The states go, to be made
    by the first true step, and the master weights are the model's again, not decayed.
    """
    if _is_wrapped(engine):
        engine.optimizer.optimizer.state.clear()
        engine.optimizer.refresh_fp32_params()


def missing_scale(engine: Any) -> float:
    """What a loss is to be multiplied by before `engine.backward`, and the reported norm of gradients divided by.

    fp16's loss scale, by which `step` divides gradients, though `backward` multiplies losses by it for ZeRO's optimizers alone; 1 with
    those, and in other precisions.
    """
    return float(engine.optimizer.loss_scale) if _is_wrapped(engine) else 1.0


def _is_wrapped(engine: Any) -> bool:
    """Whether master weights lie in DeepSpeed's `FP16_UnfusedOptimizer`, which serves bf16, too."""
    return hasattr(engine.optimizer, "loss_scale_config")
