"""Makes DeepSpeed 0.19 without ZeRO, in bf16 and fp16, behave like its ZeRO optimizers in two respects."""

from __future__ import annotations

from typing import Any


def undo_first_step(engine: Any) -> None:
    """Undo the step that DeepSpeed takes while building the engine, to create the optimizer states.

    That step has zero gradients but counts as an update: Adam's bias correction would be one step ahead, and weight decay has changed the
    master weights. This function clears the states, so that the first real step creates them, and copies the model's weights to the
    master weights.
    """
    if _is_wrapped(engine):
        engine.optimizer.optimizer.state.clear()
        engine.optimizer.refresh_fp32_params()


def missing_scale(engine: Any) -> float:
    """Return the factor by which to multiply losses before `engine.backward`, and to divide the reported gradient norm.

    In fp16 without ZeRO this is the loss scale: `step` divides gradients by it, but `backward` multiplies losses by it only with ZeRO's
    optimizers. With these optimizers, and in other precisions, the factor is 1.
    """
    return float(engine.optimizer.loss_scale) if _is_wrapped(engine) else 1.0


def _is_wrapped(engine: Any) -> bool:
    """Return whether the optimizer is DeepSpeed's `FP16_UnfusedOptimizer`, which holds master weights for fp16 and also for bf16."""
    return hasattr(engine.optimizer, "loss_scale_config")
