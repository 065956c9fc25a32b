"""Checks the keys of the algorithm: advantages, critic, reward shaping, dynamic sampling, KL penalty, and the policy's
loss.

To learn from tokens of an older policy, the loss needs the probability with which that policy sampled each token.
Several keys decide whether this probability is known, so one fault lists every key to change, each with a value that
works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from roll.algorithms.methods import (
    CLIP_NORMALISED,
    CORRECTIONS,
    ESTIMATORS,
    KINDS,
    LARGEST_ERROR,
    NORM_KEYS,
    POLICY_LOSSES,
    EstimatorTraits,
    readers,
)
from roll.config.derived.batch import plan_batch
from roll.config.derived.domains import named_rewards
from roll.config.derived.methods import (
    BOUNDS,
    WHOLE,
    is_corrected,
    keeps_engine_log_probs,
    keys_text,
    ratio_source,
    replays,
    truncations,
    weighs_kl,
)
from roll.config.schema.faults import unread_method_keys
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.shipped import rewards_with_turns
from roll.errors import Fault


def method_faults(config: Config) -> Iterator[Fault]:
    """Yield a fault for each block of arguments (`policy_loss_args` and others) that is given although the method is
    built in.

    A built-in method reads its keys from the root.
    """
    for kind in KINDS.values():
        method = getattr(config, kind.key, None)
        if method is not None and not method.is_users and getattr(config, kind.arguments):
            keys = f"its keys are at the root: {', '.join(method.keys)}" if method.keys else "it has no keys"
            problem = f"set, but {kind.key} {method} is built in, and {keys}"
            yield Fault(
                kind.arguments,
                problem,
                f"remove it, or set {kind.key} to your own method, as package.module:Name",
                "unread",
            )


def staleness_faults(config: RlvrConfig) -> Iterator[Fault]:
    """Yield a fault if generation runs ahead of training and the loss would treat older tokens as on-policy."""
    problems, changes = stale_token_problems(config)
    if not (config.async_generation_ratio and problems):
        return
    problem = f"{config.async_generation_ratio:g}: a token may come from an older policy, and {'; '.join(problems)}"
    yield Fault(
        "async_generation_ratio", problem, f"set {' and '.join(changes)}, or async_generation_ratio=0", "contradiction"
    )


def stale_token_problems(config: RlvrConfig) -> tuple[list[str], list[str]]:
    """Return why the loss would treat tokens of an older policy as on-policy, and the settings with which it would not.

    Both are empty if it corrects for them.
    """
    problems: list[str] = []
    changes: list[str] = []
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
    return problems, changes


K3_ERROR = 0.54
"""Relative error of the expected gradient of k3 as a loss: median of random policies, KL 0.7 (docs/algorithms.md)."""
SWITCHES = {"dual_clip_loss"}
"""Keys that may be set to false with any loss."""


def loss_faults(config: RlvrConfig) -> list[Fault]:
    """Return contradictions among `policy_loss`, `behaviour_log_probs`, `mismatch_correction` and sampling."""
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
            "dual_clip_loss",
            f"{bound:g} would also cap unclipped losses",
            "set it above 1 (3 is usual), or to false",
            "out_of_range",
        )
    if bound is not False and "dual_clip_loss" not in loss.keys:
        remedy = f"set it to false, or policy_loss={' or '.join(own['dual_clip_loss'])}"
        yield Fault(
            "dual_clip_loss", f"{str(bound).lower()}, but policy_loss {loss} has no dual clip", remedy, "unread"
        )
    yield from unread_method_keys(
        config, "policy_loss", {key: names for key, names in own.items() if key not in SWITCHES}
    )
    if "topr_positive_weight" in loss.keys and not (config.topr_positive_weight or config.topr_negative_weight):
        problem = "0, and so is topr_negative_weight: the loss would be 0"
        yield Fault("topr_positive_weight", problem, "set one of the weights above 0", "no_effect")


def _token_credit(config: RlvrConfig) -> Iterator[Fault]:
    """Yield a fault if the loss has one gradient for all tokens of a sequence, but a key credits each token."""
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
        "self_distillation gives the tokens of one response different advantages": config.self_distillation,
    }
    others = ", ".join(other.name for other in POLICY_LOSSES.values() if other.traits.carries_token_credit)
    for reason in (reason for reason, holds in reasons.items() if holds):
        problem = (
            f"'{loss}' has one gradient for all tokens of a sequence, but {reason}: the advantages would cancel out"
        )
        yield Fault(
            "policy_loss",
            problem,
            f"use one of: {others}; or give all tokens of a response the same advantage",
            "contradiction",
        )


def _without_ratio(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of keys for probability ratios if the loss uses no ratio, or if every ratio is 1."""
    loss, unused = (
        config.policy_loss,
        not (is_corrected(config) or config.add_token_level_kl or config.async_generation_ratio or replays(config)),
    )
    if loss.traits.ratio is None and config.behaviour_log_probs == "trainer" and unused:
        problem = f"'trainer', but policy_loss {loss} uses no ratio, so the extra forward pass would only serve metrics"
        yield Fault("behaviour_log_probs", problem, "remove it, or set it to on_policy", "no_effect")
    if ratio_source(config) != "on_policy":
        return
    bounds = {
        "pg_clip_low": config.pg_clip_low,
        "pg_clip_high": config.pg_clip_high,
        "dual_clip_loss": config.dual_clip_loss or None,
    }
    bounds["dppo_threshold"] = config.dppo_threshold
    gates = ("sapo_positive_temperature", "sapo_negative_temperature")
    bounds |= {key: getattr(config, key) for key in gates if key in config.model_fields_set}
    for key, bound in bounds.items():
        if bound is not None:
            problem = (
                f"{str(bound).lower()}, but with behaviour_log_probs on_policy every ratio is 1, so it has no effect"
            )
            yield Fault(key, problem, "remove it, or set behaviour_log_probs=engine", "no_effect")


