"""Keys of the roles, and the keys that all experiments share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from roll.config.schema.base import (
    LONGEST_NAME,
    Name,
    NonNegativeFloat,
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
from roll.config.schema.model import DataConfig, GeneratingConfig, ModelConfig, TrainingConfig
from roll.config.schema.model_rewards import ModelRewardKeys
from roll.config.schema.strategies import (
    AnyStrategy,
    GeneratingStrategy,
    ScoringStrategy,
    ServingStrategy,
    TrainingStrategy,
)

SET_NAME = r"^[A-Za-z0-9_.-]+$"


class RoleConfig(StrictConfig):
    """A role: a group of Ray actors that do one job on a set of devices."""

    model_args: ModelConfig = Field(
        default_factory=lambda: ModelConfig.model_validate({}), description="The model of the role."
    )
    strategy_args: AnyStrategy = Field(description="The backend that runs the model, and its settings.")
    device_mapping: tuple[NonNegativeInt, ...] | None = Field(
        None,
        description="GPUs of the role, numbered across all nodes: a list, or `list(range(0,16))`. If not given, the "
        "role runs on the CPU.",
    )
    world_size: PositiveInt | None = Field(
        None, description="Number of workers of a role that runs on the CPU; 1 if not given."
    )
    max_tokens_per_microbatch: PositiveInt | None = Field(
        None,
        description="Token budget of one micro-batch, into which sequences are packed. Lower it if memory runs out. "
        "If not given: the batch size of the role times the length of the longest row, which is `prompt_length + "
        "response_length` or `max_length`, twice that for pairs, or `sequence_length` with environments.",
    )
    infer_batch_size: PositiveInt = Field(
        1,
        description="Batch size in the default of `max_tokens_per_microbatch`, for roles that only compute log-probs.",
    )
    system_envs: dict[str, VariableText] = Field(
        default_factory=dict,
        description="Environment variables of the role's processes, in addition to those of all workers.",
    )


class LearnerConfig(RoleConfig):
    """A model in training."""

    strategy_args: TrainingStrategy = Field(description="The backend that trains the model, and its settings.")
    training_args: TrainingConfig = Field(
        default_factory=lambda: TrainingConfig.model_validate({}),
        description="Optimizer, learning-rate schedule and batch size.",
    )


class CriticConfig(LearnerConfig):
    """The critic.

    It is the value function of `adv_estimator: gae`: a model with a scalar head.
    """


class ActorTrainConfig(LearnerConfig):
    """The policy in training."""

    data_args: DataConfig | None = Field(
        None, description="The training prompts; not needed if environments make their own tasks (`rows`)."
    )


class RowsTrainConfig(ActorTrainConfig):
    """A model in training on a fixed data set."""

    data_args: DataConfig = Field(description="The training rows, which contain the responses.")


class ActorInferConfig(RoleConfig):
    """The policy in the inference engines."""

    strategy_args: GeneratingStrategy = Field(description="The backend that generates, and its settings.")
    generating_args: GeneratingConfig = Field(
        default_factory=lambda: GeneratingConfig.model_validate({}), description="Sampling parameters of rollouts."
    )


class ReferenceConfig(RoleConfig):
    """A reference policy or a teacher.

    The model is frozen and only computes log-probs or hidden states.
    """

    strategy_args: ScoringStrategy = Field(description="The backend that runs the model, and its settings.")


class DomainTeacherConfig(ReferenceConfig):
    """A teacher of some domains."""

    domains: tuple[Name, ...] = Field(min_length=1, description="Domains whose responses this teacher evaluates.")


class FilterBoundsConfig(StrictConfig):
    """The bounds of a filter of groups."""

    threshold_down: Number | None = Field(
        None, description="`mean_filter`: replace a group if its mean reward is at most this."
    )
    threshold_up: Number | None = Field(
        None, description="`mean_filter`: replace a group if its mean reward is at least this."
    )
    std_threshold: Number | None = Field(
        None, description="`std_filter`: replace a group if the standard deviation of its rewards is at most this."
    )


class QueryFilterConfig(StrictConfig):
    """The filter of a domain's groups.

    Rejected groups are replaced by newly drawn groups, as with `dynamic_sampling`.
    """

    type: Literal["no_filter", "mean_filter", "std_filter"] = Field(
        "no_filter",
        description="Filter by the mean or the standard deviation of a group's rewards. `no_filter` keeps every group "
        "of the domain.",
    )
    filter_args: FilterBoundsConfig = Field(
        default_factory=lambda: FilterBoundsConfig.model_validate({}), description="Bounds of the filter."
    )


class RewardModelRole(RoleConfig):
    """A model that computes rewards. Built from the keys of its domain; see `derived/fixed_roles.py`."""

    strategy_args: ServingStrategy = Field(description="The backend that serves the model.")


class JudgeConfig(RewardModelRole):
    """A judge: a model that generates verdicts."""


class PartnerRole(JudgeConfig):
    """A partner of an environment that the run serves. Built from its keys, like a judge's."""


