"""Sampling parameters of a role."""

from __future__ import annotations

from roll.config.schema.model import GeneratingConfig
from roll.data.ends import NO_END, EndOfTurn
from roll.types import Sampling


def sampling_of(
    generating: GeneratingConfig, longest: int, samples: int, log_probs: bool, end: EndOfTurn = NO_END
) -> Sampling:
    """Return the sampling parameters of a role.

    Args:
        longest: largest number of new tokens, if `generating` does not set it.
        samples: number of responses, if `generating` does not set it.
        log_probs: whether to return log-probs.
        end: what ends a turn in the template of the prompts. With `ignore_eos` nothing does.
    """
    end = NO_END if generating.ignore_eos else end
    return Sampling(
        max_new_tokens=generating.max_new_tokens or longest,
        samples=generating.num_return_sequences or samples,
        temperature=generating.temperature,
        top_p=generating.top_p,
        top_k=generating.top_k if generating.top_k > 0 else -1,
        repetition_penalty=generating.repetition_penalty,
        stop=generating.stop_strings,
        end_texts=end.texts,
        stop_token_ids=end.token_ids,
        ignore_eos=generating.ignore_eos,
        log_probs=log_probs,
    )
