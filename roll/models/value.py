"""A causal transformer with a scalar head, for the values of a critic and the scores of a reward model.

A reward model: one score per sequence, computed from the state at its last token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from roll.config.derived.model_shape import is_seeing_hybrid, sees_pictures
from roll.config.schema.model import ModelConfig
from roll.errors import DataError, Fault
from roll.models.load import DTYPES, add_lora, load_tokenizer, pretrained
from roll.models.packed import PackedInputs, PackedModel
from roll.models.pictures import freeze_vision, sees
from roll.models.seeing_classifiers import register
from roll.models.weight_files import unreadable
from roll.types import Bools, Ints

HEAD = "score"
"""Name of the head in transformers' models for sequence classification."""


class ValueHead(nn.Module):
    """A linear map from hidden states to one number, without a bias. It computes in fp32, for weights of any precision.

    Because it is a module, calling it triggers ZeRO-3's hooks, which gather the sharded weight while it is used.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        """`weight` is [1, H]."""
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Return fp32 [K] for hidden states [K, H]."""
        return nn.functional.linear(hidden.float(), self.weight.float())[:, 0]


class PackedValues(PackedModel):
    """A model whose forward pass returns the value before each scored token."""

    def forward(self, inputs: PackedInputs) -> tuple[Tensor]:
        """Return the expected return before each token at `inputs.scored`, fp32 [S], from the state before it."""
        return self.values(inputs, back=1)

    def values(self, inputs: PackedInputs, back: int) -> tuple[Tensor]:
        """Return the head's output, fp32 [S], for the states `back` tokens before `inputs.scored`."""
        head = getattr(self.causal, HEAD)
        assert isinstance(head, ValueHead)
        (values,) = self.of_scored(inputs, back, lambda states, _: (head(states),))
        return (values,)


def load_value_model(path: str, model_args: ModelConfig, new_head: bool = True) -> PreTrainedModel:
    """Load the model with a `ValueHead`, as a transformers `...ForSequenceClassification` model with one label.

    The head of a reward model is kept. A language model has no head, so a new one is created with a weight of 0: all
    values start at 0, and the layers below learn from the second update on. If `new_head` is false, a model without a
    head is refused.

    Raises:
        DataError: the model has no head and `new_head` is false, or its files lack other weights; or see
            `load_causal_model`.
        ConfigError: see `load_causal_model`.
    """
    register()
    kind, more = AutoModelForSequenceClassification, with_one_label(path, model_args)
    model, found = pretrained(kind, path, model_args, packed=True, output_loading_info=True, **more)
    if lost := sorted(found["missing_keys"] - {f"{HEAD}.weight"}):
        problem = f"the model '{path}' cannot be read: its files lack {len(lost)} of its weights, such as {lost[0]}"
        raise DataError(Fault("pretrain", problem, "give a folder with all weights of the model", "unreadable"))
    if f"{HEAD}.weight" in found["missing_keys"]:
        if not new_head:
            raise DataError(no_reward_model(path, f"its weights have no head '{HEAD}'"))
        weight = torch.zeros(1, model.config.get_text_config().hidden_size)
    else:
        weight = whole_parameter(getattr(model, HEAD).weight)
    # ZeRO-3 requires all trained parameters to have the same precision, and PEFT's adapters are fp32.
    dtype = torch.float32 if model_args.lora_target else DTYPES[model_args.dtype]
    setattr(model, HEAD, ValueHead(nn.Parameter(weight.to(dtype))))
    if sees(model):
        freeze_vision(model, model_args.freeze_vision)
    return model