class ScorerConfig(RewardModelRole):
    """A classifier whose score is the reward."""


class RewardPartConfig(StrictConfig):
    """One part of a domain's reward.

    The reward is the weighted sum of its parts.
    """

    reward: str | None = Field(None, description="Name of the reward function; the name of the part if not given.")
    reward_args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")
    group: bool = Field(
        False, description="Call the function once per prompt with all its responses, instead of once per response."
    )
    weight: Number = Field(1.0, description="Weight of the part in the sum.")
    failed_value: Number = Field(0.0, description="Value of the part for a response in which it finds no answer.")
    passes_at: Number | None = Field(
        None,
        description="Value of the part, before its weight, from which a response passes; what the function declares "
        "if not given.",
    )


class RewardConfig(ModelRewardKeys):
    """The reward of one domain.

    It is a function or a weighted sum of functions, run in worker processes, or a model.
    """

    reward: str | None = Field(None, description="Name of the reward function; the name of the domain if not given.")
    reward_args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")
    group: bool = Field(
        False, description="Call the function once per prompt with all its responses, instead of once per response."
    )
    parts: dict[Name, RewardPartConfig] = Field(
        default_factory=dict,
        description="Several reward functions by name, instead of `reward`. The reward is their weighted sum.",
    )
    normalise: Literal["none", "group"] = Field(
        "none",
        description="`group` normalises each part to mean 0 and standard deviation 1 within the group before the sum; "
        "only with `parts`.",
    )
    tag_included: tuple[str, ...] | None = Field(
        None,
        description="Values of the `tag` column whose rows belong to this domain; the name of the domain if not given.",
    )
    world_size: Ranks = Field(
        1, description="Number of worker processes, or of engines if the reward is a model on the CPU."
    )
    concurrency: PositiveInt = Field(
        1, le=65536, description="Number of concurrent calls of an `async def` reward in one process."
    )
    timeout: Seconds = Field(10.0, description="Timeout of one call of a reward function, in seconds.")
    memory_gib: PositiveFloat = Field(
        8.0,
        le=65536,
        description="Memory limit in GiB of a reward process, alone and together with its child processes. A call "
        "that needs more gets no verdict.",
    )
    max_processes: PositiveInt = Field(
        256, le=65536, description="Largest number of processes of a reward process: itself and all its descendants."
    )
    failed_value: Number = Field(
        0.0,
        description="Reward of a response in which no answer is found. A response whose reward crashed, timed out or "
        "was unavailable is not trained on.",
    )
    passes_at: Number | None = Field(
        None,
        description="Reward from which a response passes, for `pass@k` and accuracy. If not given: what each reward "
        "declares, and 1 for a function of your own that declares nothing.",
    )
    system_envs: dict[str, VariableText] = Field(
        default_factory=dict, description="Environment variables of the worker processes."
    )
    query_filter_config: QueryFilterConfig | None = Field(
        None,
        description="Filter that selects which groups of this domain are replaced; `dynamic_sampling` decides if not "
        "given.",
    )


SMALLER_IS_BETTER = ("loss", "perplexity", "divergence", "_fraction", "length_mean", "length_max")
"""Ends of the names of held-out metrics whose smaller values are better."""


class ValidationSetConfig(StrictConfig):
    """One of several sets of held-out prompts."""

    data_args: DataConfig | None = Field(None, description="The prompts of the set.")
    rows: dict[Name, PositiveInt] = Field(
        default_factory=dict,
        description="Number of tasks per domain, for environments that make their own tasks. Their seeds differ from "
        "the training seeds.",
    )
    generating_args: GeneratingConfig | None = Field(
        None, description="Sampling parameters of this set; `validation.generating_args` if not given."
    )


class HeldOut(NamedTuple):
    """One set of held-out prompts and its settings."""

    data_args: DataConfig | None
    rows: Mapping[str, int]
    """Number of tasks per domain that environments make themselves."""
    generating_args: GeneratingConfig


