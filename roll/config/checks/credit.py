"""Checks the keys of credit assignment: advantages, critic, reward shaping, dynamic sampling, and the KL penalty in the
reward.

Checks the keys of filters of groups against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from roll.algorithms.methods.adaptive_kl import LARGEST_ERROR
from roll.algorithms.methods.base import readers
from roll.algorithms.methods.estimators import CLIP_NORMALISED, ESTIMATORS, NORM_KEYS, EstimatorTraits
from roll.config.derived.rewards import named_rewards
from roll.config.schema.faults import unread_method_keys
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import QueryFilterConfig, RewardConfig
from roll.config.shipped import rewards_with_turns
from roll.errors import Fault

READ = {"no_filter": (), "mean_filter": ("threshold_down", "threshold_up"), "std_filter": ("std_threshold",)}
"""By type of filter: the bounds that it reads."""


def filter_faults(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of filters that have no bound, a bound that their type does not read, bounds that drop every group,
    or groups of one.
    """
    for domain, reward in config.rewards.items():
        query_filter = reward.query_filter_config
        if query_filter is None:
            continue
        place = f"rewards.{domain}.query_filter_config"
        yield from _bounds(query_filter, f"{place}.filter_args")
        if query_filter.type != "no_filter" and config.num_return_sequences_in_group == 1:
            problem = (
                f"{query_filter.type}, but num_return_sequences_in_group is 1: a filter needs several rewards per "
                f"prompt"
            )
            yield Fault(place, problem, "set num_return_sequences_in_group to at least 2, or remove this block")
        yield from _zero_means(query_filter, reward, place)
        high = query_filter.filter_args.threshold_up if query_filter.type == "mean_filter" else None
        if config.adv_estimator.traits.divides_by_mean and high is not None and high <= 0:
            problem = (
                f"{high:g}, but adv_estimator {config.adv_estimator} learns only if a group's mean is above 0: every "
                f"advantage would be 0"
            )
            yield Fault(f"{place}.filter_args.threshold_up", problem, "raise it above 0, or change the estimator")


def _zero_means(query_filter: QueryFilterConfig, reward: RewardConfig, place: str) -> Iterator[Fault]:
    """Yield a fault if no group can pass the filter, because `normalise: group` makes its mean 0 and bounds its
    standard deviation.
    """
    if reward.normalise != "group":
        return
    bounds, normalised = query_filter.filter_args, f"rewards.{place.split('.')[1]}.normalise is 'group'"
    low, high = bounds.threshold_down, bounds.threshold_up
    if query_filter.type == "mean_filter" and ((low is not None and low >= 0) or (high is not None and high <= 0)):
        problem = f"mean_filter, but {normalised}: the mean reward of every group would be 0, which the bounds exclude"
        yield Fault(place, problem, "use std_filter, set normalise to none, or remove this block")
    largest = sum(abs(part.weight) for part in reward.parts.values())
    if query_filter.type == "std_filter" and bounds.std_threshold is not None and bounds.std_threshold >= largest > 0:
        problem = (
            f"{bounds.std_threshold:g}, but {normalised}: no group's standard deviation would be above {largest:g}, "
            f"the sum of weights"
        )
        yield Fault(
            f"{place}.filter_args.std_threshold", problem, f"set it below {largest:g}, or set normalise to none"
        )


def _bounds(query_filter: QueryFilterConfig, place: str) -> Iterator[Fault]:
    bounds = query_filter.filter_args
    given = {key: value for key, value in bounds if value is not None}
    read = READ[query_filter.type]
    for key in given.keys() - set(read):
        yield Fault(
            f"{place}.{key}",
            f"{given[key]:g}, but the type {query_filter.type} does not read it",
            "remove it, or change the type",
        )
    if read and not given.keys() & set(read):
        yield Fault(place, f"has no bound, but the type is {query_filter.type}", f"set {' or '.join(read)}")
    low, high = bounds.threshold_down, bounds.threshold_up
    if low is not None and high is not None and low >= high:
        problem = f"{low:g} is not below threshold_up {high:g}: every group would be replaced"
        yield Fault(f"{place}.threshold_down", problem, "set it below threshold_up")


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
    yield from _critic(config)
    yield from _shaping(config)
    yield from _adaptive_kl(config)
    yield from _dynamic_sampling(config)
    yield from _normalised_parts(config)
    if config.loss_scale_factor is not None and config.loss_agg_mode != "seq-mean-token-sum-norm":
        problem = f"{config.loss_scale_factor:g}, but loss_agg_mode {config.loss_agg_mode} does not use it"
        yield Fault("loss_scale_factor", problem, "remove it, or set loss_agg_mode=seq-mean-token-sum-norm")


