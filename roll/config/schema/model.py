"""Keys of a role's model, training, data and sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from roll.config.schema.base import (
    LARGEST_COUNT,
    BelowOne,
    Fraction,
    Names,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Ranks,
    StrictConfig,
)

FrozenVision = Literal["none", "tower", "all"]
"""What is not trained of the part of a model that sees pictures."""
QuantizedBase = Literal["nf4", "nf4_double"]
"""How the weights under an adapter are held in 4 bits."""
LORA_KEYS = (
    "lora_rank", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "init_lora_weights", "quantized_base",
)  # fmt: skip
"""Keys of an adapter, which need a `lora_target`."""


class ModelConfig(StrictConfig):
    """The model of a role."""

    model_name_or_path: PathText | None = Field(
        None, description="Folder or Hub name of the model; `pretrain` if not given."
    )
    dtype: Literal["bf16", "fp16", "fp32"] = Field("bf16", description="Data type of weights and activations.")
    attn_implementation: Literal["auto", "sdpa", "eager", "fa2"] = Field(
        "auto",
        description="Attention kernel. `auto` is torch's variable-length kernel for packed sequences; `fa2` is "
        "flash-attn's, or `auto` without this package. Attention with capped scores (Gemma 2, without `fa2`) or sinks "
        "(gpt-oss) is plain torch, whose memory grows with the square of the longest sequence.",
    )
    gradient_checkpointing: Literal["auto", "all", "none", "attention"] | NonNegativeInt = Field(
        "auto",
        description="Decoder layers that recompute their activations in the backward pass: `all`, `none`, or a number "
        "n for the first n. `attention`: all layers recompute their attention only. "
        "`auto`: on the CPU all; on a GPU as many as memory requires, which is measured in the first updates.",
    )
    compile_layers: Literal["auto"] | bool = Field(
        "auto",
        description="Compile the decoder layers with torch.compile. `auto`: on a GPU, unless `dropout`, "
        "`lora_dropout`, `liger` or `engine_kernels` is used.",
    )
    dropout: bool = Field(
        False,
        description="Train with the dropout and the other noise that the model's own configuration asks for. Only in "
        "pipelines that train on rows: ratios compare log-probs of several passes, which noise would make differ.",
    )
    liger: bool = Field(
        False,
        description="Use Liger's fused RMSNorm, SwiGLU and rotary embedding. Needs a GPU and the package "
        "`liger-kernel`.",
    )
    engine_kernels: bool = Field(
        False,
        description="Compute the forward pass with the kernels of a vLLM engine with `batch_invariant` that is not "
        "compiled, so that log-probs equal the engine's to the last bit. Slower. On GPUs, for dense models whose "
        "weights are all trained; see docs/performance.md.",
    )
    lora_target: Names | None = Field(
        None,
        description="Modules that get a LoRA adapter, comma-separated (`q_proj,v_proj`) or as a list, or "
        "`all-linear`. If not given, all parameters are trained.",
    )
    lora_rank: Annotated[int, Field(gt=0, le=16384)] = Field(8, description="Rank of the LoRA adapters.")
    lora_alpha: PositiveFloat | None = Field(
        None,
        description="The output of the adapters is scaled by `lora_alpha / lora_rank`; 2 x `lora_rank` if not given.",
    )
    lora_dropout: BelowOne = Field(0.0, description="Dropout probability on the input of the adapters in training.")
    use_rslora: bool = Field(
        False, description="Scale the output of the adapters by `lora_alpha / sqrt(lora_rank)` instead (rsLoRA)."
    )
    use_dora: bool = Field(
        False,
        description="Train the norm of each row of an adapted matrix apart from its direction (DoRA). vLLM has no "
        "such adapters, so it needs `weight_sync.lora: merged`.",
    )
    init_lora_weights: Literal[True, "pissa"] | Annotated[str, Field(pattern=r"^pissa_niter_[1-9][0-9]?$")] = Field(
        True,
        description="Initial adapter. `true`: B is 0. `pissa`: A and B from the largest singular values of the matrix, "
        "whose first product is subtracted from the adapter's output (PiSSA). `pissa_niter_16`: the same by a "
        "randomised SVD of 16 iterations, which is much faster.",
    )
    quantized_base: QuantizedBase | None = Field(
        None,
        description="Hold the linear layers under the adapter in 4 bits (QLoRA): `nf4`, or `nf4_double`, whose scales "
        "are quantised, too. The policy is the adapter on these rounded weights, so it needs "
        "`weight_sync.lora: merged`. Needs the package `bitsandbytes`.",
    )
    freeze_vision: FrozenVision = Field(
        "none",
        description="Models that see pictures: what stays as it is. `tower`: the vision tower, while the projector "
        "into the text model is trained; `all`: both; `none`: neither. With `lora_target`, both always stay.",
    )
    sees_pictures: Literal[True] | None = Field(
        None,
        description="Load the vision tower of a model that is also trained on text alone (Qwen3.5, Gemma 3), so that "
        "rows, environments and tools may show pictures. If not given, they show none. Other models that see pictures "
        "always have theirs.",
    )
    trust_remote_code: bool = Field(False, description="Allow Python code from the model repository to run.")

    @property
    def sent_rank(self) -> int:
        """The rank of the adapter that engines and exports get: with PiSSA, the change of the whole model has twice the
        rank that is trained.
        """
        return self.lora_rank * (1 if self.init_lora_weights is True else 2)


class TrainingConfig(StrictConfig):
    """Optimizer, learning-rate schedule and batch size."""

    optimizer: Literal[
        "adamw", "adamw_8bit", "lion", "adagrad", "muon", "onebit_adam", "zero_one_adam", "onebit_lamb"
    ] = Field("adamw", description="Optimizer; docs/deepspeed.md lists the requirements of each.")
    learning_rate: NonNegativeFloat = Field(1e-6, description="Peak learning rate.")
    lora_learning_rate: NonNegativeFloat | None = Field(
        None, description="Learning rate of the LoRA adapters; `learning_rate` if not given."
    )
    loraplus_lr_ratio: Annotated[float, Field(ge=1)] | None = Field(
        None,
        description="The matrices B of LoRA adapters, and DoRA's norms, have this many times the learning rate of the "
        "matrices A (LoRA+). 1 if not given; 16 is usual.",
    )
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
        "WarmupLR",
        "WarmupDecayLR",
        "WarmupCosineLR",
        "OneCycle",
    ] = Field(
        "linear",
        description="Learning-rate schedule after the warm-up, as named in transformers, or in DeepSpeed (the last "
        "four). `reduce_lr_on_plateau` and `greedy` need a metric and are refused.",
    )
    lr_scheduler_kwargs: dict[str, bool | float | int | str] = Field(
        default_factory=dict,
        description="Additional arguments of the schedule in transformers or DeepSpeed: `{min_lr: 1e-7}`.",
    )
    warmup_steps: NonNegativeInt = Field(
        0, description="Number of optimizer updates of warm-up, which is linear unless a schedule of DeepSpeed has one."
    )
    warmup_ratio: Fraction = Field(0.0, description="Warm-up as a fraction of all updates, instead of `warmup_steps`.")
    weight_decay: NonNegativeFloat = Field(
        0.0, description="Weight decay of matrices. Norms, biases and other vectors are not decayed."
    )
    adam_beta1: BelowOne = Field(
        0.9, description="Decay rate of the first moment. With `lion`: weight of the momentum in the update."
    )
    adam_beta2: BelowOne = Field(
        0.999, description="Decay rate of the second moment. With `lion`: decay rate of the momentum."
    )
    adam_epsilon: PositiveFloat = Field(
        1e-8, description="Added to the square root of the second moment, for numerical stability."
    )
    per_device_train_batch_size: PositiveInt = Field(
        1,
        description="Sequences of one optimizer update = this x `gradient_accumulation_steps` x ranks. Ranks that "
        "share sequences "
        "(`sequence_parallel_size`, `autotp_size`) count as one. Without `max_tokens_per_microbatch`, a forward pass "
        "has at most as many "
        "tokens as this number of the longest sequences. In `rlvr` without `gradient_accumulation_steps` this is its "
        "only effect: `updates_per_step` says the size of an update.",
    )
    gradient_accumulation_steps: PositiveInt | None = Field(
        None,
        description="See `per_device_train_batch_size`. If not given: 1, but in `rlvr` `updates_per_step` says the "
        "size of an update.",
    )
    max_consecutive_skips: NonNegativeInt = Field(
        10,
        description="End the run after this many consecutive updates were skipped because of a NaN or infinity; 0 "
        "never ends it.",
    )
    router_aux_loss_coef: NonNegativeFloat | None = Field(
        None,
        description="Mixture of experts: weight of the routers' load-balancing loss, which is added to the loss. 0 "
        "only reports the metrics `router/aux_loss` and `router/load_max`. If not given, neither is computed.",
    )
    num_train_epochs: PositiveInt = Field(
        1,
        description="Number of passes over the rows, after which the run ends, unless `max_steps` ends it earlier. "
        "Not used in RLVR.",
    )


def truths_as_text(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments of a chat template that are the text of a truth value: Jinja takes even "false" as true."""
    return [
        key for key, value in arguments.items() if isinstance(value, str) and value.strip().lower() in ("true", "false")
    ]


