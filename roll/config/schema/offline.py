"""Keys of the pipelines that learn from given rows and generate nothing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from roll.algorithms.methods.base import Method
from roll.algorithms.methods.kinds import KINDS
from roll.algorithms.methods.preference_losses import PREFERENCE_LOSSES, PreferenceTraits
from roll.config.schema.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, StrictConfig
from roll.config.schema.methods import Named
from roll.config.schema.model import DataConfig
from roll.config.schema.roles import ExperimentConfig, ReferenceConfig, RowsTrainConfig

NAMES = "`rlvr`, `sft`, `dpo`, `reward_model` or `distill`."
TOP_K = (
    "Compares over this many of the teacher's most probable tokens, and all others as one, which bounds the divergence from below. The "
    "teacher then sends 8 bytes for each of these tokens instead of its hidden states. Default: the whole vocabulary."
)


class HeldOutConfig(StrictConfig):
    """Held-out rows, on which the loss is computed every `eval_steps`."""

    data_args: DataConfig | None = Field(None, description="The held-out rows; not given where `data_split` takes them from the learner's.")
    name: str = Field("validation", pattern=r"^[A-Za-z0-9_.-]+$", description="Name of the set in the metrics: `val/<name>/loss`.")


class OfflineConfig(ExperimentConfig):
    """What the pipelines that learn from given rows have in common."""

    max_steps: PositiveInt | None = Field(
        None, description="Most steps of the loop. Without it the run ends after `training_args.num_train_epochs` passes over the rows."
    )
    save_steps: NonNegativeInt | Literal["epoch"] = Field(
        0,
        description="Checkpoint every so many steps, or after each pass over the rows (`epoch`), and at the end; 0 saves at the end only.",
    )
    data_split: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] | None = Field(
        None,
        description="Shares of the learner's rows for training, for validation and for neither: `[9,1,0]`. "
        "`seed` determines the split; no row is in two parts.",
    )
    validation: HeldOutConfig | None = Field(None, description="Held-out rows. With `data_split` the block may be left out.")


class SftConfig(OfflineConfig):
    """Supervised fine-tuning on the same trainer."""

    pipeline: Literal["sft"] = Field(description=NAMES)
    loss_on: Literal["response", "assistant", "all"] = Field(
        "response",
        description="Learn the tokens of the last response alone, of all of the assistant's turns (`assistant`), or of the prompt too "
        "(`all`). Raw text is learnt as a whole.",
    )
    sft_train: RowsTrainConfig = Field(description="The model that learns.")


class DpoConfig(OfflineConfig):
    """Preferences: pairs of responses to one prompt, or responses with a label."""

    pipeline: Literal["dpo"] = Field(description=NAMES)
    preference_loss: Annotated[Method[PreferenceTraits], Named(KINDS["preference_loss"])] = Field(
        PREFERENCE_LOSSES["dpo"], description="The loss; see docs/post_training.md."
    )
    preference_loss_args: dict[str, Any] = Field(
        default_factory=dict, description="Keys of a loss of your own, named as `package.module:Name`."
    )
    added_preference_losses: dict[str, PositiveFloat] = Field(
        default_factory=dict,
        description="Further losses of pairs by name, each with the weight that it is added with: `{sft: 0.2}` is RPO's term.",
    )
    beta: PositiveFloat = Field(0.1, description="Scale of the rewards that the loss compares; `orpo`: weight of the odds ratio.")
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="Assumed share of pairs whose labels are swapped (cDPO)."
    )
    simpo_gamma: NonNegativeFloat = Field(0.5, description="Target margin between the rewards of the chosen and the rejected response.")
    desirable_weight: PositiveFloat = Field(1.0, description="Weight of desirable responses.")
    undesirable_weight: PositiveFloat = Field(1.0, description="Weight of the others.")
    reference_log_probs: Literal["live", "precomputed"] = Field(
        "live",
        description="`live` asks the reference in every step; `precomputed` once before the first, for the rows that the run will see, "
        "and then ends the role `reference`.",
    )
    actor_train: RowsTrainConfig = Field(description="The policy that learns.")
    reference: ReferenceConfig | None = Field(
        None,
        description="The policy that the loss compares with. Without this block and with LoRA it is `actor_train` with its adapter off.",
    )


class RewardModelConfig(OfflineConfig):
    """A model that scores responses, learnt from pairs."""

    pipeline: Literal["reward_model"] = Field(description=NAMES)
    reward_train: RowsTrainConfig = Field(description="The model that learns to score.")


class DistillConfig(OfflineConfig):
    """A student that learns a teacher's distributions."""

    pipeline: Literal["distill"] = Field(description=NAMES)
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        "forward_kl",
        description="Divergence that is minimised on each response token: KL(teacher, student), KL(student, teacher), or Jensen-Shannon.",
    )
    jsd_beta: Annotated[float, Field(gt=0, lt=1)] = Field(0.5, description="`jsd`: weight of the teacher in the mixture.")
    distill_temperature: PositiveFloat = Field(1.0, description="Both models' logits are divided by it before they are compared.")
    distill_top_k: PositiveInt | None = Field(None, description=TOP_K)
    distill_loss_weight: Fraction = Field(
        1.0, description="Weight of the divergence; the rest goes to the cross-entropy of the given responses."
    )
    student: RowsTrainConfig = Field(description="The model that learns.")
    teacher: ReferenceConfig = Field(description="The model whose distributions the student learns; it must have the student's tokenizer.")
