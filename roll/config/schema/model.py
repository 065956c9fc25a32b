"""Keys of a role's model, its training, its rows and its sampling."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from roll.config.schema.base import (
    LARGEST_COUNT,
    BelowOne,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Ranks,
    StrictConfig,
)


class ModelConfig(StrictConfig):
    """Which model a role loads, and how."""

    model_name_or_path: PathText | None = Field(None, description="Folder or Hub name of the model; `pretrain` if not given.")
    dtype: Literal["bf16", "fp16", "fp32"] = Field("bf16", description="Precision of weights and activations.")
    attn_implementation: Literal["auto", "sdpa", "eager", "fa2"] = Field(
        "auto",
        description="Attention kernel. `auto`: the packed one that comes with torch; `fa2`: that of the package `flash-attn`.",
    )
    gradient_checkpointing: Literal["auto", "all", "none"] | NonNegativeInt = Field(
        "auto",
        description="Decoder layers whose activations are recomputed in the backward pass: `all`, `none`, or that many, the first ones. "
        "`auto`: on a GPU as many as memory demands, measured in the first updates; on the CPU all.",
    )
    compile_layers: Literal["auto"] | bool = Field(
        "auto",
        description="Compile the decoder layers, one code for all of them. `auto`: on a GPU, with neither `lora_dropout` nor `liger`.",
    )
    liger: bool = Field(False, description="Liger's fused RMSNorm, SwiGLU and rotary embedding: on a GPU, with the package `liger-kernel`.")
    lora_target: str | None = Field(
        None,
        description="Modules that get a LoRA adapter, comma-separated (`q_proj,v_proj`), or `all-linear`. Without it all parameters train.",
    )
    lora_rank: Annotated[int, Field(gt=0, le=16384)] = Field(8, description="Rank of the adapters.")
    lora_alpha: PositiveFloat | None = Field(
        None, description="Scale of the adapters: their output is multiplied by `lora_alpha / lora_rank`; twice `lora_rank` if not given."
    )
    lora_dropout: BelowOne = Field(0.0, description="Dropout on the adapters' input while training.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")


class TrainingConfig(StrictConfig):
    """The optimizer and the batch of one update."""

    optimizer: Literal["adamw", "adamw_8bit", "lion", "adagrad", "muon", "onebit_adam", "zero_one_adam", "onebit_lamb"] = Field(
        "adamw", description="See docs/deepspeed.md for what each needs."
    )
    learning_rate: NonNegativeFloat = Field(1e-6, description="Peak learning rate.")
    lora_learning_rate: NonNegativeFloat | None = Field(None, description="Learning rate of LoRA's matrices; `learning_rate` if not given.")
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
        "reduce_lr_on_plateau",
        "greedy",
    ] = Field("linear", description="Shape of the schedule after the warm-up, by transformers' names. The last two are refused.")
    lr_scheduler_kwargs: dict[str, float | int | str] = Field(
        default_factory=dict, description="Further arguments of transformers' schedule: `{min_lr: 1e-7}`."
    )
    warmup_steps: NonNegativeInt = Field(0, description="Optimizer updates of linear warm-up.")
    warmup_ratio: Fraction = Field(0.0, description="The same as a share of all updates; give one of the two.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Weight decay of matrices; norms, biases and other vectors are not decayed.")
    adam_beta1: BelowOne = Field(0.9, description="Decay of the first moment; with Lion of the momentum that makes the update.")
    adam_beta2: BelowOne = Field(0.999, description="Decay of the second moment; with Lion of the momentum that is kept.")
    adam_epsilon: PositiveFloat = Field(1e-8, description="Added to the root of the second moment.")
    per_device_train_batch_size: PositiveInt = Field(
        1,
        description="With `gradient_accumulation_steps` and the number of ranks, the sequences of one optimizer update. Ranks that "
        "share sequences (`sequence_parallel_size`, `autotp_size`) count as one.",
    )
    gradient_accumulation_steps: PositiveInt = Field(1, description="See `per_device_train_batch_size`.")
    max_consecutive_skips: NonNegativeInt = Field(
        10, description="The run ends after this many consecutive skipped updates, whose loss or gradient was not finite; 0: never."
    )
    router_aux_loss_coef: NonNegativeFloat | None = Field(
        None,
        description="Mixtures of experts: weight of the routers' load-balancing loss, beside the loss that is learnt; 0 measures it alone "
        "(`router/aux_loss`, `router/load_max`). Neither if not given.",
    )
    num_train_epochs: PositiveInt = Field(
        1, description="Passes over given rows, after which the run ends, unless `max_steps` ends it earlier; not in RLVR."
    )


class DataConfig(StrictConfig):
    """Where rows come from and which of their columns mean what."""

    file_name: PathText | tuple[PathText, ...] = Field(
        description="JSON, JSONL, Parquet or Arrow files, folders of them, or Hub names; relative to the working directory."
    )
    split: str = Field("train", description="Split to read where a source has several.")
    template: Literal["native", "chatml", "qwen2_5", "raw"] = Field(
        "native", description="Chat template: `native` (the tokenizer's own), `chatml`, `qwen2_5`, or `raw` (no template)."
    )
    messages: str | None = Field(None, description="Column that holds a list of `{role, content}`. Exclusive with `prompt`.")
    prompt: str | None = Field(None, description="Column that holds the prompt as text.")
    response: str | None = Field(None, description="With `prompt`: column that holds the response to learn.")
    text: str | None = Field(None, description="`sft`: column of raw text, all of it to learn; instead of `messages` and `prompt`.")
    chosen: str | None = Field(None, description="Pairs: column of the preferred response, a text or a list of messages.")
    rejected: str | None = Field(None, description="Pairs: column of the other response.")
    margin: str | None = Field(None, description="`reward_model`: column that says by how much the preferred response is better.")
    label: str | None = Field(None, description="`kto`: column that says whether the response is desirable, true or false.")
    system: str | None = Field(None, description="System message put before a `prompt`.")
    tag: str = Field("tag", description="Column that routes a row to the reward domain whose `tag_included` names its value.")
    id: str | None = Field(None, description="Column that names a row in reports.")
    domain_interleave_probs: dict[str, NonNegativeFloat] | None = Field(
        None, description="Share of each domain among the drawn prompts; in proportion to their rows if not given."
    )
    preprocessing_num_workers: Ranks = Field(1, description="Processes that tokenise.")


class GeneratingConfig(StrictConfig):
    """How responses are sampled."""

    max_new_tokens: PositiveInt | None = Field(None, description="`response_length` if not given.")
    temperature: NonNegativeFloat = Field(1.0, description="Softmax temperature; 0 is greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus sampling; 1 keeps all.")
    top_k: int = Field(-1, ge=-1, le=LARGEST_COUNT, description="Sample among the k most probable tokens; -1 or 0 keeps all.")
    repetition_penalty: PositiveFloat = Field(1.0, description="Above 1 discourages tokens that occurred before.")
    num_return_sequences: PositiveInt | None = Field(
        None, description="Samples of each prompt; `num_return_sequences_in_group` in training and 1 in validation if not given."
    )
    stop_strings: tuple[str, ...] = Field((), description="Texts that end a response.")
    seeded: bool = Field(
        False, description="Give every prompt a random seed of its own, so that a run can be repeated and resumed exactly; slower on GPUs."
    )
    ignore_eos: bool = Field(False, description="Ignore end-of-sequence tokens and generate to the limit; for benchmarks.")