class DataConfig(StrictConfig):
    """Data: the source of the rows and the meaning of their columns."""

    file_name: PathText | tuple[PathText, ...] = Field(
        description="JSON, JSONL, CSV, Parquet or Arrow files, folders of them, or Hub names; relative to the working "
        "directory."
    )
    split: str = Field("train", description="Split to read if a source has several.")
    template: Literal["native", "chatml", "qwen2_5", "raw"] = Field(
        "native",
        description="Chat template: `native` (the tokenizer's own), `chatml`, `qwen2_5`, or `raw` (no template).",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None,
        description="Arguments of the chat template for every row, such as `{enable_thinking: false}`; those of a row "
        "take precedence. Held-out rows with the same `template` have those of the training rows by default.",
    )
    messages: str | None = Field(
        None, description="Column with a list of `{role, content}`. Give either this or `prompt`."
    )
    prompt: str | None = Field(
        None,
        description="Column with the prompt as text. Keys joined with dots reach into a column: `extra_info.question`.",
    )
    input: str | None = Field(
        None,
        description="With `prompt`: column with more text of the prompt. If it is not empty, it follows `prompt` on a "
        "new line.",
    )
    ground_truth: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="Column with the reference answer. Keys joined with dots reach into a column: "
        "`reward_model.ground_truth`. Rewards read the value as `ground_truth`. If this key is set, every row must "
        "have a value there. If not, rewards read `ground_truth`, or `answer` of rows without one.",
    )
    response: str | None = Field(
        None,
        description="Column with the response to train on, a string or a list with one message of the assistant. With "
        "`prompt` (keys joined with dots as there), or with `messages` that end before the response; of these, no "
        "message is then trained on unless `loss_on` is `all`.",
    )
    text: str | None = Field(
        None,
        description="`sft`: column with raw text, instead of `messages` or `prompt`. All its tokens are trained on.",
    )
    chosen: str | None = Field(
        None, description="Pairs: column with the preferred response, a string or a list of messages."
    )
    rejected: str | None = Field(None, description="Pairs: column with the other response, in the same form.")
    margin: str | None = Field(
        None, description="`reward_model`: column with the margin by which the preferred response should score higher."
    )
    label: str | None = Field(
        None, description="`kto`: column that is true for desirable and false for undesirable responses."
    )
    images: str | None = Field(
        None,
        description="All but `distill`, with a model that sees pictures: column with the picture of a row or a list of "
        "them. They take the places of parts that do not say where their picture is and of `<image>` in the text, or "
        "stand before the first message of the user.",
    )
    system: str | None = Field(
        None,
        description="Text of a system message to put before `prompt`, not a column. "
        "Refused if the rows have a column of this name.",
    )
    tag: str = Field(
        "tag", description="Column whose value assigns a row to a domain; see `tag_included` of the domains."
    )
    id: str | None = Field(None, description="Column with an identifier of the row, for reports.")
    domain_interleave_probs: dict[str, NonNegativeFloat] | None = Field(
        None,
        description="Weight of each domain in the sampling of prompts; proportional to its number of rows if not "
        "given.",
    )
    preprocessing_num_workers: Ranks = Field(1, description="Number of processes that tokenise the rows.")

    def rendered_as(self, trained: DataConfig | None) -> DataConfig:
        """Return these held-out rows with the training rows' arguments of the template, unless they have their own."""
        if trained is None or self.template != trained.template or self.chat_template_kwargs is not None:
            return self
        return self.model_copy(update={"chat_template_kwargs": trained.chat_template_kwargs})


