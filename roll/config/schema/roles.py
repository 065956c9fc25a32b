"""Roles, and the keys that all experiments have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from roll.config.schema.base import (
    LONGEST_NAME,
    Name,
    NonNegativeInt,
    Number,
    PathText,
    PositiveFloat,
    PositiveInt,
    Ranks,
    Seconds,
    Seed,
    StrictConfig,
    VariableText,
)
from roll.config.schema.engine import (
    DeepSpeedInferStrategyConfig,
    DeepSpeedTrainStrategyConfig,
    HfInferStrategyConfig,
    StrategyConfig,
    VllmStrategyConfig,
)
from roll.config.schema.model import DataConfig, GeneratingConfig, ModelConfig, TrainingConfig
from roll.config.schema.model_rewards import ModelRewardKeys, ServingStrategy

SET_NAME = r"^[A-Za-z0-9_.-]+$"


class RoleConfig(StrictConfig):
    """A group of Ray actors that do one job on a set of devices."""

    model_args: ModelConfig = Field(default_factory=lambda: ModelConfig.model_validate({}), description="The model.")
    strategy_args: StrategyConfig = Field(description="The backend.")
    device_mapping: tuple[NonNegativeInt, ...] | None = Field(
        None, description="GPUs of the role, counted over all nodes: a list, or `list(range(0,16))`. Without it the role runs on the CPU."
    )
    world_size: PositiveInt | None = Field(None, description="Workers of a role that runs on the CPU; 1 if not given.")
    max_tokens_per_microbatch: PositiveInt | None = Field(
        None,
        description="Token budget of one forward pass; sequences are packed up to it. "
        "If not given: the role's batch size times `prompt_length + response_length`, or times `sequence_length` with environments.",
    )
    infer_batch_size: PositiveInt = Field(1, description="Sequences behind the default token budget of a log-prob pass.")
    system_envs: dict[str, VariableText] = Field(default_factory=dict, description="Environment variables of the role's processes.")


class LearnerConfig(RoleConfig):
    """A model that learns."""

    strategy_args: DeepSpeedTrainStrategyConfig = Field(description="The backend.")
    training_args: TrainingConfig = Field(default_factory=lambda: TrainingConfig.model_validate({}), description="Optimizer and batch.")


class CriticConfig(LearnerConfig):
    """The value function of `adv_estimator: gae`: a model with a head of one number."""


class ActorTrainConfig(LearnerConfig):
    """The policy that learns."""

    data_args: DataConfig | None = Field(None, description="The prompts; not needed where environments make their own tasks (`rows`).")


class RowsTrainConfig(ActorTrainConfig):
    """A model that learns from given rows."""

    data_args: DataConfig = Field(description="The rows with their responses.")


class ActorInferConfig(RoleConfig):
    """The policy that generates."""

    strategy_args: Annotated[VllmStrategyConfig | HfInferStrategyConfig, Field(discriminator="strategy_name")] = Field(
        description="The backend."
    )
    generating_args: GeneratingConfig = Field(
        default_factory=lambda: GeneratingConfig.model_validate({}), description="Sampling of rollouts."
    )


class ReferenceConfig(RoleConfig):
    """The policy that KL terms compare with."""

    strategy_args: Annotated[HfInferStrategyConfig | DeepSpeedInferStrategyConfig, Field(discriminator="strategy_name")] = Field(
        description="The backend."
    )


class DomainTeacherConfig(ReferenceConfig):
    """A teacher of some domains."""

    domains: tuple[Name, ...] = Field(min_length=1, description="The domains whose responses it teaches.")


class FilterBoundsConfig(StrictConfig):
    """Bounds of a filter of groups."""

    threshold_down: Number | None = Field(None, description="`mean_filter`: a group whose mean reward is not above this is replaced.")
    threshold_up: Number | None = Field(None, description="`mean_filter`: a group whose mean reward is not below this is replaced.")
    std_threshold: Number | None = Field(
        None, description="`std_filter`: a group whose rewards have a standard deviation not above this is replaced."
    )


class QueryFilterConfig(StrictConfig):
    """A filter of a domain's groups.

    Others are drawn in place of those that it refuses, as by `dynamic_sampling`.
    """

    type: Literal["no_filter", "mean_filter", "std_filter"] = Field(
        "no_filter", description="Filter by the mean or by the standard deviation of a group's rewards, or keep every group of the domain."
    )
    filter_args: FilterBoundsConfig = Field(
        default_factory=lambda: FilterBoundsConfig.model_validate({}), description="The filter's bounds."
    )


class ServedConfig(RoleConfig):
    """A model that gives rewards. Made of the keys of its domain; see `derived/reward_roles.py`."""

    strategy_args: ServingStrategy = Field(description="The backend.")


class JudgeConfig(ServedConfig):
    """A model that writes verdicts."""


class ScorerConfig(ServedConfig):
    """A classifier whose score is the reward."""


class RewardPartConfig(StrictConfig):
    """One of the rewards that a domain adds up."""

    reward: str | None = Field(None, description="Name of the reward function; the part's own name if not given.")
    reward_args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")
    group: bool = Field(False, description="The function is given all responses to a prompt at once.")
    weight: Number = Field(1.0, description="Factor of the part in the sum.")
    failed_value: Number = Field(0.0, description="The part's value for a response from which it could read no answer.")


class RewardConfig(ModelRewardKeys):
    """One domain's reward: a function, or a sum of several, run in processes that can be ended; or a model."""

    reward: str | None = Field(None, description="Name of the reward function; the domain's own name if not given.")
    reward_args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")
    group: bool = Field(False, description="The function is given all responses to a prompt at once.")
    parts: dict[Name, RewardPartConfig] = Field(
        default_factory=dict, description="Rewards by name that are added up, in place of `reward`."
    )
    normalise: Literal["none", "group"] = Field(
        "none",
        description="`group` brings each part to mean 0 and standard deviation 1 within the group before it is weighted and added up.",
    )
    tag_included: tuple[str, ...] | None = Field(
        None, description="Values of the `tag` column that this domain scores; the domain's name if not given."
    )
    world_size: Ranks = Field(1, description="Worker processes; of a model on the CPU its engines.")
    concurrency: PositiveInt = Field(1, le=65536, description="Calls of an `async def` reward that run side by side in one process.")
    timeout: Seconds = Field(10.0, description="Deadline of one call of a reward, in seconds.")
    memory_gib: PositiveFloat = Field(
        8.0,
        le=65536,
        description="Memory that a process of a reward may allocate, and that it and the processes it started may hold together. "
        "A call that needs more has no verdict.",
    )
    max_processes: PositiveInt = Field(256, le=65536, description="Most processes that a reward may have: its own and all that it started.")
    failed_value: Number = Field(
        0.0,
        description="Reward of a response from which no answer could be read. One whose reward crashed, timed out or was unavailable "
        "is not trained on.",
    )
    system_envs: dict[str, VariableText] = Field(default_factory=dict, description="Environment variables of the worker processes.")
    query_filter_config: QueryFilterConfig | None = Field(
        None, description="Which groups of this domain are replaced; if not given, those that `dynamic_sampling` replaces."
    )