def with_one_label(path: str, model_args: ModelConfig) -> dict[str, Any]:
    """Return arguments of `from_pretrained` for a classifier with one label. For a multimodal hybrid that is not asked
    to see pictures, they select its text model.

    Raises:
        DataError: the configuration cannot be read.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=model_args.trust_remote_code)
    except (OSError, ValueError) as error:
        raise DataError(unreadable(path, "model", error)) from error
    if not is_seeing_hybrid(config.model_type) or sees_pictures(config.model_type, model_args.sees_pictures):
        return {"num_labels": 1}
    text = config.get_text_config()
    text.num_labels = 1
    return {"config": text}


def no_reward_model(path: str, why: str) -> Fault:
    """Return the fault of a model that is not a reward model."""
    remedy = (
        "give a sequence classifier with one label: the export of `pipeline: reward_model`, or a model from the Hub"
    )
    return Fault("model_args.model_name_or_path", f"'{path}' is not a reward model: {why}", remedy, "unfit")


def whole_parameter(parameter: nn.Parameter) -> Tensor:
    """Return a copy of the whole parameter. Collective if ZeRO-3 has sharded the parameter."""
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().clone()
    sharded: Any = parameter
    sharded.all_gather()
    copy = sharded.detach().clone()
    sharded.partition()
    return copy


def load_values(path: str, model_args: ModelConfig, seed: int) -> PackedValues:
    """Load the value model. With `lora_target`, only a new LoRA adapter and the head are trained.

    Raises the same errors as `load_causal_model` and `add_lora`.
    """
    model = load_value_model(path, model_args)
    if not model_args.lora_target:
        return PackedValues(model)
    values = PackedValues(add_lora(model, model_args, seed))
    getattr(values.causal, HEAD).requires_grad_(True)
    return values


class PackedScores(PackedValues):
    """A model whose forward pass returns each sequence's score. `inputs.scored` marks its last token."""

    def forward(self, inputs: PackedInputs) -> tuple[Tensor]:
        """Return fp32 [S] scores at `inputs.scored`."""
        return self.values(inputs, back=0)


def load_scores(path: str, model_args: ModelConfig, seed: int) -> PackedScores:
    """Load a reward model for training. A language model gets a new head of 0. See `load_values` for errors."""
    scores = PackedScores(load_values(path, model_args, seed).model)
    scores.causal.config.get_text_config().pad_token_id = pad_token(path, model_args)
    return scores


def load_reward_model(path: str, model_args: ModelConfig) -> PackedScores:
    """Load a trained reward model.

    Raises:
        DataError: the model is not a reward model, because it has no head or several labels; or see
            `load_causal_model`.
        ConfigError: see `load_causal_model`.
    """
    check_reward_model(path, model_args)
    return PackedScores(load_value_model(path, model_args, new_head=False))


def check_reward_model(path: str, model_args: ModelConfig) -> None:
    """Check that a model is a classifier with one label. Raises DataError if not, or it cannot be read."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=model_args.trust_remote_code)
    except (OSError, ValueError) as error:
        raise DataError(unreadable(path, "model", error)) from error
    if config.num_labels != 1:
        named = ", ".join(map(str, list((config.id2label or {}).values())[:4]))
        raise DataError(no_reward_model(path, f"its config.json has {config.num_labels} labels ({named})"))


def pad_token(path: str, model_args: ModelConfig) -> int | None:
    """Return the id of the padding token of the model or, if it has none, of its tokenizer."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=model_args.trust_remote_code).get_text_config()
    if config.pad_token_id is not None:
        return config.pad_token_id
    return load_tokenizer(path, model_args.trust_remote_code).pad_token_id  # pyright: ignore[reportReturnType]


def scored_token(token_ids: Ints, pad: int | None) -> Bools:
    """Mark [T] the token at which transformers' sequence classification reads the score: the last token that is not
    padding.

    If the padding token is also the end-of-sequence token, this is the token before the end. The first token is never
    marked.
    """
    found = np.flatnonzero(token_ids != pad) if pad is not None else np.arange(len(token_ids))
    where = int(found[-1]) if len(found) else len(token_ids) - 1
    return np.arange(len(token_ids)) == max(where, 1)
