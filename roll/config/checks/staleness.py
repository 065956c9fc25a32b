"""Checks keys that conflict with generation ahead of training.

To learn from tokens of an older policy, the loss needs the probability with which that policy sampled each token. Several keys decide
whether this probability is known, so one fault lists every key to change, each with a value that works.
"""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.derived.corrections import is_corrected
from roll.config.derived.ratios import WHOLE, ratio_source, shown, truncations
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import Fault


def staleness_faults(config: RlvrConfig) -> Iterator[Fault]:
    """Yield a fault if generation runs ahead of training and the loss would treat tokens of an older policy as on-policy."""
    if not config.async_generation_ratio:
        return
    problems, changes = [], []
    if given := truncations(config.actor_infer.generating_args):
        problems.append(f"sampling with {shown(given)} changes the distribution to one that the log-probs do not describe")
        changes += [f"actor_infer.generating_args.{key}={WHOLE[key]}" for key in given]
    loss, source = config.policy_loss, ratio_source(config)
    if loss.traits.ratio is None and not is_corrected(config):
        problems.append(f"policy_loss {loss} uses no ratio to the policy that sampled")
        changes += ["behaviour_log_probs=trainer", "mismatch_correction=tis"]
    elif source != "engine" and not is_corrected(config) and (config.behaviour_log_probs or not given):
        problems.append(f"behaviour_log_probs {source} makes the ratio relative to the current policy, not to the one that sampled")
        changes.append("behaviour_log_probs=engine")
    if not problems:
        return
    problem = f"{config.async_generation_ratio:g}: a token may come from an older policy, and {'; '.join(problems)}"
    yield Fault("async_generation_ratio", problem, f"set {' and '.join(changes)}, or async_generation_ratio=0")