def _groups_of_one(config: RlvrConfig) -> Iterator[Fault]:
    if config.num_return_sequences_in_group > 1:
        return
    traits = config.adv_estimator.traits
    by_group = "group" in (config.norm_mean_type, config.norm_std_type) and not traits.needs_turns
    if traits.compares_groups or by_group:
        comparing = f"adv_estimator {config.adv_estimator}" if traits.compares_groups else "normalisation by group"
        problem = f"1, but {comparing} compares rewards within a group: every advantage would be 0"
        others = _estimators(lambda traits: not traits.compares_groups)
        remedy = (
            f"set it to at least 2 (8 is usual), or use an adv_estimator without groups ({others}) and no "
            f"normalisation by group"
        )
        yield Fault("num_return_sequences_in_group", problem, remedy)
    for key in ("dynamic_sampling", "difficulty_mask", "difficulty_loss_weight"):
        if getattr(config, key):
            problem = (
                "set, but num_return_sequences_in_group is 1: it needs the rewards of several responses to one prompt"
            )
            yield Fault(key, problem, "set num_return_sequences_in_group to at least 2, or remove this key")


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
        problem = (
            f"{getattr(config, key)}, but a step has a single response, compared with itself: every advantage would "
            f"be 0"
        )
        yield Fault(key, problem, "raise rollout_batch_size or num_return_sequences_in_group, or change this key")


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
        yield Fault("pass_k", problem, remedy)


def _dynamic_sampling(config: RlvrConfig) -> Iterator[Fault]:
    if config.dynamic_sampling and config.dynamic_sampling.max_num_gen_batches == 1:
        problem = "1: no further batch would be generated to replace dropped groups"
        yield Fault(
            "dynamic_sampling.max_num_gen_batches",
            problem,
            "set it to at least 2 (3 is usual), or remove dynamic_sampling",
        )


def _normalised_parts(config: RlvrConfig) -> Iterator[Fault]:
    """Yield a fault for each key that conflicts with `normalise: group`, which makes the mean reward of every group
    0.
    """
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
                    f"rewards.{domain}.normalise", f"'group', but {reason}", "set it to none, or change the other key"
                )


def _estimator(config: RlvrConfig) -> Iterator[Fault]:
    estimator, traits = config.adv_estimator, config.adv_estimator.traits
    for key in NORM_KEYS:
        scope = getattr(config, key)
        if scope and not traits.normalises and scope != traits.own_scope:
            own = "uses the critic's values as its baseline" if traits.needs_values else "has its own normalisation"
            yield Fault(
                key, f"'{scope}', but adv_estimator {estimator} {own}", "remove it, or set adv_estimator=reinforce"
            )
        if scope == "running" and traits.needs_turns:
            problem = f"'running', but adv_estimator {estimator} normalises the returns of a step's turns"
            yield Fault(key, problem, "set it to batch or group")
    if (
        traits.needs_states
        and config.episode_reward_weight == config.step_reward_weight == 0
        and not estimator.is_users
    ):
        problem = "0, and so is step_reward_weight: every advantage would be 0"
        yield Fault("episode_reward_weight", problem, "set at least one of the two above 0; 1 is usual")
    if config.reward_clip_on == "normalised" and estimator.name not in CLIP_NORMALISED:
        problem = f"'normalised', but adv_estimator {estimator} clips the raw rewards only"
        yield Fault(
            "reward_clip_on", problem, f"set it to raw, or adv_estimator to one of: {', '.join(CLIP_NORMALISED)}"
        )
    if config.reward_clip_on == "normalised" and config.reward_clip is None:
        yield Fault("reward_clip_on", "'normalised', but reward_clip is not set", "set reward_clip, or remove this key")
    if config.gamma != 1 and traits.discounts is None:
        pays = (
            "does not declare that it discounts"
            if estimator.is_users
            else "gives every token of a response the same advantage"
        )
        problem = f"{config.gamma:g}, but adv_estimator {estimator} {pays}"
        others = _estimators(lambda traits: traits.discounts is not None)
        yield Fault("gamma", problem, f"remove it, or set adv_estimator to one of: {others}")
    if traits.needs_states and not config.environments:
        problem = (
            f"'{estimator}' compares turns taken in the same state of an environment, but this run has no environments"
        )
        yield Fault(
            "adv_estimator", problem, "add an environments block, or use grpo, which is equivalent without environments"
        )
    if (
        traits.needs_turns
        and not config.environments
        and not any(map(_may_name_turns, named_rewards(config.rewards).values()))
    ):
        problem = f"'{estimator}', but no reward of this run returns turns: every response would count as a single turn"
        known = ", ".join(rewards_with_turns())
        yield Fault(
            "adv_estimator",
            problem,
            f"set rewards.<domain>.reward to {known} or to your own function, or use reinforce",
        )


def _estimators(wanted: Callable[[EstimatorTraits], bool]) -> str:
    """Return the names of the built-in estimators whose traits satisfy `wanted`. Estimators that credit turns come
    last.
    """
    found = [method for method in ESTIMATORS.values() if wanted(method.traits)]
    return ", ".join(method.name for method in sorted(found, key=lambda method: method.traits.needs_turns))


