"""Every key of an experiment, typed and described. `docs/configuration.md` is generated from this file.

Keys and defaults follow ROLL where ROLL has them. A checked config is frozen; nothing is filled in behind
the user's back, so a field that is None means "derived in the plan", and its description says from what.
Imports neither torch nor ray, so that a dry run is instant.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A block of the configuration: strict types, no unknown keys, frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelArgs(Section):
    """Which model a role loads, and how."""

    model_name_or_path: str | None = Field(None, description="Folder or Hub name of the model; `pretrain` if not given.")
    dtype: Literal["bf16", "fp16", "fp32"] = Field("bf16", description="Precision of weights and activations.")
    attn_implementation: Literal["auto", "sdpa", "eager", "fa2"] = Field(
        "auto", description="Attention kernel. `auto` picks the fastest packed kernel that the machine has."
    )
    disable_gradient_checkpointing: bool = Field(
        False, description="Keep all activations instead of recomputing them in the backward pass."
    )
    lora_target: str | None = Field(
        None,
        description="Modules that get a LoRA adapter, comma-separated (`q_proj,v_proj`), or `all-linear`. Without it all parameters train.",
    )
    lora_rank: PositiveInt = Field(8, description="Rank of the adapters.")
    lora_alpha: PositiveFloat = Field(16.0, description="Scale of the adapters: their output is multiplied by `lora_alpha / lora_rank`.")
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="Dropout on the adapters' input while training.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")


class TrainingArgs(Section):
    """The optimizer and the batch of one update."""

    learning_rate: NonNegativeFloat = Field(1e-6, description="Peak learning rate of AdamW.")
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"] = Field(
        "linear", description="Shape of the schedule after the warm-up."
    )
    warmup_steps: NonNegativeInt = Field(0, description="Optimizer updates of linear warm-up.")
    warmup_ratio: Fraction = Field(0.0, description="The same as a share of all updates; give one of the two.")
    weight_decay: NonNegativeFloat = Field(0.0, description="AdamW's decoupled weight decay.")
    adam_beta1: Fraction = Field(0.9, description="Decay of the first moment.")
    adam_beta2: Fraction = Field(0.999, description="Decay of the second moment.")
    adam_epsilon: PositiveFloat = Field(1e-8, description="AdamW's epsilon.")
    per_device_train_batch_size: PositiveInt = Field(
        1, description="With `gradient_accumulation_steps` and the number of ranks, the sequences of one optimizer update."
    )
    gradient_accumulation_steps: PositiveInt = Field(1, description="See `per_device_train_batch_size`.")
    num_train_epochs: PositiveInt = Field(1, description="SFT: passes over the data, unless `max_steps` ends them earlier.")


class DataArgs(Section):
    """Where rows come from and which of their columns mean what."""

    file_name: str | tuple[str, ...] = Field(
        description="JSON, JSONL, Parquet or Arrow files, folders of them, or Hub names; relative to the working directory."
    )
    split: str = Field("train", description="Split to read where a source has several.")
    template: Literal["native", "chatml", "qwen2_5", "raw"] = Field(
        "native", description="Chat template: `native` (the tokenizer's own), `chatml`, `qwen2_5`, or `raw` (no template)."
    )
    messages: str | None = Field(None, description="Column that holds a list of `{role, content}`. Exclusive with `prompt`.")
    prompt: str | None = Field(None, description="Column that holds the prompt as text.")
    response: str | None = Field(None, description="SFT with `prompt`: column that holds the response to learn.")
    system: str | None = Field(None, description="System message put before a `prompt`.")
    tag: str = Field("tag", description="Column that routes a row to the reward domain whose `tag_included` names its value.")
    id: str | None = Field(None, description="Column that names a row in reports.")
    domain_interleave_probs: dict[str, NonNegativeFloat] | None = Field(
        None, description="Share of each domain among the drawn prompts; in proportion to their rows if not given."
    )
    preprocessing_num_workers: PositiveInt = Field(1, description="Processes that tokenise.")


class GeneratingArgs(Section):
    """How responses are sampled."""

    max_new_tokens: PositiveInt | None = Field(None, description="`response_length` if not given.")
    temperature: NonNegativeFloat = Field(1.0, description="Softmax temperature; 0 is greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus sampling; 1 keeps all.")
    top_k: int = Field(-1, ge=-1, description="Sample among the k most probable tokens; -1 or 0 keeps all.")
    repetition_penalty: PositiveFloat = Field(1.0, description="Above 1 discourages tokens that occurred before.")
    num_return_sequences: PositiveInt | None = Field(
        None, description="Samples of each prompt; `num_return_sequences_in_group` in training and 1 in validation if not given."
    )
    stop_strings: tuple[str, ...] = Field((), description="Texts that end a response.")
    seeded: bool = Field(
        False, description="Give every prompt a random seed of its own, so that a run can be repeated and resumed exactly; slower on GPUs."
    )
    ignore_eos: bool = Field(False, description="Generate to the limit whatever the model says; for benchmarks.")


class ZeroOffload(Section):
    """DeepSpeed's offload of one kind of state."""

    device: Literal["none", "cpu", "nvme"] = Field("none", description="Where the states live.")
    pin_memory: bool = Field(False, description="Pin the host memory.")
    nvme_path: str | None = Field(None, description="Folder on the NVMe device.")
    buffer_count: PositiveInt | None = Field(None, description="Number of swap buffers.")
    fast_init: bool | None = Field(None, description="Initialise on the NVMe device directly.")
    ratio: Fraction | None = Field(None, description="Share of the parameters whose update runs on the CPU (ZeRO-3).")


