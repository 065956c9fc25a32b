"""Batch arithmetic: numbers of sequences and tokens per step, update and forward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roll.config.derived.placement import model_roles, ranks, replica_size, vllm_config
from roll.config.schema.model import GeneratingConfig
from roll.config.schema.offline import DpoConfig, OfflineConfig, RewardModelConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import ActorTrainConfig, LearnerConfig, RowsTrainConfig
from roll.errors import Fault


@dataclass(frozen=True)
class BatchPlan:
    """Numbers of sequences and tokens in one training step."""

    prompts_per_step: int
    """Number of prompts; 0 if the data contain the responses."""
    sequences_per_step: int
    """Number of sequences. If rows are pairs, this and the next field count pairs."""
    sequences_per_update: int
    updates_per_step: int
    """Number of optimizer updates per step, over all `ppo_epochs`."""
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
    single = config.prompt_length + config.response_length
    return config.sequence_length or single if isinstance(config, RlvrConfig) else single


def has_pairs(config: Config | OfflineConfig) -> bool:
    """Whether a row is a pair of sequences, which stay together in a micro-batch."""
    return isinstance(config, RewardModelConfig) or (isinstance(config, DpoConfig) and config.preference_loss.traits.rows == "pairs")


def sequences_per_update(role: LearnerConfig) -> int:
    """Return `per_device_train_batch_size` x `gradient_accumulation_steps` x replicas. Ranks that share sequences form a replica."""
    replicas = max(1, ranks(role) // replica_size(role))
    return role.training_args.per_device_train_batch_size * role.training_args.gradient_accumulation_steps * replicas


def plan_batch(config: Config) -> BatchPlan:
    """Return the batch plan of a configuration that has no batch faults."""
    update = sequences_per_update(learner(config)[1])
    longest = longest_sequence(config)
    if not isinstance(config, RlvrConfig):
        return BatchPlan(0, update, update, 1, longest, longest * 2 if has_pairs(config) else longest)
    step = config.rollout_batch_size * config.num_return_sequences_in_group
    return BatchPlan(config.rollout_batch_size, step, update, step // update * config.ppo_epochs, longest, longest)


def batch_faults(config: Config) -> list[Fault]:
    """Return faults of batch sizes that are not divisible, of lengths that do not fit, and of sampling."""
    faults = _engine_faults(config)
    if not isinstance(config, RlvrConfig):
        return faults
    learners = {name: role for name, role in model_roles(config).items() if isinstance(role, LearnerConfig)}
    faults += [fault for name, role in learners.items() for fault in _update_faults(name, role, config)]
    return faults + _sampling_faults(config)


def _update_faults(name: str, role: LearnerConfig, config: RlvrConfig) -> list[Fault]:
    step, update = config.rollout_batch_size * config.num_return_sequences_in_group, sequences_per_update(role)
    if step % update == 0:
        return []
    problem = (
        f"{step} sequences a step (rollout_batch_size {config.rollout_batch_size} x num_return_sequences_in_group "
        f"{config.num_return_sequences_in_group}) are not a whole number of updates of {update}"
    )
    one_pass = update // role.training_args.gradient_accumulation_steps
    if step % one_pass == 0:
        remedy = f"for one update per step, set it to {step // one_pass}; for more, to a divisor of that"
    else:
        remedy = f"make rollout_batch_size x num_return_sequences_in_group a multiple of {one_pass} (batch per device x replicas)"
    return [Fault(f"{name}.training_args.gradient_accumulation_steps", problem, remedy)]


def _engine_faults(config: Config) -> list[Fault]:
    longest, faults = longest_sequence(config), []
    said = "sequence_length" if isinstance(config, RlvrConfig) and config.sequence_length else "prompt_length + response_length"
    for name, role in model_roles(config).items():
        engine, where = vllm_config(role), f"{name}.strategy_args.strategy_config"
        if engine is None:
            continue
        if engine.max_model_len is not None and engine.max_model_len < longest:
            problem = f"{engine.max_model_len} is less than {said} = {longest}"
            faults.append(Fault(f"{where}.max_model_len", problem, f"give at least {longest}, or remove the key"))
        if engine.max_num_batched_tokens < engine.max_num_seqs:
            problem = f"{engine.max_num_batched_tokens} is less than max_num_seqs {engine.max_num_seqs}; a step needs a token per sequence"
            faults.append(Fault(f"{where}.max_num_batched_tokens", problem, f"give at least {engine.max_num_seqs}; 8192 is usual"))
    return faults


def _sampling_faults(config: RlvrConfig) -> list[Fault]:
    faults, samples = [], config.num_return_sequences_in_group
    limits = {"actor_infer": config.actor_infer.generating_args}
    held_out = _held_out_sampling(config)
    limits |= held_out
    for name, sampling in limits.items():
        if sampling.max_new_tokens and sampling.max_new_tokens > config.response_length:
            problem = f"{sampling.max_new_tokens} is more than response_length {config.response_length}"
            faults.append(
                Fault(f"{name}.generating_args.max_new_tokens", problem, f"give at most {config.response_length}, or remove the key")
            )
    for name, sampling in held_out.items():
        if sampling.temperature == 0 and (sampling.num_return_sequences or 1) > 1:
            problem = f"{sampling.num_return_sequences}, but temperature is 0 (greedy), so all of them would be equal"
            faults.append(Fault(f"{name}.generating_args.num_return_sequences", problem, "remove it, or give a temperature above 0"))
    rollout = config.actor_infer.generating_args
    if rollout.num_return_sequences not in (None, samples):
        problem = f"{rollout.num_return_sequences}, but num_return_sequences_in_group is {samples}"
        faults.append(Fault("actor_infer.generating_args.num_return_sequences", problem, "remove it, or make both values equal"))
    if rollout.temperature == 0:
        problem = "0 is greedy, so that rollouts would not explore; the trainer also divides its logits by it"
        faults.append(Fault("actor_infer.generating_args.temperature", problem, "give a temperature above 0; 1.0 is usual"))
    return faults


def _held_out_sampling(config: RlvrConfig) -> dict[str, GeneratingConfig]:
    """Return the sampling parameters of held-out prompts, by the path of the block above them."""
    if config.validation is None:
        return {}
    own = {f"validation.sets.{name}": one.generating_args for name, one in config.validation.sets.items() if one.generating_args}
    return {"validation": config.validation.generating_args} | own


def age_limit(ratio: float, batches: int) -> int:
    """Return the largest number of steps between drawing and using a group, for a `rollout_window` of `batches` batches."""
    return math.ceil(ratio) + batches - 1
