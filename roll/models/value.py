"""A causal transformer with a scalar head: the values of a critic, the scores of a reward model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from roll.config.derived.model_shape import is_seeing_hybrid
from roll.config.schema.model import ModelConfig
from roll.errors import DataError, Fault
from roll.models.load import DTYPES, PackedInputs, PackedModel, add_lora, pretrained, unreadable

HEAD = "score"
"""Name of the head in transformers' models for sequence classification."""


class ValueHead(nn.Module):
    """A linear map of hidden states to one number, without a bias. Its arithmetic is fp32, whatever its weight is.

    Being a module, its call triggers ZeRO-3's hooks, so that the sharded weight is whole while it is used.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        """`weight`: [1, H]."""
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Return fp32 [K] of hidden [K, H]."""
        return nn.functional.linear(hidden.float(), self.weight.float())[:, 0]


class PackedValues(PackedModel):
    """A model whose forward pass returns the value of the state before each chosen token."""

    def forward(self, inputs: PackedInputs) -> tuple[Tensor]:
        """Return the expected return fp32 [S] before each token at `inputs.scored`, from the hidden state of the token before it."""
        return self.values(inputs, back=1)

    def values(self, inputs: PackedInputs, back: int) -> tuple[Tensor]:
        """Return the head's output fp32 [S] for the states `back` tokens before each of `inputs.scored`."""
        head = getattr(self.causal, HEAD)
        assert isinstance(head, ValueHead)
        (values,) = self.of_scored(inputs, back, lambda states, _: (head(states),))
        return (values,)


def load_value_model(path: str, model_args: ModelConfig, new_head: bool = True) -> PreTrainedModel:
    """Load the model with a `ValueHead`, as transformers' `...ForSequenceClassification` with one label.

    A folder that has such a head, a reward model's, keeps it. In that of a language model it is missing and starts at 0: every
    value is 0 at first, and the layers below learn from the second update on. Without `new_head` it is refused.

    Raises:
        As `load_causal_model`.
    """
    kind, more = AutoModelForSequenceClassification, with_one_label(path, model_args)
    model, found = pretrained(kind, path, model_args, packed=True, output_loading_info=True, **more)
    if f"{HEAD}.weight" in found["missing_keys"]:
        if not new_head:
            raise DataError([no_reward_model(path, f"its weights have no head '{HEAD}'")])
        weight = torch.zeros(1, model.config.get_text_config().hidden_size)
    else:
        weight = whole(getattr(model, HEAD).weight)
    # ZeRO-3 lets no two precisions train beside each other, and PEFT's adapters are fp32.
    dtype = torch.float32 if model_args.lora_target else DTYPES[model_args.dtype]
    setattr(model, HEAD, ValueHead(nn.Parameter(weight.to(dtype))))
    return model


def with_one_label(path: str, model_args: ModelConfig) -> dict[str, Any]:
    """Arguments of `from_pretrained`; of a hybrid that also sees they ask for a classifier on its text model.

    Raises:
        DataError: the configuration cannot be read.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=model_args.trust_remote_code)
    except (OSError, ValueError) as error:
        raise DataError([unreadable(path, "model", error)]) from error
    if not is_seeing_hybrid(config.model_type):
        return {"num_labels": 1}
    text = config.get_text_config()
    text.num_labels = 1
    return {"config": text}


def no_reward_model(path: str, why: str) -> Fault:
    """Return the error for a model that is no reward model."""
    remedy = "give a sequence classifier with one label: what `pipeline: reward_model` exported, or one of the Hub"
    return Fault("model_args.model_name_or_path", f"'{path}' is not a reward model: {why}", remedy)


def whole(parameter: nn.Parameter) -> Tensor:
    """Copy a parameter. Collective if ZeRO-3 sharded it during loading."""
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().clone()
    sharded: Any = parameter
    sharded.all_gather()
    copy = sharded.detach().clone()
    sharded.partition()
    return copy


def load_values(path: str, model_args: ModelConfig, seed: int) -> PackedValues:
    """Load the value model. With `lora_target`, only a new LoRA adapter and the head are trained. Raises as `load_causal_model`."""
    model = load_value_model(path, model_args)
    if not model_args.lora_target:
        return PackedValues(model)
    values = PackedValues(add_lora(model, model_args, seed))
    getattr(values.causal, HEAD).requires_grad_(True)
    return values
