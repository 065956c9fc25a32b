"""Keys of the offline pipelines, which train on a fixed data set and generate nothing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from roll.algorithms.methods import KINDS, PREFERENCE_LOSSES, Method, PreferenceTraits
from roll.config.schema.base import (
    Fraction,
    Named,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StrictConfig,
)
from roll.config.schema.model import DataConfig
from roll.config.schema.roles import ExperimentConfig, ReferenceConfig, RowsTrainConfig

NAMES = "The pipeline: `rlvr`, `sft`, `dpo`, `reward_model` or `distill`."
Truncation = Literal["drop", "end", "middle", "start"]
"""What happens to a row that is longer than `max_length`."""
TOP_K = (
    "Compare only this many of the teacher's most probable tokens, with all others merged into one, which gives a "
    "lower bound of the "
    "divergence. The teacher then sends 8 bytes for each of these tokens instead of its hidden states. If not given: "
    "the whole vocabulary."
)


class HeldOutConfig(StrictConfig):
    """Held-out rows.

    The loss on them is computed every `eval_steps`.
    """

    data_args: DataConfig | None = Field(
        None, description="The held-out rows. Omit it if `data_split` takes them from the training rows."
    )
    name: str = Field(
        "validation", pattern=r"^[A-Za-z0-9_.-]+$", description="Name of the set in the metrics: `val/<name>/loss`."
    )


class OfflineConfig(ExperimentConfig):
    """Keys shared by the offline pipelines."""

    max_steps: PositiveInt | None = Field(
        None,
        description="Largest number of steps. If not given, the run ends after `training_args.num_train_epochs` "
        "passes over the rows.",
    )
    save_steps: NonNegativeInt | Literal["epoch"] = Field(
        0,
        description="Steps between checkpoints, or `epoch` for one after each pass over the rows; 0 saves only at the "
        "end of the run.",
    )
    max_length: PositiveInt | None = Field(
        None,
        description="Longest row in tokens, prompt and response together. It takes the place of `prompt_length` and "
        "`response_length`, which then may not be given. Raw text is cut into pieces of this length.",
    )
    truncation: Truncation = Field(
        "drop",
        description="With `max_length`: a longer row is dropped (`drop`), or cut at the `end`, so that its response "
        "has no end, or in the `middle` or at the `start` of its prompt. Rows that were dropped or cut are counted in "
        "the log.",
    )
    data_split: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] | None = Field(
        None,
        description="Proportions of the rows for training, for validation and for neither: `[9,1,0]`. The split is "
        "disjoint and depends on `seed`.",
    )
    validation: HeldOutConfig | None = Field(
        None, description="Held-out rows. The block may be omitted with `data_split`."
    )


class SftConfig(OfflineConfig):
    """Supervised fine-tuning."""

    pipeline: Literal["sft"] = Field(description=NAMES)
    loss_on: Literal["response", "assistant", "all"] = Field(
        "response",
        description="Tokens in the loss: those of the last response (`response`), of all assistant turns "
        "(`assistant`), or also those of the prompt (`all`). Raw text is always used as a whole.",
    )
    sft_train: RowsTrainConfig = Field(description="The model in training.")


class DpoConfig(OfflineConfig):
    """Preference optimisation, on pairs of responses to one prompt or on single responses with a label."""

    pipeline: Literal["dpo"] = Field(description=NAMES)
    preference_loss: Annotated[Method[PreferenceTraits], Named(KINDS["preference_loss"])] = Field(
        PREFERENCE_LOSSES["dpo"], description="The preference loss; see docs/post_training.md."
    )
    preference_loss_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of your own loss, if `preference_loss` is `package.module:Name`.",
    )
    added_preference_losses: dict[str, PositiveFloat] = Field(
        default_factory=dict,
        description="Additional losses on pairs, as name and weight: `{sft: 0.2}` adds the term of RPO.",
    )
    beta: PositiveFloat = Field(
        0.1, description="Scale of the implicit rewards that the loss compares. `orpo`: weight of the odds-ratio term."
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="Assumed fraction of pairs with swapped labels (cDPO)."
    )
    simpo_gamma: NonNegativeFloat = Field(
        0.5, description="Target margin between the rewards of the chosen and the rejected response."
    )
    desirable_weight: PositiveFloat = Field(1.0, description="Weight of desirable responses.")
    undesirable_weight: PositiveFloat = Field(1.0, description="Weight of undesirable responses.")
    reference_log_probs: Literal["live", "precomputed"] = Field(
        "live",
        description="`live` computes the log-probs of the reference in every step; `precomputed` computes them once "
        "before the first step and then stops the role `reference`.",
    )
    actor_train: RowsTrainConfig = Field(description="The policy in training.")
    reference: ReferenceConfig | None = Field(
        None,
        description="The reference policy. With LoRA the block may be omitted: `actor_train` without its adapter is "
        "used.",
    )


class RewardModelConfig(OfflineConfig):
    """A model that scores responses, trained on pairs."""

    pipeline: Literal["reward_model"] = Field(description=NAMES)
    reward_train: RowsTrainConfig = Field(description="The reward model in training.")


class DistillConfig(OfflineConfig):
    """Distillation: a student imitates the token distributions of a teacher on a fixed data set."""

    pipeline: Literal["distill"] = Field(description=NAMES)
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        "forward_kl",
        description="Divergence at each response token: KL(teacher, student) (`forward_kl`), KL(student, teacher) "
        "(`reverse_kl`), or Jensen-Shannon (`jsd`).",
    )
    jsd_beta: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5, description="`jsd`: weight of the teacher in the mixture distribution."
    )
    distill_temperature: PositiveFloat = Field(
        1.0, description="Temperature that divides the logits of both models before they are compared."
    )
    distill_top_k: PositiveInt | None = Field(None, description=TOP_K)
    distill_loss_weight: Fraction = Field(
        1.0,
        description="Weight w of the divergence in the loss; the cross-entropy of the given responses has the weight "
        "1 - w.",
    )
    student: RowsTrainConfig = Field(description="The model in training.")
    teacher: ReferenceConfig = Field(description="The model to imitate. It must use the tokenizer of the student.")