def _on_policy(config: RlvrConfig) -> Iterator[Fault]:
    if ratio_source(config) != "on_policy":
        return
    updates = plan_batch(config).updates
    if updates > 1:
        problem = (
            f"'on_policy', but a step makes {updates} updates: after the first, the policy is no longer the one that "
            f"sampled"
        )
        yield Fault(
            "behaviour_log_probs", problem, "set it to trainer or engine, or make one update per step", "contradiction"
        )
    if config.policy_loss.traits.selects_tokens:
        problem = (
            f"'on_policy', but policy_loss {config.policy_loss} chooses its tokens by log-probs from before the update"
        )
        yield Fault("behaviour_log_probs", problem, "set it to engine or trainer", "contradiction")
    if config.add_token_level_kl and not is_corrected(config):
        problem = "'on_policy', but add_token_level_kl needs log-probs from before the update"
        yield Fault(
            "behaviour_log_probs", problem, "set it to engine or trainer, or use use_kl_loss instead", "contradiction"
        )


def _off_policy_mask(config: RlvrConfig) -> Iterator[Fault]:
    """Yield a fault if the quantity that `off_policy_mask_threshold` limits is 0 in every update."""
    threshold, source = config.off_policy_mask_threshold, ratio_source(config)
    if threshold is None or keeps_engine_log_probs(config) or (source == "trainer" and plan_batch(config).updates > 1):
        return
    problem = (
        f"{threshold:g}, but behaviour_log_probs is {source}: the behaviour policy equals the current policy in "
        f"every update"
    )
    remedy = "set behaviour_log_probs=engine or a mismatch_correction, or remove this key"
    yield Fault("off_policy_mask_threshold", problem, remedy, "no_effect")


