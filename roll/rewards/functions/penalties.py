"""Penalties for the length of a text and for repetition. Pure functions."""

from __future__ import annotations

MOST = -0.5
"""Default of the largest penalty."""
NGRAM = 3
SHORT, ENOUGH = 100, 400
"""Default lengths in characters; see `shortness`."""


def repetition(text: str, ngram: int = NGRAM, most: float = MOST) -> float:
    """Return `most` times the share of word n-grams that repeat an earlier one, ignoring case; 0 for a text shorter
    than one n-gram.

    Source: Appendix C.2 of arXiv 2502.03373.
    """
    words = text.lower().split()
    total = len(words) - ngram + 1
    if total < 1:
        return 0.0
    return most * (1 - len({tuple(words[start : start + ngram]) for start in range(total)}) / total)


def shortness(length: int, short: int = SHORT, enough: int = ENOUGH, most: float = MOST) -> float:
    """Return `most` for a length below `short`, 0 for `enough` or more, and a linear interpolation between."""
    if length < short:
        return most
    return 0.0 if length >= enough else most * (enough - length) / (enough - short)


def excess(length: int, long: int, too_long: int, most: float = MOST) -> float:
    """Return 0 for a length up to `long`, `most` for `too_long` or more, and a linear interpolation between."""
    if length >= too_long:
        return most
    return 0.0 if length <= long else most * (length - long) / (too_long - long)


def check_penalty(most: float) -> None:
    """Raise ValueError if the penalty is positive."""
    if most > 0:
        raise ValueError(f"most is {most}; a penalty must be at most 0")
