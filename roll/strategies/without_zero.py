"""Supplies two things for bf16 and fp16 without ZeRO that DeepSpeed 0.19 does only in its ZeRO optimizers."""

from __future__ import annotations

from typing import Any


def undo_first_step(engine: Any) -> None:
    """Restore the optimizer to the state before DeepSpeed's own step, which creates the optimizer states.

    That step has gradients of zero but counts: Adam would correct its moments for one update too many. The states go, to be made
    by the first true step, and the master weights are the model's again, not decayed.
    """
    if _is_wrapped(engine):
        engine.optimizer.optimizer.state.clear()
        engine.optimizer.refresh_fp32_params()


def missing_scale(engine: Any) -> float:
    """Return the factor for losses before `engine.backward`, which also divides the reported gradient norm.

    In fp16 this is the loss scale: `step` divides gradients by it, but `backward` multiplies losses by it only with ZeRO's
    optimizers. It is 1 with those, and in other precisions.
    """
    return float(engine.optimizer.loss_scale) if _is_wrapped(engine) else 1.0


def _is_wrapped(engine: Any) -> bool:
    """Whether master weights lie in DeepSpeed's `FP16_UnfusedOptimizer`, which serves bf16, too."""
    return hasattr(engine.optimizer, "loss_scale_config")
