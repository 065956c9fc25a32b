"""Checks the keys of the policy's loss.

Checks keys that conflict with generation ahead of training.

To learn from tokens of an older policy, the loss needs the probability with which that policy sampled each token.
Several keys decide whether this probability is known, so one fault lists every key to change, each with a value that
works.
"""

from __future__ import annotations

from collections.abc import Iterator

from roll.algorithms.methods.base import readers
from roll.algorithms.methods.corrections import CORRECTIONS
from roll.algorithms.methods.policy_losses import POLICY_LOSSES
from roll.config.derived.batch import plan_batch
from roll.config.derived.corrections import BOUNDS, is_corrected
from roll.config.derived.ratios import WHOLE, keeps_engine_log_probs, keys_text, ratio_source, truncations, weighs_kl
from roll.config.schema.faults import unread_method_keys
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import Fault


def staleness_faults(config: RlvrConfig) -> Iterator[Fault]:
    """Yield a fault if generation runs ahead of training and the loss would treat tokens of an older policy as
    on-policy.
    """
    if not config.async_generation_ratio:
        return
    problems, changes = [], []
    if given := truncations(config.actor_infer.generating_args):
        problems.append(
            f"sampling with {keys_text(given)} changes the distribution to one that the log-probs do not describe"
        )
        changes += [f"actor_infer.generating_args.{key}={WHOLE[key]}" for key in given]
    loss, source = config.policy_loss, ratio_source(config)
    if loss.traits.ratio is None and not is_corrected(config):
        problems.append(f"policy_loss {loss} uses no ratio to the policy that sampled")
        changes += ["behaviour_log_probs=trainer", "mismatch_correction=tis"]
    elif source != "engine" and not is_corrected(config) and (config.behaviour_log_probs or not given):
        problems.append(
            f"behaviour_log_probs {source} makes the ratio relative to the current policy, not to the one that sampled"
        )
        changes.append("behaviour_log_probs=engine")
    if not problems:
        return
    problem = f"{config.async_generation_ratio:g}: a token may come from an older policy, and {'; '.join(problems)}"
    yield Fault("async_generation_ratio", problem, f"set {' and '.join(changes)}, or async_generation_ratio=0")


K3_ERROR = 0.54
"""Relative error of the expected gradient of k3 as a loss: median over random policies with a KL of 0.7 nats
(docs/algorithms.md).
"""
SWITCHES = {"dual_clip_loss"}
"""Keys that may be set to false with any loss."""


def loss_faults(config: RlvrConfig) -> list[Fault]:
    """Return a fault for each contradiction among `policy_loss`, `behaviour_log_probs`, `mismatch_correction` and the
    sampling.
    """
    return [
        *_own_keys(config),
        *_without_ratio(config),
        *_on_policy(config),
        *_off_policy_mask(config),
        *staleness_faults(config),
        *_corrections(config),
        *_token_credit(config),
        *_sampling(config),
    ]


def _own_keys(config: RlvrConfig) -> Iterator[Fault]:
    loss, bound = config.policy_loss, config.dual_clip_loss
    own = readers(POLICY_LOSSES)
    if not isinstance(bound, bool) and bound <= 1:
        yield Fault(
            "dual_clip_loss", f"{bound:g} would also cap unclipped losses", "set it above 1 (3 is usual), or to false"
        )
    if bound is not False and "dual_clip_loss" not in loss.keys:
        remedy = f"set it to false, or policy_loss={' or '.join(own['dual_clip_loss'])}"
        yield Fault("dual_clip_loss", f"{str(bound).lower()}, but policy_loss {loss} has no dual clip", remedy)
    yield from unread_method_keys(
        config, "policy_loss", {key: names for key, names in own.items() if key not in SWITCHES}
    )
    if "topr_positive_weight" in loss.keys and not (config.topr_positive_weight or config.topr_negative_weight):
        yield Fault(
            "topr_positive_weight",
            "0, and so is topr_negative_weight: the loss would be 0",
            "set one of the weights above 0",
        )
    if config.clip_cov_low >= config.clip_cov_high:
        problem = (
            f"{config.clip_cov_low:g} is not below clip_cov_high {config.clip_cov_high:g}: no token is between them"
        )
        yield Fault("clip_cov_low", problem, "lower it (1 and 5 are usual)")


