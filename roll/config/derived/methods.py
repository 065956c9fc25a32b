"""What follows from the chosen methods: the preference losses of a run, the correction with its bounds, the source of
the old log-probs in the ratios of the loss, and whether engines return log-probs. Pure functions of the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from roll.algorithms.methods import PREFERENCE_LOSSES, CorrectionTraits, Method, PreferenceTraits
from roll.config.derived.batch import plan_batch
from roll.config.schema.model import GeneratingConfig
from roll.config.schema.offline import DpoConfig
from roll.config.schema.rlvr import RlvrConfig


def added_losses(config: DpoConfig) -> Mapping[Method[PreferenceTraits], float]:
    """Return the losses of `added_preference_losses` with their weights, without unknown names."""
    return {
        PREFERENCE_LOSSES[name]: weight
        for name, weight in config.added_preference_losses.items()
        if name in PREFERENCE_LOSSES
    }


def compares(config: DpoConfig) -> bool:
    """Whether any of the losses needs a reference."""
    return any(method.traits.needs_reference for method in (config.preference_loss, *added_losses(config)))


BOUNDS = {"mismatch_cap": "cap", "mismatch_low": "low", "mismatch_high": "high"}
"""Fields of `CorrectionTraits`, by the key that sets them."""


def is_corrected(config: RlvrConfig) -> bool:
    """Whether the policy loss corrects for the mismatch between engine and trainer."""
    return config.mismatch_correction.name != "none"


def correction_of(config: RlvrConfig) -> CorrectionTraits | None:
    """Return the settings of the configured correction with its bounds, or None without a correction."""
    if not is_corrected(config):
        return None
    bounds = {"cap": config.mismatch_cap, "low": config.mismatch_low, "high": config.mismatch_high}
    return replace(
        config.mismatch_correction.traits, **{name: bound for name, bound in bounds.items() if bound is not None}
    )


RatioSource = Literal["engine", "trainer", "on_policy"]


def ratio_source(config: RlvrConfig) -> RatioSource:
    """Return `behaviour_log_probs`: by default `engine`, or `trainer` if sampling truncates the distribution."""
    if config.behaviour_log_probs is not None:
        return config.behaviour_log_probs
    return "trainer" if truncations(config.actor_infer.generating_args) else "engine"


def keeps_engine_log_probs(config: RlvrConfig) -> bool:
    """Whether the engine returns the log-probs of the tokens it samples."""
    return ratio_source(config) == "engine" or is_corrected(config)


def has_kl(config: RlvrConfig) -> bool:
    """Whether a KL term of the loss or of the reward compares the policy with the reference."""
    return config.use_kl_loss or config.add_token_level_kl


def replays(config: RlvrConfig) -> bool:
    """Whether groups of earlier steps are trained on again."""
    return config.curriculum is not None and config.curriculum.replay is not None


def weighs_kl(config: RlvrConfig) -> bool:
    """Return `kl_loss_importance`. By default, it is true if some updates use tokens that another policy sampled."""
    if config.kl_loss_importance is not None:
        return config.kl_loss_importance
    return config.async_generation_ratio > 0 or replays(config) or plan_batch(config).updates > 1


WHOLE = {"top_p": 1, "top_k": -1, "repetition_penalty": 1}
"""Sampling keys, with the values at which the engine samples from the whole distribution, as the trainer computes it.
"""


def truncations(rollout: GeneratingConfig) -> dict[str, float]:
    """Return the sampling keys and values that make the engine's distribution differ from the trainer's."""
    changed = {
        "top_p": (rollout.top_p, rollout.top_p < 1),
        "top_k": (rollout.top_k, rollout.top_k > 0),
        "repetition_penalty": (rollout.repetition_penalty, rollout.repetition_penalty != 1),
    }
    return {key: value for key, (value, changes) in changed.items() if changes}


def keys_text(given: Mapping[str, float]) -> str:
    """Return keys and values as text for a message: `top_p 0.9 and top_k 50`."""
    return " and ".join(f"{key} {value:g}" for key, value in given.items())
