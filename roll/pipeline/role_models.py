"""Properties of a role's model, known before it is loaded: its location, vocabulary and shape, and the FLOPs of training."""

from __future__ import annotations

from pathlib import Path

from roll.config.derived.model_shape import ModelShape, config_file, read_shape
from roll.config.schema.model import ModelConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.roles import ExperimentConfig
from roll.models.flops import TrainingFlops
from roll.models.load import load_tokenizer
from roll.models.score import load_scores
from roll.models.vocabulary import check_same_vocabulary
from roll.strategies.settings import ModelLoader


def model_path(config: ExperimentConfig, model_args: ModelConfig) -> str:
    """Return the Hub name or the absolute folder of a role's model. It is absolute because workers may have another working directory."""
    name = model_args.model_name_or_path or config.pretrain
    return str(Path(name).absolute()) if Path(name).exists() else name


def check_same_tokens(config: Config, ours: ModelConfig, other: ModelConfig, role: str) -> None:
    """Check that the model of `role` has the same vocabulary as the learner.

    Raises:
        DataError: a tokenizer cannot be read, or the two tokenizers assign different ids to the same tokens.
    """
    learner, asked = (load_tokenizer(model_path(config, one), one.trust_remote_code) for one in (ours, other))
    check_same_vocabulary(learner, asked, f"{role}.model_args.model_name_or_path")


def model_shape(model: str) -> ModelShape | None:
    """Return the shape of a model, given its folder or Hub name; None if the model is not on this machine."""
    file = config_file(model)
    return read_shape(file) if file else None


def training_flops(model: ModelShape, model_args: ModelConfig, load: ModelLoader) -> TrainingFlops | None:
    """Return the model FLOPs of training; None for fp32, because utilisation is relative to the bf16 peak."""
    if model_args.dtype == "fp32":
        return None
    whole = model.valuing_parameters if load is load_scores else model.parameters
    whole -= model.parameters - model.active_parameters
    adapter = model.adapter_parameters(model_args.lora_target, model_args.lora_rank) if model_args.lora_target else 0
    return TrainingFlops(whole + adapter, adapter or whole, model.attending_flops)
