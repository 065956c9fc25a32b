"""Keys of reinforcement learning from verifiable rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from roll.algorithms.methods.base import Method
from roll.algorithms.methods.corrections import NO_CORRECTION, CorrectionTraits
from roll.algorithms.methods.estimators import ESTIMATORS, EstimatorTraits
from roll.algorithms.methods.kinds import KINDS
from roll.algorithms.methods.policy_losses import POLICY_LOSSES, PolicyLossTraits
from roll.config.schema.base import (
    Fraction,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveInt,
    StrictConfig,
)
from roll.config.schema.environments import EnvironmentConfig, GatewayConfig
from roll.config.schema.methods import Named
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


class OverlongBufferConfig(StrictConfig):
    """Soft punishment of long responses (DAPO). Names as in verl."""

    len: PositiveInt = Field(description="The reward falls linearly over this many tokens before the limit.")
    penalty_factor: PositiveFloat = Field(1.0, description="How much lower the reward is at the limit.")


class DynamicSamplingConfig(StrictConfig):
    """Groups whose rewards are all equal are dropped, and others are drawn in their place (DAPO)."""

    max_num_gen_batches: PositiveInt = Field(
        3,
        description="Largest number of groups drawn for a step, in multiples of `rollout_batch_size`; then dropped ones fill up the step.",
    )


class WeightSyncConfig(StrictConfig):
    """How weights travel from the trainer to the engine."""

    lora: Literal["adapter", "merged"] = Field(
        "adapter", description="With LoRA: send the adapter alone, or the whole model with the adapter merged in (generates faster)."
    )
    bucket_mib: PositiveInt = Field(
        512, le=1 << 20, description="Weights are gathered and sent in buckets of at most so many MiB (one tensor at least)."
    )
    kv_cache: Literal["keep", "recompute"] | None = Field(
        None,
        description="Whether responses that are unfinished at a weight sync keep their KV cache. "
        "`keep` goes on at once, with keys and values "
        "of older weights; `recompute` computes them with the new ones. If not given, `keep` where generation runs ahead of training "
        "and the engine stays on its devices.",
    )


class RlvrConfig(ExperimentConfig):
    """Reinforcement learning from verifiable rewards."""

    pipeline: Literal["rlvr"] = Field("rlvr", description=NAMES)

    max_steps: PositiveInt = Field(description="Steps of the loop.")
    save_steps: NonNegativeInt = Field(0, description="Checkpoint every so many steps, and at the end; 0 saves at the end only.")
    rollout_batch_size: PositiveInt = Field(64, description="Prompts of one step.")
    num_return_sequences_in_group: PositiveInt = Field(1, description="Samples of each prompt.")
    async_generation_ratio: NonNegativeFloat = Field(
        0.0, le=1000, description="How many steps generation may run ahead of training; 0 is synchronous."
    )
    rollout_window: PositiveInt | None = Field(
        None,
        description="A step takes the first prompts to finish among so many, a multiple of `rollout_batch_size`, and leaves slow ones for "
        "later steps. If not given it is one batch: prompts are used in the order in which they were drawn.",
    )
    max_running_samples: PositiveInt | None = Field(
        None,
        description="Samples that all engines together generate at a time; others wait until one ends. If not given, each engine starts "
        "with its `max_num_seqs`, and gets a fifth fewer after a step in which it preempted samples because its KV cache was full.",
    )
    ppo_epochs: PositiveInt = Field(1, description="Passes over a step's samples.")

    dynamic_sampling: DynamicSamplingConfig | None = Field(
        None, description="Replace groups whose rewards are all equal; without this block none is replaced."
    )

    adv_estimator: Annotated[Method[EstimatorTraits], Named(KINDS["adv_estimator"])] = Field(
        ESTIMATORS["grpo"], description="Advantage estimator; see docs/algorithms.md."
    )
    adv_estimator_args: dict[str, Any] = Field(
        default_factory=dict, description="Keys of an estimator of your own, named as `package.module:Name`."
    )
    gamma: Fraction = Field(
        1.0,
        description="Discount of later tokens' rewards; with `step_reinforce` of later turns'.",
    )
    lambd: Fraction = Field(0.95, description="GAE's lambda: 1 uses the rewards only, 0 the critic's estimates only.")
    value_clip: PositiveFloat | None = Field(
        None, description="The critic's values are clipped to this distance from those before the step; without it they are not clipped."
    )
    critic_warmup: NonNegativeInt = Field(0, description="Steps at the start in which the critic alone learns.")
    norm_mean_type: Literal["batch", "group", "domain", "running"] | None = Field(
        None,
        description="Subtract the mean reward of the batch, of the group, of the domain's responses in the step, or of all steps so far; "
        "with `step_reinforce` the mean return of the turns of the batch, the group or the domain.",
    )
    norm_std_type: Literal["batch", "group", "domain", "running"] | None = Field(
        None, description="The same choice for the standard deviation to divide by."
    )
    episode_reward_weight: NonNegativeFloat = Field(1.0, description="Weight of an episode's advantage over its group.")
    step_reward_weight: NonNegativeFloat = Field(1.0, description="Weight of a turn's advantage over those taken in the same state.")
    step_reward_gamma: Fraction = Field(0.95, description="Discount of later turns' rewards in the returns by which turns are compared.")
    gigpo_std: bool = Field(True, description="Divide both advantages by the standard deviation of the compared values.")
    pass_k: Annotated[int, Field(ge=2)] = Field(4, description="k of pass@k: the number of samples of which one should be right.")
    whiten_advantages: bool = Field(False, description="Bring the advantages of a step's response tokens to mean 0 and variance 1.")
    reward_clip: PositiveFloat | None = Field(None, description="Clip rewards to this magnitude.")
    advantage_clip: PositiveFloat | None = Field(None, description="Clip advantages to this magnitude.")
    max_len_mask: bool = Field(False, description="Leave truncated responses out of the loss.")
    error_max_len_clip: bool = Field(False, description="Leave wrong responses that are too long out of the loss.")
    error_max_len_threshold: PositiveInt | None = Field(
        None, description="A response is too long from this many tokens on, and wrong if its reward is not above 0."
    )
    overlong_buffer: OverlongBufferConfig | None = Field(None, description="Lower the reward of responses that approach the length limit.")
    difficulty_mask: bool = Field(False, description="Leave the responses to too hard and too easy prompts out of the loss.")
    difficulty_low_threshold: Number = Field(0.0, description="A prompt is too hard if its group's mean reward is at most this.")
    difficulty_high_threshold: Number = Field(1.0, description="A prompt is too easy if its group's mean reward is at least this.")
    difficulty_loss_weight: bool = Field(
        False, description="Weigh a response's loss by its prompt's difficulty, 1 less the group's mean reward: 0.5 (easy) to 2 (hard)."
    )
    length_loss_weight: bool = Field(
        False, description="Weigh a response's loss by its length: 1.5 for the step's shortest to 0.5 for its longest."
    )

    policy_loss: Annotated[Method[PolicyLossTraits], Named(KINDS["policy_loss"])] = Field(
        POLICY_LOSSES["ppo"], description="The loss's policy term; see docs/algorithms.md."
    )
    policy_loss_args: dict[str, Any] = Field(
        default_factory=dict, description="Keys of a policy loss of your own, named as `package.module:Name`."
    )
    pg_clip: PositiveFloat = Field(0.2, description="The ratio is clipped to [1 - c, 1 + c]; `gmpo` clips the log-ratio to [-c, c].")
    pg_clip_low: PositiveFloat | None = Field(None, description="Lower clip; `pg_clip` if not given.")
    pg_clip_high: PositiveFloat | None = Field(None, description="Upper clip; `pg_clip` if not given.")
    dual_clip_loss: PositiveFloat | bool = Field(
        False, description="Bound the loss of tokens with a negative advantage at this multiple of it; `true` means 3."
    )
    sapo_positive_temperature: PositiveFloat = Field(
        1.0, description="How fast the gradient of a token with an advantage above 0 falls as its ratio leaves 1."
    )
    sapo_negative_temperature: PositiveFloat = Field(1.05, description="The same for the other tokens.")
    dppo_divergence: Literal["tv", "kl"] = Field(
        "tv", description="Divergence of the policy from the one that sampled, estimated from the sampled token: total variation, or KL."
    )
    dppo_threshold: PositiveFloat | None = Field(
        None,
        description="A token that has moved further than this in the direction of its advantage is left out of the loss. "
        "If not given: 0.15 for `tv`, 0.05 for `kl`.",
    )
    topr_positive_weight: NonNegativeFloat = Field(1.0, description="Weight of tokens with an advantage of at least 0.")
    topr_negative_weight: NonNegativeFloat = Field(1.0, description="Weight of tokens with a negative advantage.")
    clip_cov_ratio: Fraction = Field(2e-4, description="Share of a step's response tokens whose gradient is left out.")
    clip_cov_low: Number = Field(1.0, description="Those tokens are drawn from tokens with a covariance above this.")
    clip_cov_high: Number = Field(5.0, description="And below this.")
    kl_cov_ratio: Fraction = Field(2e-4, description="Share of a step's response tokens that are penalised.")
    kl_cov_coef: NonNegativeFloat = Field(1.0, description="Weight of the penalty.")
    off_policy_mask_threshold: PositiveFloat | None = Field(
        None,
        description="Leave tokens with a negative advantage out of the policy term where their sequence's mean of log(sampled / present "
        "probability) is above this, in nats; without it no token is left out.",
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = Field(
        "seq-mean-token-mean", description="How token losses are aggregated to one number, over all ranks and micro-batches of an update."
    )
    loss_scale_factor: PositiveFloat | None = Field(
        None, description="Tokens that `seq-mean-token-sum-norm` divides a sequence's sum by; `response_length` if not given."
    )
    entropy_loss_coef: Number = Field(0.0, description="Weight of the entropy bonus.")

    behaviour_log_probs: Literal["engine", "trainer", "on_policy"] | None = Field(
        None,
        description="Log-probs that the loss's ratios are taken against: `engine` keeps those of sampling, `trainer` recomputes them by a "
        "forward pass before a step's first update, `on_policy` takes the update's own (one update a step). "
        "If not given: `engine`, or `trainer` where `top_p`, `top_k` or `repetition_penalty` change what is sampled from.",
    )
    mismatch_correction: Annotated[Method[CorrectionTraits], Named(KINDS["mismatch_correction"])] = Field(
        NO_CORRECTION, description="Weigh or reject tokens by the trainer's probability over the engine's; see docs/algorithms.md."
    )
    mismatch_correction_args: dict[str, Any] = Field(
        default_factory=dict, description="Keys of a correction of your own, named as `package.module:Name`."
    )
    mismatch_cap: PositiveFloat | None = Field(None, description="Largest weight of the correction; its own default if not given.")
    mismatch_low: NonNegativeFloat | None = Field(
        None, description="Ratios below this are rejected; the correction's own default if not given."
    )
    mismatch_high: PositiveFloat | None = Field(
        None, description="Ratios above this are rejected; the correction's own default if not given."
    )

    use_kl_loss: bool = Field(False, description="Add the KL from the reference as a term of the loss.")
    kl_loss_coef: NonNegativeFloat = Field(0.0, description="Its weight.")
    kl_loss_type: Literal["k1", "k2", "k3", "k1+", "k3+"] = Field(
        "k3", description="Its estimator (Schulman, 2020); with `+` it has the gradient of k2, which is the KL's own."
    )
    kl_loss_importance: bool | None = Field(
        None,
        description="Weigh it by the ratio of the policy to the one that sampled, which makes its gradient exact off policy. If not given: "
        "`true` where `async_generation_ratio` is above 0 or a step makes several updates.",
    )
    add_token_level_kl: bool = Field(False, description="Subtract the KL to the reference from the reward, token by token.")
    init_kl_coef: NonNegativeFloat = Field(0.0, description="Its weight; the first step's if `target_kl` is given.")
    kl_penalty: Literal["k1", "k2", "k3", "abs"] = Field("k1", description="Its estimator.")
    target_kl: PositiveFloat | None = Field(
        None, description="Adapt its weight so that the KL comes to this many nats a token; constant if not given."
    )
    kl_horizon: PositiveInt = Field(10000, description="Responses over which the weight adapts.")

    distill_loss_coef: PositiveFloat = Field(
        1.0, description="With a `teacher`: weight of the divergence from it in the loss, beside the policy term."
    )
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        "reverse_kl",
        description="Divergence of the policy from the teacher on each sampled token, over the whole vocabulary: KL(teacher, policy), "
        "KL(policy, teacher), or Jensen-Shannon.",
    )
    jsd_beta: Annotated[float, Field(gt=0, lt=1)] = Field(0.5, description="`jsd`: weight of the teacher in the mixture.")
    distill_temperature: PositiveFloat = Field(1.0, description="Both models' logits are divided by it before they are compared.")
    distill_top_k: PositiveInt | None = Field(None, description=TOP_K)

    weight_sync: WeightSyncConfig = Field(
        default_factory=lambda: WeightSyncConfig.model_validate({}), description="How weights are sent from the trainer to the engines."
    )
    actor_train: ActorTrainConfig = Field(description="The policy that learns.")
    actor_infer: ActorInferConfig = Field(description="The policy that generates.")
    reference: ReferenceConfig | None = Field(
        None, description="The policy of the KL terms. Without this block and with LoRA it is `actor_train` with its adapter off."
    )
    teacher: ReferenceConfig | None = Field(
        None, description="The model whose distributions the policy learns on its own responses; it must have the policy's tokenizer."
    )
    teachers: dict[Name, DomainTeacherConfig] = Field(
        default_factory=dict,
        description="Several teachers in place of `teacher`, each with the keys of that role and its `domains`. They need `distill_top_k`.",
    )
    critic: CriticConfig | None = Field(None, description="The value function; `gae` needs it, and nothing else uses it.")
    rewards: dict[Name, RewardConfig] = Field(
        default_factory=dict, description="Reward of each domain; domains with an environment need none, because it gives rewards itself."
    )
    environments: dict[Name, EnvironmentConfig] = Field(
        default_factory=dict, description="Environments, by domain, in which the policy acts for several turns; see docs/agents.md."
    )
    gateway: GatewayConfig = Field(
        default_factory=lambda: GatewayConfig.model_validate({}),
        description="The HTTP server through which external agents reach the policy.",
    )
    sequence_length: PositiveInt | None = Field(
        None,
        description="Longest episode in an environment, in tokens: the first observation and all turns with their answers. "
        "`prompt_length + response_length` if not given.",
    )
    validation: ValidationConfig | None = Field(None, description="Held-out prompts.")

    @property
    def domains(self) -> dict[str, RewardConfig | EnvironmentConfig]:
        """The environment of each domain, if it has one, or else its reward."""
        return {**self.rewards, **self.environments}