class GeneratingConfig(StrictConfig):
    """Sampling parameters of responses."""

    max_new_tokens: PositiveInt | None = Field(
        None, description="Largest number of tokens to generate; `response_length` if not given."
    )
    temperature: NonNegativeFloat = Field(1.0, description="Softmax temperature; 0 is greedy decoding.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0,
        description="Nucleus sampling: sample from the smallest set of tokens with this total probability. 1 disables "
        "it.",
    )
    top_k: int = Field(
        -1, ge=-1, le=LARGEST_COUNT, description="Sample from the k most probable tokens; -1 or 0 keeps all."
    )
    repetition_penalty: PositiveFloat = Field(
        1.0, description="Values above 1 discourage tokens that occurred before; 1 disables it."
    )
    num_return_sequences: PositiveInt | None = Field(
        None,
        description="Responses per prompt. If not given: `num_return_sequences_in_group` in training, 1 in validation.",
    )
    stop_strings: tuple[str, ...] = Field((), description="Strings that end a response when they are generated.")
    seeded: bool = Field(
        False,
        description="Sample each prompt with its own random seed, so that a run can be repeated and resumed exactly. "
        "Slower on GPUs.",
    )
    ignore_eos: bool = Field(
        False, description="Ignore end-of-sequence tokens and generate up to the limit, for benchmarks."
    )
