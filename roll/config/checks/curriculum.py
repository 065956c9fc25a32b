"""Checks of the curriculum, and of its replay of rare successes.

A replayed group was sampled by an older policy. Its gradient is right if the loss weights every token by the ratio to
that policy, and it may take the place of a group of equal rewards if nothing would be learnt from that one.
"""

from __future__ import annotations

from collections.abc import Iterator

from roll.algorithms.methods import CORRECTIONS, ESTIMATORS, EstimatorTraits
from roll.config.checks.algorithm import stale_token_problems
from roll.config.derived.batch import most_replayed, plan_batch
from roll.config.derived.fixed_roles import teacher_roles
from roll.config.derived.methods import correction_of
from roll.config.schema.curriculum import GroupReplayConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import Fault

REPLAY = "curriculum.replay"


def curriculum_faults(config: RlvrConfig) -> Iterator[Fault]:
    """Yield a fault for each setting of the block `curriculum` that has no effect or contradicts another."""
    own = config.curriculum
    if own is None:
        return
    if own.hard_at_most >= own.solved_at_least:
        problem = f"{own.hard_at_most:g}, but solved_at_least is {own.solved_at_least:g}: no prompt would be learnable"
        yield Fault("curriculum.hard_at_most", problem, "set it below solved_at_least", "contradiction")
    if not own.shares.hard + own.shares.learnable + own.shares.solved:
        problem = "the shares of hard, learnable and solved are all 0, so that solve rates would decide nothing"
        yield Fault("curriculum.shares", problem, "give one of them a share above 0, or remove curriculum", "no_effect")
    if config.replay_from is not None:
        problem = f"given, but the run replays the rollouts of '{config.replay_from}' and draws no prompts"
        yield Fault("curriculum", problem, "remove one of the two", "no_effect")
    if own.replay is not None:
        yield from _never_replayed(config, own.replay)
        yield from _uncorrected(config)
        yield from _teaching_although_equal(config)
        yield from _replacing(config)


def _never_replayed(config: RlvrConfig, own: GroupReplayConfig) -> Iterator[Fault]:
    """Yield a fault for each bound that keeps all groups from being replayed."""
    samples, groups, updates = (
        config.num_return_sequences_in_group,
        config.rollout_batch_size,
        plan_batch(config).updates,
    )
    if samples > 1 and own.solve_rate_at_most < 1 / samples:
        problem = (
            f"{own.solve_rate_at_most:g}, but one of {samples} responses is {1 / samples:.4g}: no group is so rarely "
            f"solved, yet solved"
        )
        remedy = "raise it to at least that share, or raise num_return_sequences_in_group"
        yield Fault(f"{REPLAY}.solve_rate_at_most", problem, remedy, "no_effect")
    if most_replayed(own.share, groups) == 0:
        problem = f"{own.share:g} of a step's {groups} groups is less than one group"
        remedy = f"set it to at least {1 / groups:.4g}, or raise rollout_batch_size"
        yield Fault(f"{REPLAY}.share", problem, remedy, "no_effect")
    if own.staleness_at_most < updates:
        problem = f"{own.staleness_at_most}, but a step makes {updates} updates: all groups are too old in the next one"
        yield Fault(f"{REPLAY}.staleness_at_most", problem, f"set it to at least {updates}", "no_effect")


def _uncorrected(config: RlvrConfig) -> Iterator[Fault]:
    """Yield a fault if the loss would learn from replayed tokens as if the current policy had sampled them."""
    loss, name, correction = config.policy_loss, config.mismatch_correction, correction_of(config)
    problems, changes = stale_token_problems(config)
    if correction is not None and not name.is_users and correction.weight is None:
        weighting = " or ".join(other.name for other in CORRECTIONS.values() if other.traits.weight)
        problems.append(f"mismatch_correction {name} rejects tokens, but weights none")
        changes.append(f"mismatch_correction to {weighting}")
    if "topr_positive_weight" in loss.keys:
        problems.append(f"policy_loss {loss} weights good responses by no ratio")
        changes.append("policy_loss=ppo")
    if problems:
        problem = f"given: replayed tokens come from an older policy, and {'; '.join(problems)}"
        yield Fault(REPLAY, problem, f"set {' and '.join(changes)}, or remove this block", "contradiction")


def _teaching_although_equal(config: RlvrConfig) -> Iterator[Fault]:
    """Yield a fault for each setting with which a group of equal rewards teaches something, so that its replacement
    would lose that.
    """
    estimator = config.adv_estimator
    if not compares_alone(estimator.traits):
        others = ", ".join(method.name for method in ESTIMATORS.values() if compares_alone(method.traits))
        problem = f"given, but adv_estimator {estimator} learns from groups of equal rewards, too, which it would drop"
        yield Fault(REPLAY, problem, f"set adv_estimator to one of: {others}; or remove this block", "contradiction")
    reasons = {
        "whiten_advantages": bool(config.whiten_advantages),  # it subtracts the mean of the step, from a 0 too
        "add_token_level_kl": config.add_token_level_kl,
        "self_distillation": config.self_distillation is not None,
        next(iter(teacher_roles(config)), "teacher"): bool(teacher_roles(config)),
    }
    for key in (key for key, holds in reasons.items() if holds):
        problem = f"given, but with {key} groups of equal rewards teach something, too, and it would drop them"
        yield Fault(REPLAY, problem, f"remove {key} or this block", "contradiction")


def compares_alone(traits: EstimatorTraits) -> bool:
    """Whether all advantages of a group are 0 if its rewards are equal."""
    return traits.compares_groups and not traits.credits_tokens and not traits.whitens


def _replacing(config: RlvrConfig) -> Iterator[Fault]:
    """Yield a fault for each setting that replaces groups by itself."""
    filters = {
        f"rewards.{domain}.query_filter_config": reward.query_filter_config
        for domain, reward in config.rewards.items()
        if reward.query_filter_config and reward.query_filter_config.type != "no_filter"
    }
    for key in (["dynamic_sampling"] if config.dynamic_sampling else []) + list(filters):
        problem = f"given, but {key} already replaces groups, by newly sampled ones"
        yield Fault(REPLAY, problem, f"remove {key} or this block", "exclusive")
