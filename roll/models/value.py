"""A causal transformer with a head of one number: the values of a critic, the scores of a reward model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from roll.config.schema_model import ModelArgs
from roll.models.load import PackedInputs, PackedModel, add_lora, pretrained

HEAD = "score"
"""Name of the head in transformers' models for sequence classification."""


class ValueHead(nn.Module):
    """A linear map of hidden states to one number, without a bias. Its weight has the model's precision, its arithmetic fp32.

    Being a module, its call triggers ZeRO-3's hooks, so that the sharded weight is whole while it is used.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        """`weight`: [1, H]."""
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        """fp32 [K] of hidden [K, H]."""
        return nn.functional.linear(hidden.float(), self.weight.float())[:, 0]


class PackedValues(PackedModel):
    """A model whose forward pass yields, for chosen tokens, the value of the state before each."""

    def forward(self, inputs: PackedInputs) -> tuple[Tensor]:
        """fp32 [S]: what is expected before the token at each of `inputs.scored`, read from the hidden state of the token before it."""
        return (self.values(inputs, inputs.scored - 1),)

    def values(self, inputs: PackedInputs, positions: Tensor) -> Tensor:
        """fp32 [K]: the head's number for the states that have read the tokens up to each of `positions` [K] of the packed row.

        A reward model reads the last state of each sequence: `inputs.cu_seq_lens[1:] - 1`.
        """
        head = getattr(self.causal, HEAD)
        assert isinstance(head, ValueHead)
        return head(self.hidden(inputs).index_select(0, positions))


def load_value_model(path: str, model_args: ModelArgs) -> PreTrainedModel:
    """The model with a `ValueHead`, as transformers' `...ForSequenceClassification` with one label.

    A folder that has such a head, a reward model's, keeps it. In that of a language model it is missing and starts at 0: every
    value is 0 at first, and the layers below learn from the second update on.

    Raises:
        As `load_causal_model`.
    """
    model, found = pretrained(AutoModelForSequenceClassification, path, model_args, packed=True, num_labels=1, output_loading_info=True)
    weight = getattr(model, HEAD).weight
    if f"{HEAD}.weight" in found["missing_keys"]:
        weight = nn.Parameter(torch.zeros(1, model.config.get_text_config().hidden_size, dtype=weight.dtype))
    setattr(model, HEAD, ValueHead(weight))
    return model


def load_values(path: str, model_args: ModelArgs, seed: int) -> PackedValues:
    """The value model; with `lora_target` behind a new LoRA adapter, beside which the head alone learns. Raises as `load_causal_model`."""
    model = load_value_model(path, model_args)
    if not model_args.lora_target:
        return PackedValues(model)
    values = PackedValues(add_lora(model, model_args, seed))
    getattr(values.causal, HEAD).requires_grad_(True)
    return values