class ZeroOptimization(Section):
    """DeepSpeed's `zero_optimization` block. Keys that roll does not read itself go through unchanged."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    stage: Literal[0, 1, 2, 3] = Field(
        description="What is partitioned over the ranks: 1 optimizer states, 2 also gradients, 3 also parameters."
    )
    offload_optimizer: ZeroOffload | None = Field(None, description="Keep optimizer states off the device.")
    offload_param: ZeroOffload | None = Field(None, description="Keep parameters off the device (stage 3).")


class DeepSpeedConfig(Section):
    """DeepSpeed's own configuration. Precision, batch sizes and clipping come from the role's other keys."""

    zero_optimization: ZeroOptimization = Field(description="The ZeRO block.")
    bf16: dict[str, Any] | None = Field(None, description="Must agree with `model_args.dtype` if given.")
    fp16: dict[str, Any] | None = Field(None, description="Must agree with `model_args.dtype` if given; also sets the loss scaler.")
    gradient_clipping: NonNegativeFloat | Literal["auto"] | None = Field(None, description="Must agree with `max_grad_norm` if given.")
    train_micro_batch_size_per_gpu: PositiveInt | Literal["auto"] | None = Field(
        None, description="Must agree with `per_device_train_batch_size` if given."
    )
    gradient_accumulation_steps: PositiveInt | Literal["auto"] | None = Field(None, description="Must agree with `training_args` if given.")
    train_batch_size: PositiveInt | Literal["auto"] | None = Field(
        None, description="Must agree with the plan's batch arithmetic if given."
    )
    steps_per_print: PositiveInt | None = Field(None, description="DeepSpeed's own progress line, every so many steps.")
    wall_clock_breakdown: bool = Field(False, description="DeepSpeed's own timers.")
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = Field(None, description="Precision of gradient reduction.")
    data_types: dict[str, Any] | None = Field(None, description="DeepSpeed's `data_types` block (`grad_accum_dtype`).")
    activation_checkpointing: dict[str, Any] | None = Field(None, description="DeepSpeed's block of this name.")
    aio: dict[str, Any] | None = Field(None, description="Asynchronous NVMe I/O.")
    zero_allow_untested_optimizer: Literal[True] | None = Field(None, description="True also where not given: roll makes the optimizer.")
    zero_force_ds_cpu_optimizer: Literal[False] | None = Field(None, description="False also where not given, for the same reason.")


class VllmConfig(Section):
    """The engine. `engine_args` hands anything else to vLLM's `AsyncEngineArgs`."""

    tensor_parallel_size: PositiveInt = Field(1, description="Devices that share one engine's layers.")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description="Share of a device's memory that the engine may take."
    )
    kv_cache_gib: PositiveFloat = Field(1.0, description="On the CPU: GiB of memory for the KV cache.")
    max_model_len: PositiveInt | None = Field(
        None, description="Longest prompt + response; `prompt_length + response_length` if not given."
    )
    max_num_seqs: PositiveInt = Field(512, description="Sequences that generate at the same time.")
    max_num_batched_tokens: PositiveInt = Field(8192, description="Tokens of one engine step.")
    block_size: PositiveInt | None = Field(None, description="Tokens of one KV-cache block; vLLM's choice if not given.")
    enforce_eager: bool = Field(False, description="Do not compile or capture graphs; starts faster, generates slower.")
    enable_prefix_caching: bool = Field(
        True, description="Share the KV cache of common prefixes: the samples of a group share their prompt."
    )
    load_format: Literal["auto", "dummy", "safetensors"] = Field(
        "auto", description="How the engine first loads weights. `dummy` skips the load; the first weight sync then brings them."
    )
    disable_custom_all_reduce: bool = Field(False, description="Tensor parallelism: use NCCL's all-reduce.")
    engine_args: dict[str, Any] = Field(default_factory=dict, description="Further arguments of `AsyncEngineArgs`.")