def _corrections(config: RlvrConfig) -> Iterator[Fault]:
    name, settings = config.mismatch_correction, config.mismatch_correction.traits
    for key, field in BOUNDS.items():
        value = getattr(config, key)
        if value is not None and getattr(settings, field) is None:
            users = ", ".join(other.name for other in CORRECTIONS.values() if getattr(other.traits, field) is not None)
            problem = f"{value:g}, but mismatch_correction {name} does not read it"
            yield Fault(key, problem, f"remove it, or choose one of: {users}", "unread")
    low = settings.low if config.mismatch_low is None else config.mismatch_low
    high = settings.high if config.mismatch_high is None else config.mismatch_high
    if low is not None and high is not None and low >= high:
        problem = f"{low:g} is not below the upper bound {high:g}: everything would be rejected"
        yield Fault("mismatch_low", problem, "use a smaller number", "not_below")
    if not is_corrected(config):
        return
    if ratio_source(config) == "engine":
        problem = f"'{name}', but behaviour_log_probs is engine: the ratio in the loss already makes this correction"
        remedy = "set behaviour_log_probs=trainer (or on_policy with one update per step), or remove it"
        yield Fault("mismatch_correction", problem, remedy, "exclusive")
    if config.policy_loss.traits.ratio == "sequence" and "token" in (settings.weight, settings.reject):
        problem = (
            f"'{name}' corrects token by token, but policy_loss {config.policy_loss} uses the ratio of whole sequences"
        )
        yield Fault(
            "mismatch_correction",
            problem,
            "use seq_tis, seq_mis, geo_tis, seq_rs or geo_rs, or policy_loss=ppo",
            "contradiction",
        )


def _sampling(config: RlvrConfig) -> Iterator[Fault]:
    given = truncations(config.actor_infer.generating_args)
    if (
        given and keeps_engine_log_probs(config) and not (config.async_generation_ratio or replays(config))
    ):  # else `staleness_faults` or the check of the replay reports it
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
        yield Fault(f"actor_infer.generating_args.{next(iter(given))}", problem, remedy, "contradiction")


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
    if traits.acts_on_change and updates == 1 and not (config.async_generation_ratio or replays(config)):
        yield f"policy_loss: {loss} penalises changes of the policy, but with one update per step there are none yet"


def _kl_gradient(config: RlvrConfig) -> Iterator[str]:
    """Yield warnings about KL estimators whose gradient, as a loss, is not the gradient of the KL divergence."""
    if not config.use_kl_loss:
        return
    if not weighs_kl(config):
        remedy = "use k2, k1+ or k3+, which on policy have the gradient of the KL, or set kl_loss_importance=true"
        if config.kl_loss_type == "k1":
            yield f"kl_loss_type: as a loss, the gradient of k1 is zero on average and constrains nothing; {remedy}"
        if config.kl_loss_type == "k3":
            error = f"which is off by {K3_ERROR:.0%} at 0.7 nats from the reference"
            yield f"kl_loss_type: as a loss, k3 has the gradient of KL(reference || policy), {error}; {remedy}"
    if config.kl_loss_importance is False and weighs_kl(config.model_copy(update={"kl_loss_importance": None})):
        yield (
            "kl_loss_importance: false, but the policy that sampled differs from the trained one, so the gradient of "
            "the KL is biased"
        )


COMPARED = {"gamma", "value_clip", *NORM_KEYS}
"""Keys that only some estimators read and that have their own checks. An unused `value_clip` only causes a warning,
because ROLL's files set it with any estimator.
"""


def credit_faults(config: RlvrConfig) -> Iterator[Fault]:
    """Yield a fault for each contradiction among the keys that turn rewards into advantages."""
    yield from _groups_of_one(config)
    yield from _steps_of_one(config)
    yield from _best_of(config)
    yield from _estimator(config)
    yield from _turns(config)
    yield from _critic(config)
    yield from _shaping(config)
    yield from _adaptive_kl(config)
    yield from _dynamic_sampling(config)
    yield from _normalised_parts(config)
    if config.loss_scale_factor is not None and config.loss_agg_mode != "seq-mean-token-sum-norm":
        problem = f"{config.loss_scale_factor:g}, but loss_agg_mode {config.loss_agg_mode} does not use it"
        yield Fault("loss_scale_factor", problem, "remove it, or set loss_agg_mode=seq-mean-token-sum-norm", "unread")


