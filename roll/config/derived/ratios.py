"""Where the log-probs come from that a loss takes its ratios against, and what the engine is asked for."""

from __future__ import annotations

from typing import Literal

from roll.config.derived.corrections import is_corrected
from roll.config.schema.model import GeneratingConfig
from roll.config.schema.rlvr import RlvrConfig

RatioSource = Literal["engine", "trainer", "on_policy"]


def ratio_source(config: RlvrConfig) -> RatioSource:
    """`behaviour_log_probs`; where it is not given, `engine`, or `trainer` if the engine's are of another distribution."""
    if config.behaviour_log_probs is not None:
        return config.behaviour_log_probs
    return "trainer" if truncations(config.actor_infer.generating_args) else "engine"


def keeps_engine_log_probs(config: RlvrConfig) -> bool:
    """Whether rollouts are asked for the log-probs of what they sample."""
    return ratio_source(config) == "engine" or is_corrected(config)


def truncations(rollout: GeneratingConfig) -> list[str]:
    """Keys, with their values, that make the engine sample from another distribution than the trainer's."""
    changed = {
        "top_p": (rollout.top_p, rollout.top_p < 1),
        "top_k": (rollout.top_k, rollout.top_k > 0),
        "repetition_penalty": (rollout.repetition_penalty, rollout.repetition_penalty != 1),
    }
    return [f"{key} {value:g}" for key, (value, changes) in changed.items() if changes]
