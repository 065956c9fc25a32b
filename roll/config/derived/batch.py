"""Batch arithmetic: numbers of sequences and tokens per step, update and forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from roll.config.derived.hints import longest_teacher_prompt
from roll.config.derived.placement import generates, model_roles, ranks
from roll.config.schema.model import GeneratingConfig
from roll.config.schema.offline import DpoConfig, OfflineConfig, RewardModelConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import ActorTrainConfig, LearnerConfig, RoleConfig, RowsTrainConfig
from roll.errors import Fault

MANY_UPDATES = 32
"""Number of updates of a step above which the plan warns."""


@dataclass(frozen=True)
class BatchPlan:
    """Numbers of sequences and tokens in one training step."""

    prompts_per_step: int
    """Number of prompts; 0 if the data contain the responses."""
    sequences_per_step: int
    """Number of sequences. If rows are pairs, this and the next field count pairs."""
    sequences_per_update: int
    updates: int
    """Number of optimizer updates of the policy in one step, over all `ppo_epochs`."""
    longest_sequence: int
    """Largest number of tokens of a sequence: prompt and response, or episode."""
    longest_example: int
    """Largest number of tokens of a sequence or pair, which is never split over micro-batches."""


def learner(config: Config | OfflineConfig) -> tuple[str, ActorTrainConfig]:
    """Return the name of the trained role, and the role."""
    ((name, role),) = [(name, role) for name, role in model_roles(config).items() if isinstance(role, ActorTrainConfig)]
    return name, role


def row_learner(config: OfflineConfig) -> tuple[str, RowsTrainConfig]:
    """Return the name of the role that an offline pipeline trains, and the role."""
    name, role = learner(config)
    assert isinstance(role, RowsTrainConfig), "offline pipelines train on rows"
    return name, role


def longest_sequence(config: Config | OfflineConfig) -> int:
    """Return the largest number of tokens of a training sequence: prompt and response, or episode in an environment."""
    whole = config.sequence_length if isinstance(config, RlvrConfig) else config.max_length
    return whole or config.prompt_length + config.response_length


def longest_taught(config: Config | OfflineConfig) -> int:
    """Return the largest number of tokens that a self-teacher reads: its prompt and a response. 0 without one."""
    if not isinstance(config, RlvrConfig) or config.self_distillation is None:
        return 0
    return longest_teacher_prompt(config) + config.response_length


def has_pairs(config: Config | OfflineConfig) -> bool:
    """Whether a row is a pair of sequences, which stay together in a micro-batch."""
    return isinstance(config, RewardModelConfig) or (
        isinstance(config, DpoConfig) and config.preference_loss.traits.rows == "pairs"
    )


def sequences_per_step(config: RlvrConfig) -> int:
    """Return the number of sequences of a step: responses, or episodes."""
    return config.rollout_batch_size * config.num_return_sequences_in_group


def accumulates(role: LearnerConfig) -> bool:
    """Whether the role's own keys say the size of an update, as in ROLL. If not, `updates_per_step` does in `rlvr`."""
    return role.training_args.gradient_accumulation_steps is not None


