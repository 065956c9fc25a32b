"""A reward model: one score per sequence, computed from the state at its last token."""

from __future__ import annotations

import numpy as np
from torch import Tensor
from transformers import AutoConfig

from roll.config.schema.model import ModelConfig
from roll.errors import DataError
from roll.models.load import PackedInputs, load_tokenizer, unreadable
from roll.models.value import PackedValues, load_value_model, load_values, no_reward_model
from roll.types import Bools, Ints


class PackedScores(PackedValues):
    """A model whose forward pass returns the score of each sequence. `inputs.scored` marks the last token of each
    sequence.
    """

    def forward(self, inputs: PackedInputs) -> tuple[Tensor]:
        """Return fp32 [S] scores at `inputs.scored`."""
        return self.values(inputs, back=0)


def load_scores(path: str, model_args: ModelConfig, seed: int) -> PackedScores:
    """Load a reward model for training. The head of a language model is new and starts at 0. See `load_values` for the
    errors.
    """
    scores = PackedScores(load_values(path, model_args, seed).model)
    scores.causal.config.pad_token_id = pad_token(path, model_args)
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
    """Check that a model's configuration is that of a classifier with one label.

    Raises:
        DataError: the configuration cannot be read, or has another number of labels.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=model_args.trust_remote_code)
    except (OSError, ValueError) as error:
        raise DataError([unreadable(path, "model", error)]) from error
    if config.num_labels != 1:
        named = ", ".join(map(str, list((config.id2label or {}).values())[:4]))
        raise DataError([no_reward_model(path, f"its config.json has {config.num_labels} labels ({named})")])


def pad_token(path: str, model_args: ModelConfig) -> int | None:
    """Return the id of the padding token of the model or, if it has none, of its tokenizer."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=model_args.trust_remote_code)
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