def _critic(config: RlvrConfig) -> Iterator[Fault]:
    own = {key: names for key, names in readers(ESTIMATORS).items() if key not in COMPARED}
    yield from unread_method_keys(config, "adv_estimator", own)
    estimator = config.adv_estimator
    if not estimator.traits.needs_values:
        if config.critic is not None:
            problem = f"set, but adv_estimator {estimator} uses no critic"
            yield Fault("critic", problem, "remove the block (~critic), or set adv_estimator=gae")
        return
    if config.critic is None:
        problem = f"missing, but adv_estimator {estimator} needs the values of a critic"
        yield Fault(
            "critic", problem, "add a critic block (strategy_name: deepspeed_train), or choose another adv_estimator"
        )
    if config.critic_warmup >= config.max_steps:
        problem = f"{config.critic_warmup}, but max_steps is {config.max_steps}: the policy would never be trained"
        yield Fault("critic_warmup", problem, f"set it below {config.max_steps}; a tenth of the steps is enough")


def _may_name_turns(reward: str) -> bool:
    return ":" in reward or reward in rewards_with_turns()


def _shaping(config: RlvrConfig) -> Iterator[Fault]:
    longest = config.actor_infer.generating_args.max_new_tokens or config.response_length
    if config.overlong_buffer and config.overlong_buffer.len > longest:
        problem = f"{config.overlong_buffer.len} is more than the longest response, {longest} tokens"
        yield Fault("overlong_buffer.len", problem, f"set it to at most {longest}; a quarter of that is usual")
    threshold = config.error_max_len_threshold
    if config.error_max_len_clip and threshold is None:
        remedy = f"set it to a number of tokens, at most {longest}, or set error_max_len_clip=false"
        yield Fault("error_max_len_threshold", "missing, but error_max_len_clip is true", remedy)
    if threshold is not None and "error_max_len_clip" not in config.model_fields_set:
        yield Fault(
            "error_max_len_threshold",
            f"{threshold}, but error_max_len_clip is not set",
            "set error_max_len_clip=true, or remove this key",
        )
    if config.error_max_len_clip and threshold is not None and threshold > longest:
        problem = f"{threshold} is more than the longest response, {longest} tokens: no response would be left out"
        yield Fault("error_max_len_threshold", problem, f"set it to at most {longest}")
    generating = config.actor_infer.generating_args
    if config.max_len_mask and generating.ignore_eos and not generating.stop_strings:
        problem = (
            "true, but with actor_infer.generating_args.ignore_eos every response is truncated and would be left out "
            "of the loss"
        )
        yield Fault("max_len_mask", problem, "set one of the two to false")
    low, high = config.difficulty_low_threshold, config.difficulty_high_threshold
    if config.difficulty_mask and low >= high:
        problem = f"{low:g} is not below difficulty_high_threshold {high:g}: every prompt would be left out of the loss"
        yield Fault("difficulty_low_threshold", problem, "lower it; 0.1 and 0.95 are usual")
    for key in ("difficulty_low_threshold", "difficulty_high_threshold"):
        if key in config.model_fields_set and "difficulty_mask" not in config.model_fields_set:
            yield Fault(
                key,
                f"{getattr(config, key):g}, but difficulty_mask is not set",
                "set difficulty_mask=true, or remove this key",
            )


def _adaptive_kl(config: RlvrConfig) -> Iterator[Fault]:
    if config.target_kl is None:
        if "kl_horizon" in config.model_fields_set:
            problem = f"{config.kl_horizon}, but target_kl is not set, so the KL weight is constant"
            yield Fault("kl_horizon", problem, "set target_kl, or remove this key")
        return
    if not config.add_token_level_kl:
        problem = f"{config.target_kl:g}, but add_token_level_kl is false: there is no KL weight to adapt"
        yield Fault("target_kl", problem, "set add_token_level_kl=true and init_kl_coef, or remove this key")
    responses = config.rollout_batch_size * config.num_return_sequences_in_group
    if LARGEST_ERROR * responses >= config.kl_horizon:
        least = int(LARGEST_ERROR * responses) + 1
        problem = (
            f"{config.kl_horizon} responses, but a step has {responses}: a single step could reduce the KL weight to 0"
        )
        yield Fault(
            "kl_horizon",
            problem,
            f"set it to at least {least}; {10 * responses} adapts the weight over about ten steps",
        )


def credit_warnings(config: RlvrConfig) -> Iterator[str]:
    """Yield warnings about keys of credit assignment that have less effect than expected."""
    traits = config.adv_estimator.traits
    if config.dynamic_sampling and not traits.compares_groups:
        yield (
            f"dynamic_sampling: drops groups whose rewards are all equal, but adv_estimator {config.adv_estimator} "
            f"could learn from them"
        )
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