class ValidationSetConfig(StrictConfig):
    """A set of held-out prompts, of several."""

    data_args: DataConfig | None = Field(None, description="Its prompts.")
    rows: dict[Name, PositiveInt] = Field(
        default_factory=dict,
        description="Number of tasks by domain, for environments that make their own tasks; their seeds differ from those of training.",
    )
    generating_args: GeneratingConfig | None = Field(
        None, description="How they are answered; as `validation.generating_args` if not given."
    )


class HeldOut(NamedTuple):
    """One set of held-out prompts, with all that holds for it."""

    data_args: DataConfig | None
    rows: Mapping[str, int]
    """Tasks that environments make themselves, by domain."""
    generating_args: GeneratingConfig


class ValidationConfig(StrictConfig):
    """Held-out prompts, answered every `eval_steps`.

    One set, or several.
    """

    data_args: DataConfig | None = Field(None, description="The held-out prompts of a single set.")
    rows: dict[Name, PositiveInt] = Field(
        default_factory=dict, description="Number of tasks of a single set, by domain; for environments that make their own tasks."
    )
    generating_args: GeneratingConfig = Field(
        default_factory=lambda: GeneratingConfig.model_validate({}), description="Sampling in validation."
    )
    name: str = Field("validation", pattern=SET_NAME, description="Name of a single set in the metrics: `val/<name>/pass@1`.")
    sets: dict[Annotated[str, Field(pattern=SET_NAME)], ValidationSetConfig] = Field(
        default_factory=dict, description="Several sets by name, in place of `data_args` and `name`."
    )

    def named_sets(self) -> dict[str, HeldOut]:
        """Return the prompts of each validation set and its sampling, by name."""
        alone = {self.name: HeldOut(self.data_args, self.rows, self.generating_args)} if self.data_args or self.rows else {}
        several = {name: HeldOut(one.data_args, one.rows, one.generating_args or self.generating_args) for name, one in self.sets.items()}
        return alone | several

    def places(self) -> dict[str, str]:
        """Return the path of each set's block in the configuration, by name."""
        return {name: f"validation.sets.{name}" if name in self.sets else "validation" for name in self.named_sets()}