class HfConfig(Section):
    """transformers on one device per worker; nothing to set beyond the role's own keys."""


class DeepSpeedTrainStrategy(Section):
    """Trains with DeepSpeed."""

    strategy_name: Literal["deepspeed_train"] = Field(description="Trains with DeepSpeed ZeRO-0 to 3.")
    strategy_config: DeepSpeedConfig = Field(description="DeepSpeed's configuration; usually `${deepspeed_zero3}`.")


class DeepSpeedInferStrategy(Section):
    """Log-probs of a model that ZeRO-3 shards over the role's devices."""

    strategy_name: Literal["deepspeed_infer"] = Field(description="Log-probs of a model sharded by ZeRO-3.")
    strategy_config: DeepSpeedConfig = Field(description="DeepSpeed's configuration; stage 3.")


class HfInferStrategy(Section):
    """Log-probs, and generation for machines without vLLM."""

    strategy_name: Literal["hf_infer"] = Field(description="transformers: log-probs, and generation where vLLM cannot run.")
    strategy_config: HfConfig = Field(default_factory=HfConfig, description="Empty.")


class VllmStrategy(Section):
    """Generation with vLLM."""

    strategy_name: Literal["vllm"] = Field(description="Generates with vLLM.")
    strategy_config: VllmConfig = Field(default_factory=lambda: VllmConfig.model_validate({}), description="The engine's settings.")


Strategy = Annotated[DeepSpeedTrainStrategy | DeepSpeedInferStrategy | HfInferStrategy | VllmStrategy, Field(discriminator="strategy_name")]


class Role(Section):
    """A group of Ray actors that do one job on a set of devices."""

    model_args: ModelArgs = Field(default_factory=lambda: ModelArgs.model_validate({}), description="The model.")
    strategy_args: Strategy = Field(description="The backend.")
    device_mapping: tuple[NonNegativeInt, ...] | None = Field(
        None, description="GPUs of the role, counted over all nodes: a list, or `list(range(0,16))`. Without it the role runs on the CPU."
    )
    world_size: PositiveInt | None = Field(None, description="Workers of a role that runs on the CPU; 1 if not given.")
    max_tokens_per_microbatch: PositiveInt | None = Field(
        None,
        description="Token budget of one forward pass; sequences are packed up to it. "
        "If not given: the role's batch size times `prompt_length + response_length`.",
    )
    infer_batch_size: PositiveInt = Field(1, description="Sequences behind the default token budget of a log-prob pass.")
    system_envs: dict[str, str] = Field(default_factory=dict, description="Environment variables of the role's processes.")


class ActorTrain(Role):
    """The policy that learns."""

    strategy_args: DeepSpeedTrainStrategy = Field(description="The backend.")
    training_args: TrainingArgs = Field(default_factory=lambda: TrainingArgs.model_validate({}), description="Optimizer and batch.")
    data_args: DataArgs = Field(description="The prompts (RLVR) or examples (SFT).")


class ActorInfer(Role):
    """The policy that generates."""

    strategy_args: Annotated[VllmStrategy | HfInferStrategy, Field(discriminator="strategy_name")] = Field(description="The backend.")
    generating_args: GeneratingArgs = Field(default_factory=lambda: GeneratingArgs.model_validate({}), description="Sampling of rollouts.")


