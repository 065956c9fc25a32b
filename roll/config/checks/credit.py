"""Checks the keys of credit assignment: advantages, the critic, shaping of rewards, dynamic sampling, KL in the reward."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from roll.algorithms.methods.adaptive_kl import LARGEST_ERROR
from roll.algorithms.methods.base import readers
from roll.algorithms.methods.estimators import ESTIMATORS, NORM_KEYS, EstimatorTraits
from roll.config.derived.rewards import named_rewards
from roll.config.schema.faults import unread_keys
from roll.config.schema.rlvr import RlvrConfig
from roll.config.shipped import rewards_with_turns
from roll.errors import Fault

COMPARED = {"gamma", "value_clip", *NORM_KEYS}
"""Keys that only some estimators read, with messages of their own. ROLL's files have `value_clip` with any estimator."""


def credit_faults(config: RlvrConfig) -> Iterator[Fault]:
    """Return contradictions among the keys that turn rewards into advantages."""
    yield from _groups_of_one(config)
    yield from _best_of(config)
    yield from _estimator(config)
    yield from _critic(config)
    yield from _shaping(config)
    yield from _adaptive_kl(config)
    yield from _dynamic_sampling(config)
    yield from _normalised_parts(config)
    if config.loss_scale_factor is not None and config.loss_agg_mode != "seq-mean-token-sum-norm":
        problem = f"{config.loss_scale_factor:g}, but loss_agg_mode {config.loss_agg_mode} does not divide by it"
        yield Fault("loss_scale_factor", problem, "remove it, or set loss_agg_mode=seq-mean-token-sum-norm")


def _groups_of_one(config: RlvrConfig) -> Iterator[Fault]:
    if config.num_return_sequences_in_group > 1:
        return
    traits = config.adv_estimator.traits
    by_group = "group" in (config.norm_mean_type, config.norm_std_type) and not traits.needs_turns
    if traits.compares_groups or by_group:
        problem = f"1, and adv_estimator {config.adv_estimator} compares rewards within a group: every advantage would be 0"
        others = _estimators(lambda traits: not traits.compares_groups)
        remedy = f"give at least 2 (8 is usual), or an adv_estimator that needs no groups ({others}) without group norms"
        yield Fault("num_return_sequences_in_group", problem, remedy)
    for key in ("dynamic_sampling", "difficulty_mask", "difficulty_loss_weight"):
        if getattr(config, key):
            problem = "given, but num_return_sequences_in_group is 1: it looks at the rewards of several responses to one prompt"
            yield Fault(key, problem, "give at least 2 samples, or remove it")


def _best_of(config: RlvrConfig) -> Iterator[Fault]:
    samples = config.num_return_sequences_in_group
    if "pass_k" in config.adv_estimator.keys and 1 < samples < config.pass_k:
        problem = f"{config.pass_k}, but num_return_sequences_in_group is {samples}: a prompt has fewer than {config.pass_k} samples"
        yield Fault("pass_k", problem, f"give at most {samples} (fewer than the samples: less variance), or more samples")


def _dynamic_sampling(config: RlvrConfig) -> Iterator[Fault]:
    if config.dynamic_sampling and config.dynamic_sampling.max_num_gen_batches == 1:
        problem = "1: no group would be drawn in place of another"
        yield Fault("dynamic_sampling.max_num_gen_batches", problem, "give at least 2 (3 is usual), or remove dynamic_sampling")