def _groups_of_one(config: RlvrConfig) -> Iterator[Fault]:
    if config.num_return_sequences_in_group > 1:
        return
    traits, taught = config.adv_estimator.traits, config.self_distillation
    if taught is not None and taught.weight == 1:  # the advantages of the estimator have no weight
        return
    by_group = "group" in (config.norm_mean_type, config.norm_std_type) and not traits.needs_turns
    if traits.compares_groups or by_group:
        comparing = f"adv_estimator {config.adv_estimator}" if traits.compares_groups else "normalisation by group"
        problem = f"1, but {comparing} compares rewards within a group: every advantage would be 0"
        others = _estimators(lambda traits: not traits.compares_groups)
        remedy = (
            f"set it to at least 2 (8 is usual), or use an adv_estimator without groups ({others}) and no "
            f"normalisation by group"
        )
        yield Fault("num_return_sequences_in_group", problem, remedy, "no_effect")
    for key in ("dynamic_sampling", "difficulty_mask", "difficulty_loss_weight"):
        if getattr(config, key):
            problem = (
                "set, but num_return_sequences_in_group is 1: it needs the rewards of several responses to one prompt"
            )
            yield Fault(
                key, problem, "set num_return_sequences_in_group to at least 2, or remove this key", "no_effect"
            )


def _steps_of_one(config: RlvrConfig) -> Iterator[Fault]:
    """Yield a fault for a key that subtracts the mean over a step that has a single response."""
    if config.rollout_batch_size * config.num_return_sequences_in_group > 1:
        return
    traits = config.adv_estimator.traits
    differ = traits.credits_tokens or config.add_token_level_kl or (traits.discounts is not None and config.gamma != 1)
    subtracts = {
        "norm_mean_type": traits.normalises and not traits.needs_turns and config.norm_mean_type in ("batch", "domain"),
        "whiten_advantages": bool(config.whiten_advantages) and not differ,
        "adv_estimator": traits.whitens and not differ,
    }
    for key in (key for key, holds in subtracts.items() if holds):
        problem = f"{getattr(config, key)}, but a step has a single response: every advantage would be 0"
        yield Fault(
            key, problem, "raise rollout_batch_size or num_return_sequences_in_group, or change this key", "no_effect"
        )


def _best_of(config: RlvrConfig) -> Iterator[Fault]:
    samples = config.num_return_sequences_in_group
    if "pass_k" in config.adv_estimator.keys and 1 < samples < config.pass_k:
        problem = (
            f"{config.pass_k}, but num_return_sequences_in_group is {samples}: a prompt has fewer than {config.pass_k} "
            f"samples"
        )
        remedy = (
            f"set it to at most {samples} (a smaller value lowers the variance), or raise num_return_sequences_in_group"
        )
        yield Fault("pass_k", problem, remedy, "too_large")


def _dynamic_sampling(config: RlvrConfig) -> Iterator[Fault]:
    if config.dynamic_sampling and config.dynamic_sampling.max_num_gen_batches == 1:
        problem = "1: no further batch would be generated to replace dropped groups"
        remedy = "set it to at least 2 (3 is usual), or remove dynamic_sampling"
        yield Fault("dynamic_sampling.max_num_gen_batches", problem, remedy, "no_effect")


def _normalised_parts(config: RlvrConfig) -> Iterator[Fault]:
    """Yield a fault for each key that conflicts with `normalise: group`, which makes every group's mean reward 0."""
    traits = config.adv_estimator.traits
    reasons = {
        "num_return_sequences_in_group is 1: every reward would be 0": config.num_return_sequences_in_group == 1,
        (
            f"adv_estimator {config.adv_estimator} compares with a greedy response, which is not part of the group"
        ): traits.needs_greedy,
        f"adv_estimator {config.adv_estimator} credits turns, whose rewards are not normalised": traits.needs_turns,
        (
            f"adv_estimator {config.adv_estimator} divides by the mean reward of a group: every advantage would be 0"
        ): traits.divides_by_mean,
        "difficulty_mask uses the mean reward of a group, which would be 0": config.difficulty_mask,
        "difficulty_loss_weight uses the mean reward of a group, which would be 0": config.difficulty_loss_weight,
        "error_max_len_clip treats every response with a reward of 0 or less as wrong": config.error_max_len_clip,
    }
    for domain, reward in config.rewards.items():
        if reward.normalise == "group":
            for reason in (reason for reason, holds in reasons.items() if holds):
                yield Fault(
                    f"rewards.{domain}.normalise",
                    f"'group', but {reason}",
                    "set it to none, or change the other key",
                    "contradiction",
                )