def sequences_per_update(config: Config, role: LearnerConfig) -> int:
    """Return the number of sequences of one update, or of pairs if the rows are pairs.

    The role's own keys give `per_device_train_batch_size` x `gradient_accumulation_steps` x replicas, where ranks that
    share sequences form a replica. In `rlvr` without `gradient_accumulation_steps` it is the sequences of a step
    divided by `updates_per_step`, for any number of ranks.
    """
    if isinstance(config, RlvrConfig) and not accumulates(role):
        return max(1, sequences_per_step(config) // config.updates_per_step)
    replicas = max(1, ranks(role) // role.strategy_args.traits.replica_size)
    return (
        role.training_args.per_device_train_batch_size
        * (role.training_args.gradient_accumulation_steps or 1)
        * replicas
    )


def plan_batch(config: Config) -> BatchPlan:
    """Return the batch plan of a configuration that has no batch faults."""
    update = sequences_per_update(config, learner(config)[1])
    longest = longest_sequence(config)
    if not isinstance(config, RlvrConfig):
        return BatchPlan(0, update, update, 1, longest, longest * 2 if has_pairs(config) else longest)
    step = sequences_per_step(config)
    return BatchPlan(config.rollout_batch_size, step, update, step // update * config.ppo_epochs, longest, longest)


def batch_faults(config: Config) -> list[Fault]:
    """Return faults of batch sizes that are not divisible, and of sampling."""
    if not isinstance(config, RlvrConfig):
        return []
    learners = {name: role for name, role in model_roles(config).items() if isinstance(role, LearnerConfig)}
    faults = [fault for name, role in learners.items() for fault in _update_faults(name, role, config)]
    return faults + _sampling_faults(config)


def _update_faults(name: str, role: LearnerConfig, config: RlvrConfig) -> list[Fault]:
    if not accumulates(role):
        return _undivided(config)
    where, accumulated = (
        f"{name}.training_args.gradient_accumulation_steps",
        role.training_args.gradient_accumulation_steps or 1,
    )
    if name == "actor_train" and "updates_per_step" in config.model_fields_set:
        problem = f"{config.updates_per_step}, but {where}, which is {accumulated}, also says the size of an update"
        return [Fault("updates_per_step", problem, f"remove one of them: ~updates_per_step or ~{where}", "exclusive")]
    step, update = sequences_per_step(config), sequences_per_update(config, role)
    if step % update == 0:
        return []
    problem, one_pass = f"{_sequences(config)} are not a whole number of updates of {update}", update // accumulated
    if step % one_pass == 0:
        remedy = f"for one update per step, set it to {step // one_pass}; for more, to a divisor of that"
    else:
        remedy = (
            f"make rollout_batch_size x num_return_sequences_in_group a multiple of {one_pass} (batch per device x "
            f"replicas)"
        )
    return [Fault(where, problem, f"{remedy}; or use updates_per_step instead", "not_divisible")]


def _undivided(config: RlvrConfig) -> list[Fault]:
    """Return a fault if a step's sequences cannot be divided into `updates_per_step` equal updates."""
    step, updates = sequences_per_step(config), config.updates_per_step
    if step % updates == 0:
        return []
    below = max(number for number in range(1, min(updates, step) + 1) if step % number == 0)
    above = next((number for number in range(updates, step + 1) if step % number == 0), None)
    nearest = f"{below} or {above}" if above else str(below)
    problem = f"{updates}, but {_sequences(config)} cannot be divided into {updates} equal updates"
    return [Fault("updates_per_step", problem, f"set it to {nearest}, or change rollout_batch_size", "not_divisible")]


def _sequences(config: RlvrConfig) -> str:
    return (
        f"{sequences_per_step(config)} sequences a step (rollout_batch_size {config.rollout_batch_size} x "
        f"num_return_sequences_in_group {config.num_return_sequences_in_group})"
    )


def batch_warnings(config: Config) -> Iterator[str]:
    """Yield a warning for each role whose own keys make many small updates of a step, or have no effect."""
    for name, role in model_roles(config).items():
        if why := _infers_otherwise(name, role):
            yield f"{name}.infer_batch_size: {role.infer_batch_size} has no effect: {why}"
    if not isinstance(config, RlvrConfig):
        return
    for name, role in model_roles(config).items():
        if not isinstance(role, LearnerConfig):
            continue
        update, where = sequences_per_update(config, role), f"{name}.training_args"
        if accumulates(role) and (updates := sequences_per_step(config) // update) > MANY_UPDATES:
            yield (
                f"{where}: per_device_train_batch_size x gradient_accumulation_steps x replicas = {update} sequences "
                f"make {updates} "
                "updates of each step, the last ones far off policy; remove both keys for one update a step "
                "(updates_per_step)"
            )
        unread = not accumulates(role) and role.max_tokens_per_microbatch is not None
        if unread and "per_device_train_batch_size" in role.training_args.model_fields_set:
            yield (
                f"{where}.per_device_train_batch_size: has no effect without gradient_accumulation_steps: with "
                f"updates_per_step "
                f"{config.updates_per_step}, an update has {update} sequences, and max_tokens_per_microbatch bounds "
                f"memory; remove it"
            )


def _infers_otherwise(name: str, role: RoleConfig) -> str | None:
    """Return why a role's `infer_batch_size` has no effect. None if it has one, or is the default."""
    if role.infer_batch_size == type(role).model_fields["infer_batch_size"].default:
        return None
    if isinstance(role, LearnerConfig):
        return "a role that trains uses its training micro-batches for all passes; set max_tokens_per_microbatch"
    if generates(name, role):
        return "a role that generates batches its requests itself; remove the key"
    return "max_tokens_per_microbatch is set; remove one of them" if role.max_tokens_per_microbatch else None


def _sampling_faults(config: RlvrConfig) -> list[Fault]:
    faults, samples = [], config.num_return_sequences_in_group
    limits = {"actor_infer": config.actor_infer.generating_args}
    held_out = _held_out_sampling(config)
    limits |= held_out
    for name, sampling in limits.items():
        if sampling.max_new_tokens and sampling.max_new_tokens > config.response_length:
            problem = f"{sampling.max_new_tokens} is more than response_length {config.response_length}"
            faults.append(
                Fault(
                    f"{name}.generating_args.max_new_tokens",
                    problem,
                    f"give at most {config.response_length}, or remove the key",
                    "too_large",
                )
            )
    for name, sampling in held_out.items():
        if sampling.temperature == 0 and (sampling.num_return_sequences or 1) > 1:
            problem = f"{sampling.num_return_sequences}, but temperature is 0 (greedy), so all of them would be equal"
            faults.append(
                Fault(
                    f"{name}.generating_args.num_return_sequences",
                    problem,
                    "remove it, or give a temperature above 0",
                    "no_effect",
                )
            )
    rollout = config.actor_infer.generating_args
    if rollout.num_return_sequences not in (None, samples):
        problem = f"{rollout.num_return_sequences}, but num_return_sequences_in_group is {samples}"
        faults.append(
            Fault(
                "actor_infer.generating_args.num_return_sequences",
                problem,
                "remove it, or make both values equal",
                "contradiction",
            )
        )
    if rollout.temperature == 0:
        problem = "0 is greedy, so that rollouts would not explore; the trainer also divides its logits by it"
        faults.append(
            Fault(
                "actor_infer.generating_args.temperature",
                problem,
                "give a temperature above 0; 1.0 is usual",
                "out_of_range",
            )
        )
    return faults


def _held_out_sampling(config: RlvrConfig) -> dict[str, GeneratingConfig]:
    """Return the sampling parameters of held-out prompts, by the path of the block above them."""
    if config.validation is None:
        return {}
    own = {
        f"validation.sets.{name}": one.generating_args
        for name, one in config.validation.sets.items()
        if one.generating_args
    }
    return {"validation": config.validation.generating_args} | own


def most_replayed(share: float, groups: int) -> int:
    """Return the largest number of replayed groups in a step of `groups`: a share of it, rounded down."""
    return int(share * groups + 1e-6)  # 0.29 * 100 is slightly below 29


def age_limit(ratio: float, batches: int) -> int:
    """Return the largest number of steps between drawing and using a group, for a window of `batches` batches."""
    return math.ceil(ratio) + batches - 1