def _normalised_parts(config: RlvrConfig) -> Iterator[Fault]:
    """Return conflicts with rewards whose mean over every group is 0."""
    traits = config.adv_estimator.traits
    reasons = {
        "num_return_sequences_in_group is 1: every reward would be 0": config.num_return_sequences_in_group == 1,
        f"adv_estimator {config.adv_estimator} compares with a greedy response, which is not of the group": traits.needs_greedy,
        f"adv_estimator {config.adv_estimator} credits turns, which are not normalised": traits.needs_turns,
        "difficulty_mask looks at the mean reward of a group, which would be 0": config.difficulty_mask,
        "difficulty_loss_weight looks at the mean reward of a group, which would be 0": config.difficulty_loss_weight,
        "error_max_len_clip treats responses with a reward not above 0 as wrong": config.error_max_len_clip,
    }
    for domain, reward in config.rewards.items():
        if reward.normalise == "group":
            for reason in (reason for reason, holds in reasons.items() if holds):
                yield Fault(f"rewards.{domain}.normalise", f"'group', but {reason}", "use none, or change the other key")


def _estimator(config: RlvrConfig) -> Iterator[Fault]:
    estimator, traits = config.adv_estimator, config.adv_estimator.traits
    for key in NORM_KEYS:
        scope = getattr(config, key)
        if scope and not traits.normalises and scope != traits.own_scope:
            own = "compares with the critic's values" if traits.needs_values else "normalises by itself"
            yield Fault(key, f"'{scope}', but adv_estimator {estimator} {own}", "remove it, or set adv_estimator=reinforce")
        if scope == "running" and traits.needs_turns:
            yield Fault(key, f"'running', but adv_estimator {estimator} normalises the returns of a step's turns", "use batch or group")
    if config.gamma != 1 and traits.discounts is None:
        pays = "does not declare that it discounts" if estimator.is_users else "pays every token of a response alike"
        problem = f"{config.gamma:g}, but adv_estimator {estimator} {pays}"
        others = _estimators(lambda traits: traits.discounts is not None)
        yield Fault("gamma", problem, f"remove it, or set adv_estimator to one of: {others}")
    if traits.needs_states and not config.environments:
        problem = f"'{estimator}' compares turns taken in the same state of an environment, and this run has no environments"
        yield Fault("adv_estimator", problem, "add an environments block, or use grpo, to which it reduces without one")
    if traits.needs_turns and not config.environments and not any(map(_may_name_turns, named_rewards(config.rewards).values())):
        problem = f"'{estimator}', but no reward of this run names turns: every response would be a single turn"
        known = ", ".join(rewards_with_turns())
        yield Fault("adv_estimator", problem, f"set rewards.<domain>.reward to {known} or to your own function, or use reinforce")


def _estimators(wanted: Callable[[EstimatorTraits], bool]) -> str:
    """Return the names of the built-in estimators with some traits. Those that credit turns come last."""
    found = [method for method in ESTIMATORS.values() if wanted(method.traits)]
    return ", ".join(method.name for method in sorted(found, key=lambda method: method.traits.needs_turns))


def _critic(config: RlvrConfig) -> Iterator[Fault]:
    own = {key: names for key, names in readers(ESTIMATORS).items() if key not in COMPARED}
    yield from unread_keys(config, "adv_estimator", own)
    estimator = config.adv_estimator
    if not estimator.traits.needs_values:
        if config.critic is not None:
            problem = f"given, but adv_estimator {estimator} uses no values"
            yield Fault("critic", problem, "remove the block (~critic), or set adv_estimator=gae")
        return
    if config.critic is None:
        problem = f"missing, and adv_estimator {estimator} takes advantages against a critic's values"
        yield Fault("critic", problem, "add a critic block (strategy_name: deepspeed_train), or choose another adv_estimator")
    if config.critic_warmup >= config.max_steps:
        problem = f"{config.critic_warmup} of max_steps {config.max_steps}: the policy would never learn"
        yield Fault("critic_warmup", problem, f"give less than {config.max_steps}; a tenth of the steps is ample")


def _may_name_turns(reward: str) -> bool:
    return ":" in reward or reward in rewards_with_turns()


