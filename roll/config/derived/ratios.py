"""The source of the log-probs in a loss's ratios, and the log-probs that engines return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from roll.config.derived.batch import plan_batch
from roll.config.derived.corrections import is_corrected
from roll.config.schema.model import GeneratingConfig
from roll.config.schema.rlvr import RlvrConfig

RatioSource = Literal["engine", "trainer", "on_policy"]


def ratio_source(config: RlvrConfig) -> RatioSource:
    """Return `behaviour_log_probs`; by default `engine`, or `trainer` if the engine samples from another distribution."""
    if config.behaviour_log_probs is not None:
        return config.behaviour_log_probs
    return "trainer" if truncations(config.actor_infer.generating_args) else "engine"


def keeps_engine_log_probs(config: RlvrConfig) -> bool:
    """Whether rollouts return the log-probs of sampled tokens."""
    return ratio_source(config) == "engine" or is_corrected(config)


def weighs_kl(config: RlvrConfig) -> bool:
    """Return `kl_loss_importance`; by default, whether an update learns from tokens that another policy sampled."""
    if config.kl_loss_importance is not None:
        return config.kl_loss_importance
    return config.async_generation_ratio > 0 or plan_batch(config).updates_per_step > 1


WHOLE = {"top_p": 1, "top_k": -1, "repetition_penalty": 1}
"""Keys of the sampling, with the values at which the engine samples from the trainer's whole distribution."""


def truncations(rollout: GeneratingConfig) -> dict[str, float]:
    """Return the keys, with their values, that make the engine sample from another distribution than the trainer's."""
    changed = {
        "top_p": (rollout.top_p, rollout.top_p < 1),
        "top_k": (rollout.top_k, rollout.top_k > 0),
        "repetition_penalty": (rollout.repetition_penalty, rollout.repetition_penalty != 1),
    }
    return {key: value for key, (value, changes) in changed.items() if changes}


def shown(given: Mapping[str, float]) -> str:
    """Return `top_p 0.9 and top_k 50`, for a message."""
    return " and ".join(f"{key} {value:g}" for key, value in given.items())