def _estimator(config: RlvrConfig) -> Iterator[Fault]:
    estimator, traits = config.adv_estimator, config.adv_estimator.traits
    for key in NORM_KEYS:
        scope = getattr(config, key)
        if scope and not traits.normalises and scope != traits.own_scope:
            own = "uses the critic's values as its baseline" if traits.needs_values else "has its own normalisation"
            yield Fault(
                key,
                f"'{scope}', but adv_estimator {estimator} {own}",
                "remove it, or set adv_estimator=reinforce",
                "unread",
            )
        if scope == "running" and traits.needs_turns:
            problem = f"'running', but adv_estimator {estimator} normalises the returns of a step's turns"
            yield Fault(key, problem, "set it to batch or group", "not_supported")
    if (
        traits.needs_states
        and config.episode_reward_weight == config.step_reward_weight == 0
        and not estimator.is_users
    ):
        problem = "0, and so is step_reward_weight: every advantage would be 0"
        yield Fault("episode_reward_weight", problem, "set at least one of the two above 0; 1 is usual", "no_effect")
    if config.reward_clip_on == "normalised" and estimator.name not in CLIP_NORMALISED:
        problem = f"'normalised', but adv_estimator {estimator} clips the raw rewards only"
        yield Fault(
            "reward_clip_on",
            problem,
            f"set it to raw, or adv_estimator to one of: {', '.join(CLIP_NORMALISED)}",
            "not_supported",
        )
    if config.reward_clip_on == "normalised" and config.reward_clip is None:
        yield Fault(
            "reward_clip_on",
            "'normalised', but reward_clip is not set",
            "set reward_clip, or remove this key",
            "owner_missing",
        )
    if config.gamma != 1 and traits.discounts is None:
        pays = (
            "does not declare that it discounts"
            if estimator.is_users
            else "gives every token of a response the same advantage"
        )
        problem = f"{config.gamma:g}, but adv_estimator {estimator} {pays}"
        others = _estimators(lambda traits: traits.discounts is not None)
        yield Fault("gamma", problem, f"remove it, or set adv_estimator to one of: {others}", "no_effect")