def _shaping(config: RlvrConfig) -> Iterator[Fault]:
    longest = config.actor_infer.generating_args.max_new_tokens or config.response_length
    if config.overlong_buffer and config.overlong_buffer.len > longest:
        problem = f"{config.overlong_buffer.len} is more than the longest response, {longest} tokens"
        yield Fault("overlong_buffer.len", problem, f"give at most {longest}; a quarter of it is usual")
    threshold = config.error_max_len_threshold
    if config.error_max_len_clip and threshold is None:
        remedy = f"give a number of tokens, up to {longest}, or set error_max_len_clip=false"
        yield Fault("error_max_len_threshold", "missing, but error_max_len_clip is true", remedy)
    if threshold is not None and "error_max_len_clip" not in config.model_fields_set:
        yield Fault(
            "error_max_len_threshold", f"{threshold}, but error_max_len_clip is not given", "set error_max_len_clip=true, or remove it"
        )
    if config.error_max_len_clip and threshold is not None and threshold > longest:
        problem = f"{threshold} is more than the longest response, {longest} tokens: nothing would be left out"
        yield Fault("error_max_len_threshold", problem, f"give at most {longest}")
    generating = config.actor_infer.generating_args
    if config.max_len_mask and generating.ignore_eos and not generating.stop_strings:
        problem = "true, but with actor_infer.generating_args.ignore_eos every response is truncated: nothing would be learnt"
        yield Fault("max_len_mask", problem, "set one of the two to false")
    low, high = config.difficulty_low_threshold, config.difficulty_high_threshold
    if config.difficulty_mask and low >= high:
        problem = f"{low:g} is not below difficulty_high_threshold {high:g}: no prompt would be learnt from"
        yield Fault("difficulty_low_threshold", problem, "give a lower one; 0.1 and 0.95 are usual")
    for key in ("difficulty_low_threshold", "difficulty_high_threshold"):
        if key in config.model_fields_set and "difficulty_mask" not in config.model_fields_set:
            yield Fault(key, f"{getattr(config, key):g}, but difficulty_mask is not given", "set difficulty_mask=true, or remove it")


def _adaptive_kl(config: RlvrConfig) -> Iterator[Fault]:
    if config.target_kl is None:
        if "kl_horizon" in config.model_fields_set:
            problem = f"{config.kl_horizon}, but target_kl is not given: the weight is constant"
            yield Fault("kl_horizon", problem, "give target_kl, or remove it")
        return
    if not config.add_token_level_kl:
        problem = f"{config.target_kl:g}, but add_token_level_kl is false: there is no weight to adapt"
        yield Fault("target_kl", problem, "set add_token_level_kl=true and init_kl_coef, or remove it")
    responses = config.rollout_batch_size * config.num_return_sequences_in_group
    if LARGEST_ERROR * responses >= config.kl_horizon:
        least = int(LARGEST_ERROR * responses) + 1
        problem = f"{config.kl_horizon} responses, and a step has {responses}: one step could bring the weight to 0"
        yield Fault("kl_horizon", problem, f"give at least {least}; {10 * responses} adapts over some ten steps")


def credit_warnings(config: RlvrConfig) -> Iterator[str]:
    """Return warnings about keys of credit assignment that have less effect than expected."""
    traits = config.adv_estimator.traits
    if config.dynamic_sampling and not traits.compares_groups:
        yield f"dynamic_sampling: drops groups whose rewards are all equal, and adv_estimator {config.adv_estimator} could learn from them"
    if config.whiten_advantages and traits.whitens:
        yield f"whiten_advantages: adv_estimator {config.adv_estimator} whitens by itself; remove the key"
    if config.value_clip is not None and not traits.needs_values:
        yield f"value_clip: has no effect with adv_estimator {config.adv_estimator}, which has no critic; remove the key"
    if traits.needs_values and not config.whiten_advantages:
        yield "whiten_advantages: false; PPO is usually run with true, which frees the step size from the scale of rewards and values"
    if config.critic and "num_train_epochs" in config.critic.training_args.model_fields_set:
        yield "critic.training_args.num_train_epochs: has no effect here; RLVR ends after max_steps"