class DeadlinesConfig(StrictConfig):
    """Seconds after which a wait ends in an error that names who is late."""

    start: Seconds = Field(900.0, description="A role's start: processes, imports, model, engine.")
    rollout: Seconds = Field(3600.0, description="The samples of one prompt; waiting for the engine counts.")
    train: Seconds = Field(3600.0, description="A training step, or a pass for log-probs.")
    collective: Seconds | None = Field(
        None, description="A collective operation (NCCL, gloo) between the ranks of a role; half of `train` if not given."
    )
    weight_sync: Seconds = Field(300.0, description="Each bucket of a weight sync, and each move of a role onto or off its GPUs.")
    checkpoint: Seconds = Field(1800.0, description="Writing or reading a checkpoint.")
    shutdown: Seconds = Field(30.0, description="Orderly shutdown of a role; after it the role's processes are killed.")


class ExperimentConfig(StrictConfig):
    """What all pipelines have in common."""

    exp_name: str = Field(description="Name of the run.", pattern=SET_NAME, max_length=LONGEST_NAME)
    seed: Seed = Field(42, description="Seed of all random choices: sampling of prompts and of tokens, LoRA's initialisation.")
    deterministic: bool = Field(
        False,
        description="Use torch's deterministic algorithms in the processes that train or score, so that the same inputs give the same "
        "bits. An operation that has none ends the run with its name.",
    )
    output_dir: PathText = Field(description="The run folder, used exactly as given.")
    pretrain: PathText = Field(description="Folder or Hub name of the policy's starting point.")
    roll_defaults: bool = Field(
        False, description="Use ROLL v0.2.1's defaults for keys that are not given, except `reward_clip` and `ipo`."
    )
    dry_run: bool = Field(False, description="Print the plan and end.")
    save_at_end: bool = Field(
        True, description="Write a checkpoint and export the policy when the run ends; `false` writes neither, for benchmarks."
    )
    keep_checkpoints: PositiveInt = Field(
        2, description="Number of checkpoints to keep; older ones are removed once a newer one is complete."
    )
    max_restarts: NonNegativeInt = Field(
        3,
        description="Most restarts in a run of the roles that learn, and those that they ask, from the last checkpoint, "
        "after a process of theirs died, was stopped or made no progress; 0 ends the run with the first loss.",
    )
    eval_steps: NonNegativeInt = Field(0, description="Validate every so many steps, before the first and after the last; 0 never.")
    resume_from_checkpoint: PathText = Field(
        "auto", description="`auto` (the newest complete checkpoint of `output_dir`), `never`, or a checkpoint's folder."
    )
    track_with: str | tuple[str, ...] = Field(
        "tensorboard",
        description="Trackers beside `metrics.jsonl`: `tensorboard`, `wandb`, `swanlab`, `mlflow`, `trackio`, `none`, or several.",
    )
    tracker_kwargs: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Further keyword arguments of each tracker, by its name."
    )
    num_gpus_per_node: Ranks = Field(8, description="GPUs of one node: global device d is device d % n of node d // n.")
    gpu_memory_gib: PositiveFloat | None = Field(
        None, description="Memory of one GPU; the plan then checks whether its estimate fits, and warns if not."
    )
    time_sharing: bool = Field(
        True,
        description="Roles on the same GPUs take turns on them: each leaves for host memory when another needs the room. "
        "`false` keeps all of them there, which is faster where memory allows.",
    )
    prompt_length: PositiveInt = Field(1024, description="Longest prompt in tokens; longer rows are dropped and counted.")
    response_length: PositiveInt = Field(1024, description="Longest response in tokens; in an environment, the longest turn.")
    max_grad_norm: PositiveFloat = Field(1.0, description="Gradients are scaled down to this global norm.")
    system_envs: dict[str, VariableText] = Field(default_factory=dict, description="Environment variables of every worker.")
    deadlines: DeadlinesConfig = Field(default_factory=lambda: DeadlinesConfig.model_validate({}), description="Deadlines of all waits.")