class Reference(Role):
    """The policy that KL terms compare with."""

    strategy_args: Annotated[HfInferStrategy | DeepSpeedInferStrategy, Field(discriminator="strategy_name")] = Field(
        description="The backend."
    )


class Reward(Section):
    """One domain's reward: a function, run in processes that can be ended."""

    reward: str | None = Field(None, description="Name of the reward function; the domain's own name if not given.")
    reward_args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")
    tag_included: tuple[str, ...] | None = Field(
        None, description="Values of the `tag` column that this domain scores; the domain's name if not given."
    )
    world_size: PositiveInt = Field(1, description="Worker processes.")
    timeout: PositiveFloat = Field(10.0, description="Deadline of one reward, in seconds.")
    failed_value: float = Field(
        0.0, description="Reward of a response from which no answer could be read. One whose reward crashed or timed out is not trained on."
    )
    system_envs: dict[str, str] = Field(default_factory=dict, description="Environment variables of the worker processes.")


class Validation(Section):
    """Held-out prompts, answered every `eval_steps`."""

    data_args: DataArgs = Field(description="The held-out prompts.")
    generating_args: GeneratingArgs = Field(
        default_factory=lambda: GeneratingArgs.model_validate({}), description="Sampling in validation."
    )
    name: str = Field("validation", pattern=r"^[A-Za-z0-9_.-]+$", description="Name of the set in the metrics: `val/<name>/pass@1`.")


class WeightSync(Section):
    """How weights travel from the trainer to the engine."""

    lora: Literal["adapter", "merged"] = Field(
        "adapter", description="With LoRA: send the adapter alone, or the whole model with the adapter merged in (generates faster)."
    )
    bucket_mib: PositiveInt = Field(
        512, description="Weights are gathered and sent in buckets of at most so many MiB (one tensor at least)."
    )


class Deadlines(Section):
    """Seconds after which a wait ends in an error that names who is late."""

    start: PositiveFloat = Field(900.0, description="A role's start: processes, imports, model, engine.")
    rollout: PositiveFloat = Field(3600.0, description="The rollouts of one step.")
    train: PositiveFloat = Field(3600.0, description="A training step, or a pass for log-probs.")
    weight_sync: PositiveFloat = Field(300.0, description="Each bucket of a weight sync.")
    checkpoint: PositiveFloat = Field(1800.0, description="Writing or reading a checkpoint.")
    shutdown: PositiveFloat = Field(30.0, description="Orderly end of a role, before it is ended by force.")


class Experiment(Section):
    """What RLVR and SFT have in common."""

    exp_name: str = Field(description="Name of the run.", pattern=r"^[A-Za-z0-9_.-]+$")
    seed: NonNegativeInt = Field(42, description="Of everything random: sampling of prompts and of tokens, LoRA's initialisation.")
    output_dir: str = Field(description="The run folder, used exactly as given.")
    pretrain: str = Field(description="Folder or Hub name of the policy's starting point.")
    dry_run: bool = Field(False, description="Print the plan and end.")
    max_steps: PositiveInt = Field(description="Steps of the loop.")
    save_steps: NonNegativeInt = Field(0, description="Checkpoint every so many steps, and at the end; 0 saves at the end only.")
    keep_checkpoints: PositiveInt = Field(2, description="Older checkpoints are removed once a newer one is whole.")
    eval_steps: NonNegativeInt = Field(0, description="Validate every so many steps, before the first and after the last; 0 never.")
    resume_from_checkpoint: str = Field(
        "auto", description="`auto` (the newest whole checkpoint of `output_dir`), `never`, or a checkpoint's folder."
    )
    track_with: str | tuple[str, ...] = Field(
        "tensorboard", description="Trackers beside `metrics.jsonl`: `tensorboard`, `wandb`, `none`, or several."
    )
    tracker_kwargs: dict[str, Any] = Field(default_factory=dict, description="By tracker, further keyword arguments.")
    num_gpus_per_node: PositiveInt = Field(8, description="GPUs of one node: global device d is device d % n of node d // n.")
    prompt_length: PositiveInt = Field(1024, description="Longest prompt in tokens; longer rows are dropped and counted.")
    response_length: PositiveInt = Field(1024, description="Longest response in tokens.")
    max_grad_norm: PositiveFloat = Field(1.0, description="Gradients are scaled down to this global norm.")
    system_envs: dict[str, str] = Field(default_factory=dict, description="Environment variables of every worker.")
    deadlines: Deadlines = Field(default_factory=lambda: Deadlines.model_validate({}), description="Bounds of every wait.")


