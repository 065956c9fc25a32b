"""Ranges outside of which a number is legal, but hardly ever meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

USUAL: Mapping[str, tuple[float, float]] = {
    "learning_rate": (0, 0.1),
    "lora_learning_rate": (0, 0.1),
    "loraplus_lr_ratio": (1, 1000),
    "weight_decay": (0, 1),
    "warmup_steps": (0, 1e6),
    "per_device_train_batch_size": (0, 65536),
    "gradient_accumulation_steps": (0, 65536),
    "num_train_epochs": (0, 10000),
    "rollout_batch_size": (0, 65536),
    "num_return_sequences_in_group": (0, 4096),
    "updates_per_step": (0, 4096),
    "ppo_epochs": (0, 100),
    "prompt_length": (0, 1 << 22),
    "response_length": (0, 1 << 22),
    "sequence_length": (0, 1 << 22),
    "max_length": (0, 1 << 22),
    "async_generation_ratio": (0, 100),
    "max_turns": (0, 10000),
    "temperature": (0, 10),
    "distill_temperature": (0, 100),
    "entropy_loss_coef": (-1, 1),
    "kl_loss_coef": (0, 10),
    "distill_loss_coef": (0, 1000),
    "beta": (0, 100),
}
"""Usual range of a key's value, bounds included, by the last name of the key's path."""


def plausible_warnings(values: Any, above: str = "") -> Iterator[str]:
    """Yield a warning for each number below `values`, as plain dicts, that is outside of its usual range."""
    if not isinstance(values, Mapping):
        return
    for key, value in values.items():
        place = f"{above}.{key}" if above else str(key)
        yield from plausible_warnings(value, place)
        if key in USUAL and isinstance(value, int | float) and not USUAL[key][0] <= value <= USUAL[key][1]:
            low, high = USUAL[key]
            yield f"{place}: {value:g} is outside of the usual range, {low:g} to {high:g}; check it for a typing error"