def _token_credit(config: RlvrConfig) -> Iterator[Fault]:
    """Yield a fault if the loss has one gradient for all tokens of a sequence, but another key gives each token its own
    credit.
    """
    loss, estimator = config.policy_loss, config.adv_estimator
    if loss.traits.carries_token_credit:
        return
    reasons = {
        (
            f"adv_estimator {estimator} gives the tokens of one response different advantages"
        ): estimator.traits.credits_tokens,
        f"gamma {config.gamma:g} gives the tokens of one response different advantages": estimator.traits.discounts
        and config.gamma != 1,
        "add_token_level_kl gives each token its own penalty": config.add_token_level_kl,
    }
    others = ", ".join(other.name for other in POLICY_LOSSES.values() if other.traits.carries_token_credit)
    for reason in (reason for reason, holds in reasons.items() if holds):
        problem = (
            f"'{loss}' has one gradient for all tokens of a sequence, but {reason}: the advantages would cancel out"
        )
        yield Fault(
            "policy_loss", problem, f"use one of: {others}; or give all tokens of a response the same advantage"
        )


def _without_ratio(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of keys for probability ratios if the loss uses no ratio, or if every ratio is 1."""
    loss, unused = (
        config.policy_loss,
        not (is_corrected(config) or config.add_token_level_kl or config.async_generation_ratio),
    )
    if loss.traits.ratio is None and config.behaviour_log_probs == "trainer" and unused:
        problem = f"'trainer', but policy_loss {loss} uses no ratio, so the extra forward pass would only serve metrics"
        yield Fault("behaviour_log_probs", problem, "remove it, or set it to on_policy")
    if ratio_source(config) != "on_policy":
        return
    bounds = {
        "pg_clip_low": config.pg_clip_low,
        "pg_clip_high": config.pg_clip_high,
        "dual_clip_loss": config.dual_clip_loss or None,
    }
    bounds["dppo_threshold"] = config.dppo_threshold
    for key, bound in bounds.items():
        if bound is not None:
            problem = (
                f"{str(bound).lower()}, but with behaviour_log_probs on_policy every ratio is 1, and nothing is clipped"
            )
            yield Fault(key, problem, "remove it, or set behaviour_log_probs=engine")


def _on_policy(config: RlvrConfig) -> Iterator[Fault]:
    if ratio_source(config) != "on_policy":
        return
    updates = plan_batch(config).updates
    if updates > 1:
        problem = (
            f"'on_policy', but a step makes {updates} updates: after the first, the policy is no longer the one that "
            f"sampled"
        )
        yield Fault("behaviour_log_probs", problem, "set it to trainer or engine, or make one update per step")
    if config.policy_loss.traits.selects_tokens:
        problem = (
            f"'on_policy', but policy_loss {config.policy_loss} chooses its tokens by log-probs from before the update"
        )
        yield Fault("behaviour_log_probs", problem, "set it to engine or trainer")
    if config.add_token_level_kl and not is_corrected(config):
        problem = "'on_policy', but add_token_level_kl needs log-probs from before the update"
        yield Fault("behaviour_log_probs", problem, "set it to engine or trainer, or use use_kl_loss instead")


def _off_policy_mask(config: RlvrConfig) -> Iterator[Fault]:
    """Yield a fault if the quantity that `off_policy_mask_threshold` limits is 0 in every update."""
    threshold, source = config.off_policy_mask_threshold, ratio_source(config)
    if threshold is None or keeps_engine_log_probs(config) or (source == "trainer" and plan_batch(config).updates > 1):
        return
    problem = (
        f"{threshold:g}, but behaviour_log_probs is {source}: the behaviour policy equals the current policy in "
        f"every update"
    )
    yield Fault(
        "off_policy_mask_threshold",
        problem,
        "set behaviour_log_probs=engine or a mismatch_correction, or remove this key",
    )


def _corrections(config: RlvrConfig) -> Iterator[Fault]:
    name, settings = config.mismatch_correction, config.mismatch_correction.traits
    for key, field in BOUNDS.items():
        value = getattr(config, key)
        if value is not None and getattr(settings, field) is None:
            users = ", ".join(other.name for other in CORRECTIONS.values() if getattr(other.traits, field) is not None)
            yield Fault(
                key,
                f"{value:g}, but mismatch_correction {name} does not read it",
                f"remove it, or choose one of: {users}",
            )
    low = settings.low if config.mismatch_low is None else config.mismatch_low
    high = settings.high if config.mismatch_high is None else config.mismatch_high
    if low is not None and high is not None and low >= high:
        yield Fault(
            "mismatch_low",
            f"{low:g} is not below the upper bound {high:g}: everything would be rejected",
            "use a smaller number",
        )
    if not is_corrected(config):
        return
    if ratio_source(config) == "engine":
        problem = f"'{name}', but behaviour_log_probs is engine: the ratio in the loss already makes this correction"
        yield Fault(
            "mismatch_correction",
            problem,
            "set behaviour_log_probs=trainer (or on_policy with one update per step), or remove it",
        )
    if config.policy_loss.traits.ratio == "sequence" and "token" in (settings.weight, settings.reject):
        problem = (
            f"'{name}' corrects token by token, but policy_loss {config.policy_loss} uses the ratio of whole sequences"
        )
        yield Fault(
            "mismatch_correction", problem, "use seq_tis, seq_mis, geo_tis, seq_rs or geo_rs, or policy_loss=ppo"
        )


def _sampling(config: RlvrConfig) -> Iterator[Fault]:
    given = truncations(config.actor_infer.generating_args)
    if (
        given and keeps_engine_log_probs(config) and not config.async_generation_ratio
    ):  # else `staleness_faults` reports it
        reader = (
            "behaviour_log_probs engine"
            if ratio_source(config) == "engine"
            else f"mismatch_correction {config.mismatch_correction}"
        )
        problem = (
            f"with {keys_text(given)} the engine samples from a modified distribution, but {reader} needs the "
            f"trainer's full distribution"
        )
        *keys, last = [f"{key}={value}" for key, value in WHOLE.items()]
        remedy = f"sample with {', '.join(keys)} and {last}, or set behaviour_log_probs=trainer without a correction"
        yield Fault(f"actor_infer.generating_args.{next(iter(given))}", problem, remedy)


def loss_warnings(config: RlvrConfig) -> Iterator[str]:
    """Yield warnings about keys that have less effect than expected."""
    given = truncations(config.actor_infer.generating_args)
    if given:
        extra = "" if config.behaviour_log_probs else ", so behaviour_log_probs is trainer"
        yield (
            f"actor_infer.generating_args: with {keys_text(given)} responses are sampled from a modified distribution, "
            f"but the trainer treats "
            f"them as samples from the full one{extra} (docs/algorithms.md); set top_p=1, top_k=-1 and "
            f"repetition_penalty=1 to avoid this"
        )
    yield from _kl_gradient(config)
    if "pg_clip" in config.model_fields_set and config.pg_clip_low and config.pg_clip_high:
        yield "pg_clip: has no effect, because pg_clip_low and pg_clip_high are both set"
    high, loss, traits = config.pg_clip_high or config.pg_clip, config.policy_loss, config.policy_loss.traits
    if traits.usual_clip and high > traits.largest_clip:
        usual = "pg_clip_low={:g} and pg_clip_high={:g} are usual".format(*traits.usual_clip)
        yield f"pg_clip: {high:g} hardly ever clips with policy_loss {loss}, whose ratio is a mean over tokens; {usual}"
    updates = plan_batch(config).updates
    if traits.ratio is None and updates > 1:
        yield (
            f"policy_loss: {loss} uses no ratio, but only the first of a step's {updates} updates trains the policy "
            f"that sampled; use ppo, which corrects for the difference"
        )
    if traits.acts_on_change and updates == 1 and not config.async_generation_ratio:
        yield f"policy_loss: {loss} penalises changes of the policy, but with one update per step there are none yet"


def _kl_gradient(config: RlvrConfig) -> Iterator[str]:
    """Yield warnings about KL estimators whose gradient, when used as a loss, is not the gradient of the KL
    divergence.
    """
    if not config.use_kl_loss:
        return
    if not weighs_kl(config):
        remedy = "use k2, k1+ or k3+, which on policy have the gradient of the KL, or set kl_loss_importance=true"
        if config.kl_loss_type == "k1":
            yield (
                f"kl_loss_type: as a loss, k1 has a gradient of zero on average and does not constrain the policy; "
                f"{remedy}"
            )
        if config.kl_loss_type == "k3":
            error = f"which is off by {K3_ERROR:.0%} at 0.7 nats from the reference"
            yield f"kl_loss_type: as a loss, k3 has the gradient of KL(reference || policy), {error}; {remedy}"
    if config.kl_loss_importance is False and weighs_kl(config.model_copy(update={"kl_loss_importance": None})):
        yield (
            "kl_loss_importance: false, but the policy that sampled differs from the trained one, so the gradient of "
            "the KL is biased"
        )