class ValidationConfig(StrictConfig):
    """Held-out prompts.

    Either one set, or several sets by name. They are evaluated every `eval_steps`.
    """

    data_args: DataConfig | None = Field(None, description="The held-out prompts of a single set.")
    rows: dict[Name, PositiveInt] = Field(
        default_factory=dict,
        description="Number of tasks per domain of a single set, for environments that make their own tasks.",
    )
    generating_args: GeneratingConfig = Field(
        default_factory=lambda: GeneratingConfig.model_validate({}), description="Sampling parameters in validation."
    )
    name: str = Field(
        "validation", pattern=SET_NAME, description="Name of a single set in the metrics: `val/<name>/pass@1`."
    )
    sets: dict[Annotated[str, Field(pattern=SET_NAME)], ValidationSetConfig] = Field(
        default_factory=dict, description="Several sets by name, instead of `data_args`, `rows` and `name`."
    )

    def named_sets(self) -> dict[str, HeldOut]:
        """Return the prompts and sampling parameters of each validation set, by name."""
        alone = (
            {self.name: HeldOut(self.data_args, self.rows, self.generating_args)} if self.data_args or self.rows else {}
        )
        several = {
            name: HeldOut(one.data_args, one.rows, one.generating_args or self.generating_args)
            for name, one in self.sets.items()
        }
        return alone | several

    def places(self) -> dict[str, str]:
        """Return the configuration path of each validation set, by name."""
        return {name: f"validation.sets.{name}" if name in self.sets else "validation" for name in self.named_sets()}


class WatchedMetric(StrictConfig):
    """A metric of the held-out sets, and which of its values are better."""

    metric: str = Field(description="Name of a metric of a held-out set, such as `val/validation/pass@1`.")
    mode: Literal["max", "min"] | None = Field(
        None,
        description="Whether larger (`max`) or smaller values are better. If not given: `min` for losses, divergences, "
        "lengths and shares of responses that are cut off or without a verdict, and `max` for others.",
    )

    @property
    def prefers_larger(self) -> bool:
        """Whether larger values of the metric are better."""
        return self.mode == "max" if self.mode else not self.metric.endswith(SMALLER_IS_BETTER)


class KeepBestConfig(WatchedMetric):
    """Keeps the checkpoint with the best value of a metric, in addition to the newest `keep_checkpoints`.

    After every validation with a better value than all before, a checkpoint is written. The one that it replaces is
    deleted, unless it is among the newest.
    """


class EarlyStoppingConfig(WatchedMetric):
    """Ends the run when a metric has stopped to improve.

    The policy of the last step is exported as at the end of a complete run.
    """

    patience: PositiveInt = Field(
        description="Number of validations in a row without an improvement after which the run ends. The validation "
        "before the first step gives the first value."
    )
    min_delta: NonNegativeFloat = Field(0.0, description="Least difference to the best value that is an improvement.")


class DeadlinesConfig(StrictConfig):
    """Timeouts in seconds.

    A wait that exceeds its timeout ends with an error that names the late worker.
    """

    start: Seconds = Field(900.0, description="Start of a role: its processes, imports, model and engine.")
    rollout: Seconds = Field(
        3600.0, description="Generating all responses to one prompt, including the wait for an engine."
    )
    train: Seconds = Field(3600.0, description="One training step, or one forward pass for log-probs.")
    collective: Seconds | None = Field(
        None,
        description="One collective operation (NCCL, gloo) between the ranks of a role; half of `train` if not given.",
    )
    weight_sync: Seconds = Field(
        300.0, description="Each bucket of a weight sync, and each move of a role onto or off its GPUs."
    )
    checkpoint: Seconds = Field(1800.0, description="Writing or reading a checkpoint.")
    upload: Seconds = Field(
        21600.0,
        description="Uploading the last checkpoint and the export to a slow store, at the end.",
    )
    shutdown: Seconds = Field(30.0, description="Orderly shutdown of a role, after which its processes are killed.")


