"""Checks that two models have the same vocabulary."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from roll.errors import DataError, Fault


def check_same_vocabulary(ours: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, place: str) -> None:
    """Check that both models map the same tokens to the same ids, because distributions cannot be compared otherwise.

    Args:
        place: Key of the other model, for the error message.

    Raises:
        DataError: the vocabularies differ.
    """
    learner, compared = ours.get_vocab(), other.get_vocab()
    if learner == compared:
        return
    different = sum(compared.get(token) != number for token, number in learner.items()) + len(
        compared.keys() - learner.keys()
    )
    problem = (
        f"its vocabulary ({len(compared)} tokens) differs in {different} tokens from that of the trained model "
        f"({len(learner)})"
    )
    raise DataError([Fault(place, problem, "use a model of the same family, with the same tokenizer")])
