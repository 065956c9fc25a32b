"""Keys of reinforcement learning from verifiable rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from roll.algorithms.methods import (
    ESTIMATORS,
    KINDS,
    NO_CORRECTION,
    POLICY_LOSSES,
    CorrectionTraits,
    EstimatorTraits,
    Method,
    PolicyLossTraits,
)
from roll.config.schema.base import (
    Fraction,
    Name,
    Named,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PathText,
    PositiveFloat,
    PositiveInt,
    StrictConfig,
)
from roll.config.schema.curriculum import CurriculumConfig
from roll.config.schema.environments import EnvironmentConfig, GatewayConfig
from roll.config.schema.offline import NAMES, TOP_K
from roll.config.schema.roles import (
    ActorInferConfig,
    ActorTrainConfig,
    CriticConfig,
    DomainTeacherConfig,
    ExperimentConfig,
    ReferenceConfig,
    RewardConfig,
    ValidationConfig,
)
from roll.config.schema.self_distillation import SelfDistillationConfig


class OverlongBufferConfig(StrictConfig):
    """Soft penalty for long responses (DAPO).

    The key names are those of verl.
    """

    len: PositiveInt = Field(
        description="Number of tokens before the length limit over which the reward falls linearly."
    )
    penalty_factor: PositiveFloat = Field(1.0, description="Amount by which the reward is lowered at the length limit.")


class DynamicSamplingConfig(StrictConfig):
    """Dynamic sampling (DAPO).

    Groups whose rewards are all equal are dropped and replaced by newly drawn groups.
    """

    max_num_gen_batches: PositiveInt = Field(
        3,
        description="Largest number of groups drawn for a step, in multiples of `rollout_batch_size`. At the limit, "
        "dropped groups fill up the step.",
    )


class WeightSyncConfig(StrictConfig):
    """Weight sync from the trainer to the engines."""

    lora: Literal["adapter", "merged"] = Field(
        "adapter",
        description="With LoRA: send only the adapter (`adapter`), or the whole model with the adapter merged in "
        "(`merged`), which makes generation faster.",
    )
    bucket_mib: PositiveInt = Field(
        512,
        le=1 << 20,
        description="Largest size in MiB of the buckets in which weights are gathered and sent. A bucket holds at "
        "least one tensor.",
    )
    kv_cache: Literal["keep", "recompute"] | None = Field(
        None,
        description="KV cache of responses that are unfinished at a weight sync. `keep` continues at once with keys "
        "and values of the old "
        "weights; `recompute` recomputes them with the new weights. If not given: `keep` if generation runs ahead of "
        "training and the engine stays on its devices, otherwise `recompute`.",
    )


class RlvrConfig(ExperimentConfig):
    """Reinforcement learning from verifiable rewards."""

    pipeline: Literal["rlvr"] = Field("rlvr", description=NAMES)

    max_steps: PositiveInt = Field(description="Number of training steps.")
    save_steps: NonNegativeInt = Field(0, description="Steps between checkpoints; 0 saves only at the end of the run.")
    rollout_batch_size: PositiveInt = Field(64, description="Number of prompts per step.")
    num_return_sequences_in_group: PositiveInt = Field(8, description="Number of responses sampled per prompt.")
    updates_per_step: PositiveInt = Field(
        1,
        description="Number of optimizer updates in each pass over a step's sequences, for any number of ranks. 1 is "
        "on-policy. ROLL's way "
        "to say it, `actor_train.training_args.gradient_accumulation_steps`, cannot be combined with this key. A "
        "critic makes as many updates, unless it has a `gradient_accumulation_steps` of its own.",
    )
    async_generation_ratio: NonNegativeFloat = Field(
        0.0,
        le=1000,
        description="Number of steps that generation may run ahead of training, fractions allowed; 0 is synchronous.",
    )
    rollout_window: PositiveInt | None = Field(
        None,
        description="Number of prompts, a multiple of `rollout_batch_size`, among which a step takes those that "
        "finish first; slow prompts "
        "are left for later steps. If not given: `rollout_batch_size`, so that prompts are used in the order in which "
        "they were drawn.",
    )
    generate_while_training: bool = Field(
        False,
        description="Let engines on GPUs that a trained role uses, too, generate while it works, instead of pausing "
        "until the next weight sync. It needs `async_generation_ratio` above 0 and `time_sharing: false`, and pays "
        "where neither alone keeps a GPU busy, as with small models.",
    )
    max_running_samples: PositiveInt | None = Field(
        None,
        description="Largest number of responses that all engines together generate at a time; further ones wait. If "
        "not given, each "
        "engine starts at its `max_num_seqs`. The limit falls by a fifth after a step with preemptions for lack of KV "
        "cache, and rises again when the cache has room.",
    )
    ppo_epochs: PositiveInt = Field(1, description="Number of passes over the responses of a step.")
    keep_rollouts: bool = Field(
        False,
        description="Keep every rollout: `rollouts/step_N.parquet` in the run folder has the tokens, log-probs, "
        "versions, rewards and advantages of each step.",
    )
    replay_from: PathText | None = Field(
        None,
        description="Folder of a run with `keep_rollouts`, whose rollouts this run learns from, step by step. Engines, "
        "rewards and environments are not started.",
    )

    dynamic_sampling: DynamicSamplingConfig | None = Field(
        None, description="Replace groups whose rewards are all equal. Without this block, no group is replaced."
    )
    curriculum: CurriculumConfig | None = Field(
        None,
        description="Draw prompts by how often they are solved; see docs/algorithms.md. Without this block, "
        "difficulty does not matter.",
    )

    adv_estimator: Annotated[Method[EstimatorTraits], Named(KINDS["adv_estimator"])] = Field(
        ESTIMATORS["grpo"], description="Advantage estimator; see docs/algorithms.md."
    )
    adv_estimator_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of your own estimator, if `adv_estimator` is `package.module:Name`.",
    )
    gamma: Fraction = Field(
        1.0,
        description="Discount factor of later rewards: per token, or per turn with `step_reinforce`; 1 does not "
        "discount.",
    )
    lambd: Fraction = Field(
        0.95,
        description="Lambda of GAE, between high variance (1: full returns) and high bias (0: one-step estimates of "
        "the critic).",
    )
    value_clip: PositiveFloat | None = Field(
        None,
        description="Largest change of the critic's values within a step; larger changes are clipped in its loss. If "
        "not given, no clip.",
    )
    critic_warmup: NonNegativeInt = Field(
        0, description="Number of steps at the start in which only the critic is trained."
    )
    norm_mean_type: Literal["batch", "group", "domain", "running"] | None = Field(
        None,
        description="Subtract the mean reward over the step (`batch`), the group, the domain's responses in the step, "
        "or all steps so far "
        "(`running`). `step_reinforce` uses the returns of turns and has no `running`. If not given, no mean is "
        "subtracted.",
    )
    norm_std_type: Literal["batch", "group", "domain", "running"] | None = Field(
        None,
        description="Divide by the standard deviation over the same choice of sets. If not given, rewards are not "
        "divided.",
    )
    episode_reward_weight: NonNegativeFloat = Field(
        1.0, description="Weight of the advantage of an episode relative to its group."
    )
    step_reward_weight: NonNegativeFloat = Field(
        1.0, description="Weight of the advantage of a turn relative to turns in the same state."
    )
    step_reward_gamma: Fraction = Field(
        0.95, description="Discount factor per turn in the returns of turns that are compared."
    )
    gigpo_std: bool = Field(
        True, description="Divide both advantages by the standard deviation of the compared values."
    )
    pass_k: Annotated[int, Field(ge=2)] = Field(
        4, description="k of pass@k: the number of responses of which at least one should be right."
    )
    whiten_advantages: bool | Literal["domain"] = Field(
        False,
        description="Normalise advantages to mean 0 and variance 1: those of all response tokens of a step (`true`), "
        "or those of each domain's tokens separately (`domain`).",
    )
    reward_clip: PositiveFloat | None = Field(None, description="Clip rewards to [-c, c]. If not given, no clip.")
    reward_clip_on: Literal["raw", "normalised"] = Field(
        "raw",
        description="Whether `reward_clip` clips rewards before they are normalised, or after. `normalised` is ROLL's "
        "meaning: it also "
        "clips each token's reward after the KL penalty, and only `grpo`, `reinforce` and `gae` have it.",
    )
    advantage_clip: PositiveFloat | None = Field(None, description="Clip advantages to [-c, c]. If not given, no clip.")
    max_len_mask: bool = Field(False, description="Exclude truncated responses from the loss.")
    error_max_len_clip: bool = Field(
        False, description="Exclude responses that are both wrong and too long from the loss."
    )
    error_max_len_threshold: PositiveInt | None = Field(
        None,
        description="With `error_max_len_clip`: a response with at least this many tokens is too long. It is wrong if "
        "its reward is at most 0.",
    )
    overlong_buffer: OverlongBufferConfig | None = Field(
        None, description="Lower the rewards of responses that approach the length limit."
    )
    difficulty_mask: bool = Field(
        False, description="Exclude responses to prompts that are too hard or too easy from the loss."
    )
    difficulty_low_threshold: Number = Field(
        0.0,
        description="A prompt is too hard if its group's mean score, the mean reward without penalties, is at most "
        "this.",
    )
    difficulty_high_threshold: Number = Field(
        1.0, description="A prompt is too easy if its group's mean score is at least this."
    )
    difficulty_loss_weight: bool = Field(
        False,
        description="Weight the loss of a response from 0.5 (easy prompt) to 2 (hard). Difficulty is 1 minus the mean "
        "score of the group.",
    )
    length_loss_weight: bool = Field(
        False,
        description="Weight the loss of a response by its length: from 1.5 for the shortest of the step to 0.5 for "
        "the longest.",
    )

    policy_loss: Annotated[Method[PolicyLossTraits], Named(KINDS["policy_loss"])] = Field(
        POLICY_LOSSES["ppo"], description="Policy term of the loss; see docs/algorithms.md."
    )
    policy_loss_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of your own policy loss, if `policy_loss` is `package.module:Name`.",
    )
    pg_clip: PositiveFloat = Field(
        0.2, description="Clip range c: the ratio is clipped to [1 - c, 1 + c]; `gmpo` clips the log-ratio to [-c, c]."
    )
    pg_clip_low: PositiveFloat | None = Field(None, description="c for the lower bound; `pg_clip` if not given.")
    pg_clip_high: PositiveFloat | None = Field(None, description="c for the upper bound; `pg_clip` if not given.")
    dual_clip_loss: PositiveFloat | bool = Field(
        False,
        description="Dual clip: bound the loss of a token with a negative advantage A at -c A. `true` means c = 3; "
        "`false`, no bound.",
    )
    sapo_positive_temperature: PositiveFloat = Field(
        1.0,
        description="How fast the gradient of tokens with a positive advantage falls as the ratio leaves 1; larger is "
        "faster.",
    )
    sapo_negative_temperature: PositiveFloat = Field(
        1.05, description="How fast the gradient of all other tokens falls as the ratio leaves 1; larger is faster."
    )
    dppo_divergence: Literal["tv", "kl"] = Field(
        "tv",
        description="Divergence between behaviour policy and policy, estimated from the sampled token: total "
        "variation (`tv`) or KL.",
    )
    dppo_threshold: PositiveFloat | None = Field(
        None,
        description="A token is excluded from the loss if its probability has moved in the direction of its advantage "
        "by a divergence above this. If not given: 0.15 for `tv`, 0.05 for `kl`.",
    )
    topr_positive_weight: NonNegativeFloat = Field(1.0, description="Weight of tokens with an advantage of at least 0.")
    topr_negative_weight: NonNegativeFloat = Field(1.0, description="Weight of tokens with a negative advantage.")
    clip_cov_ratio: Fraction = Field(
        2e-4, description="Fraction of the response tokens of a step that are drawn at random and get no policy term."
    )
    clip_cov_low: Number = Field(1.0, description="Lower bound on the covariance of the tokens that are drawn.")
    clip_cov_high: Number = Field(5.0, description="Upper bound on the covariance of the tokens that are drawn.")
    kl_cov_ratio: Fraction = Field(
        2e-4,
        description="Fraction of the response tokens of a step, those with the largest covariance, that get a penalty.",
    )
    kl_cov_coef: NonNegativeFloat = Field(1.0, description="Weight of the penalty on the change of a token's log-prob.")
    off_policy_mask_threshold: PositiveFloat | None = Field(
        None,
        description="Exclude tokens with a negative advantage from the policy term if the mean of log(behaviour / "
        "current probability) over their sequence is above this, in nats. If not given, no token is excluded.",
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        Field(
            "seq-mean-token-mean",
            description="How token losses are reduced to one number, over all ranks and micro-batches of an update; "
            "see docs/algorithms.md.",
        )
    )
    loss_scale_factor: PositiveFloat | None = Field(
        None,
        description="`seq-mean-token-sum-norm`: number of tokens to divide the sum of a sequence by; "
        "`response_length` if not given.",
    )
    entropy_loss_coef: Number = Field(
        0.0, description="Weight of the entropy bonus, which is subtracted from the loss; 0 adds none."
    )

    behaviour_log_probs: Literal["engine", "trainer", "on_policy"] | None = Field(
        None,
        description="Old log-probs in the ratios of the loss: those of sampling (`engine`), those of a forward pass "
        "before the step's "
        "first update (`trainer`), or those of the update itself (`on_policy`, for one update per step). "
        "If not given: `engine`, or `trainer` if `top_p`, `top_k` or `repetition_penalty` change the sampling "
        "distribution.",
    )
    mismatch_correction: Annotated[Method[CorrectionTraits], Named(KINDS["mismatch_correction"])] = Field(
        NO_CORRECTION,
        description="Weight or reject tokens by the ratio of trainer to engine probability; see docs/algorithms.md.",
    )
    mismatch_correction_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of your own correction, if `mismatch_correction` is `package.module:Name`.",
    )
    mismatch_cap: PositiveFloat | None = Field(
        None, description="Largest weight of the correction; the default of the correction if not given."
    )
    mismatch_low: NonNegativeFloat | None = Field(
        None,
        description="Tokens or sequences with a ratio below this are rejected; the default of the correction if not "
        "given.",
    )
    mismatch_high: PositiveFloat | None = Field(
        None,
        description="Tokens or sequences with a ratio above this are rejected; the default of the correction if not "
        "given.",
    )

    router_replay: bool = Field(
        False,
        description="Mixture of experts: the trainer's routers choose the experts that the engine chose for each "
        "token, in the log-probs of the policy and in its updates (R3). The reference keeps its own choice. Needs "
        "vLLM.",
    )

    use_kl_loss: bool = Field(False, description="Add the KL divergence from the reference to the loss.")
    kl_loss_coef: NonNegativeFloat = Field(
        0.0, description="Weight of the KL term in the loss. Required with `use_kl_loss`."
    )
    kl_loss_type: Literal["k1", "k2", "k3", "k1+", "k3+"] = Field(
        "k3",
        description="KL estimator in the loss (Schulman, 2020). `k1+` and `k3+` have the gradient of `k2`, which on "
        "policy is the gradient of the KL.",
    )
    kl_loss_importance: bool | None = Field(
        None,
        description="Weight the KL term of each token by the ratio of policy to behaviour policy, which corrects its "
        "gradient off policy. "
        "If not given: `true` if `async_generation_ratio` is above 0, groups are replayed (`curriculum.replay`) or a "
        "step has several updates.",
    )
    add_token_level_kl: bool = Field(
        False, description="Subtract the KL divergence from the reference from the reward of each token."
    )
    init_kl_coef: NonNegativeFloat = Field(
        0.0,
        description="Weight of the KL in the reward, required with `add_token_level_kl`; with `target_kl`, its value "
        "in the first step.",
    )
    kl_penalty: Literal["k1", "k2", "k3", "abs"] = Field("k1", description="KL estimator in the reward.")
    target_kl: PositiveFloat | None = Field(
        None,
        description="Adapt the weight of the KL in the reward to reach this mean KL, in nats per token. If not given, "
        "it is constant.",
    )
    kl_horizon: PositiveInt = Field(
        10000, description="Number of responses over which the weight adapts to `target_kl`; larger is slower."
    )

    distill_loss_coef: PositiveFloat = Field(
        1.0,
        description="With a teacher: weight in the loss of the divergence from the teacher, which is added to the "
        "policy term.",
    )
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        "reverse_kl",
        description="Divergence between teacher and policy at each sampled token: KL(teacher, policy) (`forward_kl`), "
        "KL(policy, teacher) (`reverse_kl`), or Jensen-Shannon (`jsd`).",
    )
    jsd_beta: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5, description="`jsd`: weight of the teacher in the mixture distribution."
    )
    distill_temperature: PositiveFloat = Field(
        1.0, description="Temperature that divides the logits of both models before they are compared."
    )
    distill_top_k: PositiveInt | None = Field(None, description=TOP_K)

    self_distillation: SelfDistillationConfig | None = Field(
        None,
        description="Learning from feedback: the policy is taught by itself with a prompt that also has hints. Without "
        "this block, it is not.",
    )

    weight_sync: WeightSyncConfig = Field(
        default_factory=lambda: WeightSyncConfig.model_validate({}),
        description="How weights are sent from the trainer to the engines.",
    )
    actor_train: ActorTrainConfig = Field(description="The policy in training.")
    actor_infer: ActorInferConfig = Field(
        description="The policy in the inference engines, which generates the rollouts."
    )
    reference: ReferenceConfig | None = Field(
        None,
        description="The reference policy of the KL terms. With LoRA the block may be omitted: `actor_train` without "
        "its adapter is used.",
    )
    teacher: ReferenceConfig | None = Field(
        None,
        description="On-policy distillation: the model to imitate on the policy's own responses. It must use the "
        "tokenizer of the policy.",
    )
    teachers: dict[Name, DomainTeacherConfig] = Field(
        default_factory=dict,
        description="Several teachers by name instead of `teacher`, each with the keys of that role and `domains`. "
        "Requires `distill_top_k`.",
    )
    critic: CriticConfig | None = Field(
        None, description="The value function. Required by `adv_estimator: gae`; not used otherwise."
    )
    rewards: dict[Name, RewardConfig] = Field(
        default_factory=dict,
        description="Reward of each domain, by the name of the domain. For a domain in `environments`, it is added to "
        "the reward of the environment.",
    )
    environments: dict[Name, EnvironmentConfig] = Field(
        default_factory=dict,
        description="Environments for multi-turn episodes, by the name of the domain; see docs/agents.md.",
    )
    gateway: GatewayConfig = Field(
        default_factory=lambda: GatewayConfig.model_validate({}),
        description="The HTTP server through which external agents reach the policy.",
    )
    sequence_length: PositiveInt | None = Field(
        None,
        description="Longest episode in an environment, in tokens: the first observation, all turns and all further "
        "observations. If not given: `prompt_length + response_length`.",
    )
    validation: ValidationConfig | None = Field(None, description="Held-out prompts, evaluated every `eval_steps`.")

    @property
    def domains(self) -> dict[str, RewardConfig | EnvironmentConfig]:
        """Return the environment of each domain, or its reward if it has no environment."""
        return {**self.rewards, **self.environments}