class ExperimentConfig(StrictConfig):
    """Keys that all pipelines share."""

    exp_name: str = Field(
        description="Name of the run, for trackers and reports.", pattern=SET_NAME, max_length=LONGEST_NAME
    )
    seed: Seed = Field(42, description="Random seed: order of prompts, sampling of tokens and LoRA initialisation.")
    deterministic: bool = Field(
        False,
        description="Use torch's deterministic algorithms in the processes that train or score, so that equal inputs "
        "give bitwise equal results. The run ends with an error at an operation without a deterministic algorithm.",
    )
    output_dir: PathText = Field(
        description="The run folder, used exactly as given. Metrics, checkpoints and the exported model are written "
        "here. An address, `s3://bucket/prefix`, sets `output_store`; the folder is then `./output/bucket/prefix`."
    )
    output_store: PathText | None = Field(
        None,
        description="Address of a store, `s3://bucket/prefix`, `gs://bucket/prefix` or `file:///folder`, to which the "
        "run folder is uploaded in the background, and from which a run continues on another host.",
    )
    pretrain: PathText = Field(
        description="Folder, Hub name or address (`s3://bucket/prefix`) of the model to start from, for all roles "
        "whose `model_args` name no model. A model in a store is downloaded once to each host."
    )
    roll_defaults: bool = Field(
        False,
        description="Use the defaults of ROLL v0.2.1 for keys that are not given, except `reward_clip` and `ipo`.",
    )
    dry_run: bool = Field(False, description="Check the configuration, print the plan and exit.")
    save_at_end: bool = Field(
        True,
        description="Write a checkpoint and export the model at the end of the run. `false` writes neither, for "
        "benchmarks.",
    )
    keep_checkpoints: PositiveInt = Field(
        2, description="Number of checkpoints to keep. Older ones are deleted once a newer one is complete."
    )
    push_to_hub: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+$",
        description="Repository of the Hugging Face Hub, `owner/name`, to which the export is uploaded at the end. The "
        "token is checked before the run.",
    )
    push_to_hub_private: bool = Field(
        True, description="Whether the repository is private if `push_to_hub` creates it."
    )
    max_restarts: NonNegativeInt = Field(
        3,
        description="Largest number of restarts from the last checkpoint in one run, after a process of a trained "
        "role, a reference or a teacher died, was stopped or made no progress. 0 ends the run at the first such loss.",
    )
    keep_best: KeepBestConfig | None = Field(
        None, description="The metric whose best checkpoint is kept, too. If not given, only the newest are kept."
    )
    early_stopping: EarlyStoppingConfig | None = Field(
        None, description="The metric that ends the run early if it stops to improve."
    )
    eval_steps: NonNegativeInt = Field(
        0,
        description="Steps between validations, which also run before the first and after the last step; 0 disables "
        "them.",
    )
    resume_from_checkpoint: PathText = Field(
        "auto",
        description="Checkpoint to start from: `auto` (newest complete one in `output_dir`), `never`, or a checkpoint "
        "folder.",
    )
    resume_with_changes: bool = Field(
        False,
        description="Resume although keys of the experiment differ from those of the checkpoint. Without it, such a "
        "run is refused with a "
        "list of the changed keys. Keys that only say how a run is run, such as devices and timeouts, may always "
        "change.",
    )
    track_with: str | tuple[str, ...] = Field(
        "tensorboard",
        description="Tracker, or list of trackers, in addition to `metrics.jsonl`: `tensorboard`, `wandb`, `swanlab`, "
        "`mlflow`, `trackio`, or `none`.",
    )
    tracker_kwargs: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Additional keyword arguments per tracker: `{wandb: {project: NAME}}`."
    )
    trace_steps: NonNegativeInt = Field(
        0,
        description="Number of steps, from each start of the run on, of which `trace.json` in the run folder records "
        "who did what when, for Perfetto; 0 records none.",
    )
    num_gpus_per_node: Ranks = Field(
        8, description="Number n of GPUs per node: device d of a `device_mapping` is GPU d % n of node d // n."
    )
    gpu_memory_gib: PositiveFloat | None = Field(
        None,
        description="Memory of one GPU in GiB. If given, the plan warns when its memory estimate exceeds it, and says "
        "how many sequences an engine has room for and how large a micro-batch may be.",
    )
    gpu_name: str | None = Field(
        None,
        description="Kind of the GPUs, such as `H100`, for the plan's estimate of time. If not given: that of this "
        "machine's GPUs.",
    )
    time_sharing: bool = Field(
        True,
        description="Roles on the same GPUs take turns: each moves to host memory when another needs its GPU memory. "
        "`false` keeps all of them in GPU memory, which is faster if they fit.",
    )
    prompt_length: PositiveInt = Field(
        1024, description="Longest prompt in tokens. Rows with a longer prompt are dropped, and their number is logged."
    )
    response_length: PositiveInt = Field(
        1024, description="Longest response in tokens, or longest turn in an environment."
    )
    max_grad_norm: PositiveFloat = Field(1.0, description="Gradient clipping: largest global norm of the gradients.")
    system_envs: dict[str, VariableText] = Field(
        default_factory=dict, description="Environment variables of all workers."
    )
    deadlines: DeadlinesConfig = Field(
        default_factory=lambda: DeadlinesConfig.model_validate({}), description="Timeouts of all waits."
    )