class RlvrConfig(Experiment):
    """Reinforcement learning from verifiable rewards."""

    pipeline: Literal["rlvr"] = Field("rlvr", description="`rlvr` or `sft`.")

    rollout_batch_size: PositiveInt = Field(64, description="Prompts of one step.")
    num_return_sequences_in_group: PositiveInt = Field(1, description="Samples of each prompt.")
    async_generation_ratio: NonNegativeFloat = Field(
        0.0, description="How many steps generation may run ahead of training; 0 is synchronous."
    )
    ppo_epochs: PositiveInt = Field(1, description="Passes over a step's samples.")

    adv_estimator: Literal["grpo", "reinforce"] = Field("grpo", description="Advantage estimator; see docs/algorithms.md.")
    gamma: Fraction = Field(1.0, description="Discount of later rewards (`reinforce`).")
    norm_mean_type: Literal["batch", "group"] | None = Field(
        None, description="`reinforce`: subtract the mean reward of the batch or of the group."
    )
    norm_std_type: Literal["batch", "group"] | None = Field(
        None, description="`reinforce`: divide by the standard deviation of the batch or group."
    )
    whiten_advantages: bool = Field(False, description="Bring the advantages of a step's response tokens to mean 0 and variance 1.")
    reward_clip: PositiveFloat | None = Field(None, description="Clip rewards to this magnitude.")
    advantage_clip: PositiveFloat | None = Field(None, description="Clip advantages to this magnitude.")
    max_len_mask: bool = Field(False, description="Leave truncated responses out of the loss.")

    pg_clip: PositiveFloat = Field(0.2, description="PPO clips the ratio to [1 - c, 1 + c].")
    pg_clip_low: PositiveFloat | None = Field(None, description="Lower clip; `pg_clip` if not given.")
    pg_clip_high: PositiveFloat | None = Field(None, description="Upper clip; `pg_clip` if not given.")
    dual_clip_loss: PositiveFloat | bool = Field(
        False, description="Bound the loss of tokens with a negative advantage at this multiple of it; `true` means 3."
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = Field(
        "seq-mean-token-mean", description="How token losses become one number, over all ranks and micro-batches of an update."
    )
    entropy_loss_coef: float = Field(0.0, description="Weight of the entropy bonus.")

    use_kl_loss: bool = Field(False, description="Add the KL to the reference to the loss.")
    kl_loss_coef: NonNegativeFloat = Field(0.0, description="Its weight.")
    kl_loss_type: Literal["k1", "k2", "k3"] = Field("k3", description="Its estimator (Schulman, 2020).")
    add_token_level_kl: bool = Field(False, description="Subtract the KL to the reference from the reward, token by token.")
    init_kl_coef: NonNegativeFloat = Field(0.0, description="Its weight.")
    kl_penalty: Literal["k1", "k2", "k3"] = Field("k1", description="Its estimator.")

    weight_sync: WeightSync = Field(default_factory=lambda: WeightSync.model_validate({}), description="Trainer to engine.")
    actor_train: ActorTrain = Field(description="The policy that learns.")
    actor_infer: ActorInfer = Field(description="The policy that generates.")
    reference: Reference | None = Field(
        None, description="The policy of the KL terms. Without this block and with LoRA it is `actor_train` with its adapter off."
    )
    rewards: dict[str, Reward] = Field(min_length=1, description="Reward of each domain.")
    validation: Validation | None = Field(None, description="Held-out prompts.")


class SftConfig(Experiment):
    """Supervised fine-tuning on the same trainer."""

    pipeline: Literal["sft"] = Field(description="`rlvr` or `sft`.")
    sft_train: ActorTrain = Field(description="The model that learns.")


Config = RlvrConfig | SftConfig