def _turns(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of an estimator that credits turns in a run without turns."""
    estimator, traits = config.adv_estimator, config.adv_estimator.traits
    if traits.needs_states and not config.environments:
        problem = (
            f"'{estimator}' compares turns taken in the same state of an environment, but this run has no environments"
        )
        yield Fault(
            "adv_estimator",
            problem,
            "add an environments block, or use grpo, which is equivalent without environments",
            "owner_missing",
        )
    if (
        traits.needs_turns
        and not config.environments
        and not any(map(_may_name_turns, named_rewards(config.rewards).values()))
    ):
        problem = f"'{estimator}', but no reward of this run returns turns: every response would count as a single turn"
        known = ", ".join(rewards_with_turns())
        remedy = f"set rewards.<domain>.reward to {known} or to your own function, or use reinforce"
        yield Fault("adv_estimator", problem, remedy, "no_effect")


def _estimators(wanted: Callable[[EstimatorTraits], bool]) -> str:
    """Return the names of built-in estimators whose traits satisfy `wanted`. Those that credit turns come last."""
    found = [method for method in ESTIMATORS.values() if wanted(method.traits)]
    return ", ".join(method.name for method in sorted(found, key=lambda method: method.traits.needs_turns))


def _critic(config: RlvrConfig) -> Iterator[Fault]:
    own = {key: names for key, names in readers(ESTIMATORS).items() if key not in COMPARED}
    yield from unread_method_keys(config, "adv_estimator", own)
    estimator = config.adv_estimator
    if not estimator.traits.needs_values:
        if config.critic is not None:
            problem = f"set, but adv_estimator {estimator} uses no critic"
            yield Fault("critic", problem, "remove the block (~critic), or set adv_estimator=gae", "unread")
        return
    if config.critic is None:
        problem = f"missing, but adv_estimator {estimator} needs the values of a critic"
        yield Fault(
            "critic",
            problem,
            "add a critic block (strategy_name: deepspeed_train), or choose another adv_estimator",
            "missing",
        )
    if config.critic_warmup >= config.max_steps:
        problem = f"{config.critic_warmup}, but max_steps is {config.max_steps}: the policy would never be trained"
        yield Fault(
            "critic_warmup", problem, f"set it below {config.max_steps}; a tenth of the steps is enough", "not_below"
        )


def _may_name_turns(reward: str) -> bool:
    return ":" in reward or reward in rewards_with_turns()


def _shaping(config: RlvrConfig) -> Iterator[Fault]:
    longest = config.actor_infer.generating_args.max_new_tokens or config.response_length
    if config.overlong_buffer and config.overlong_buffer.len > longest:
        problem = f"{config.overlong_buffer.len} is more than the longest response, {longest} tokens"
        yield Fault(
            "overlong_buffer.len", problem, f"set it to at most {longest}; a quarter of that is usual", "too_large"
        )
    threshold = config.error_max_len_threshold
    if config.error_max_len_clip and threshold is None:
        remedy = f"set it to a number of tokens, at most {longest}, or set error_max_len_clip=false"
        yield Fault("error_max_len_threshold", "missing, but error_max_len_clip is true", remedy, "missing")
    if config.error_max_len_clip and threshold is not None and threshold > longest:
        problem = f"{threshold} is more than the longest response, {longest} tokens: no response would be left out"
        yield Fault("error_max_len_threshold", problem, f"set it to at most {longest}", "too_large")
    generating = config.actor_infer.generating_args
    if config.max_len_mask and generating.ignore_eos and not generating.stop_strings:
        problem = "true, but with actor_infer.generating_args.ignore_eos every response is truncated and left out"
        yield Fault("max_len_mask", problem, "set one of the two to false", "contradiction")


def _adaptive_kl(config: RlvrConfig) -> Iterator[Fault]:
    if config.target_kl is None:
        return
    if not config.add_token_level_kl:
        problem = f"{config.target_kl:g}, but add_token_level_kl is false: there is no KL weight to adapt"
        yield Fault(
            "target_kl", problem, "set add_token_level_kl=true and init_kl_coef, or remove this key", "owner_missing"
        )
    responses = config.rollout_batch_size * config.num_return_sequences_in_group
    if LARGEST_ERROR * responses >= config.kl_horizon:
        least = int(LARGEST_ERROR * responses) + 1
        problem = (
            f"{config.kl_horizon} responses, but a step has {responses}: a single step could reduce the KL weight to 0"
        )
        remedy = f"set it to at least {least}; {10 * responses} adapts the weight over about ten steps"
        yield Fault("kl_horizon", problem, remedy, "too_small")


def credit_warnings(config: RlvrConfig) -> Iterator[str]:
    """Yield warnings about keys of credit assignment that have less effect than expected."""
    traits = config.adv_estimator.traits
    if config.dynamic_sampling and not traits.compares_groups:
        yield f"dynamic_sampling: drops groups of equal rewards, from which {config.adv_estimator} could learn"
    if config.whiten_advantages and traits.whitens:
        yield f"whiten_advantages: adv_estimator {config.adv_estimator} already whitens the advantages; remove the key"
    if config.value_clip is not None and not traits.needs_values:
        yield (
            f"value_clip: has no effect with adv_estimator {config.adv_estimator}, which has no critic; remove the key"
        )
    if traits.needs_values and not config.whiten_advantages:
        yield (
            "whiten_advantages: false, but PPO is usually run with true, so that the step size is independent of the "
            "scale of rewards"
        )
    if config.critic and "num_train_epochs" in config.critic.training_args.model_fields_set:
        yield "critic.training_args.num_train_epochs: has no effect here; RLVR ends after max_steps"
