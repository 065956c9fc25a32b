"""Penalties of a text for its length and for repetition. Pure functions."""

from __future__ import annotations

MOST = -0.5
NGRAM = 3
SHORT, ENOUGH = 100, 400
"""Characters."""


def repetition(text: str, ngram: int = NGRAM, most: float = MOST) -> float:
    """Return `most` times the share of repeated n-grams of words, ignoring case; 0 for a text with fewer words than an n-gram.

    Source: Appendix C.2 of arXiv 2502.03373.
    """
    words = text.lower().split()
    total = len(words) - ngram + 1
    if total < 1:
        return 0.0
    return most * (1 - len({tuple(words[start : start + ngram]) for start in range(total)}) / total)


def shortness(length: int, short: int = SHORT, enough: int = ENOUGH, most: float = MOST) -> float:
    """Return `most` below the length `short`, 0 above `enough`, linear in between."""
    if length < short:
        return most
    return 0.0 if length >= enough else most * (enough - length) / (enough - short)


def excess(length: int, long: int, too_long: int, most: float = MOST) -> float:
    """Return 0 up to the length `long`, `most` from `too_long` on, linear in between."""
    if length >= too_long:
        return most
    return 0.0 if length <= long else most * (length - long) / (too_long - long)


def check_penalty(most: float) -> None:
    """Raise ValueError for a positive penalty."""
    if most > 0:
        raise ValueError(f"most is {most}: a penalty is not above 0")
