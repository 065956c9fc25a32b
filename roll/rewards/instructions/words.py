"""Instructions about words and letters. Texts that an instruction names are taken literally."""

from __future__ import annotations

import re
from collections.abc import Sequence

from roll.rewards.instructions.sentences import sentences

WORD = re.compile(r"\w+")
TOKEN = re.compile(r"\w(?:[\w'.&/-]*\w)?")
"""A word with the marks that join its parts: a hyphenated one counts once."""
TOLERANCE = 10
"""`around` is within a tenth of the number, and at least 1. IFEval has no such relation; the data sets that use its checks do."""


def holds(count: int, quantifier: str, number: int) -> bool:
    """Whether a count has this relation to the number.

    Raises:
        ValueError: the relation is unknown.
    """
    match quantifier.strip().lower():
        case "at least":
            return count >= number
        case "at most":
            return count <= number
        case "less than":
            return count < number
        case "more than":
            return count > number
        case "around":
            return abs(count - number) <= max(round(number / TOLERANCE), 1)
        case "exactly":
            return count == number
    raise ValueError(f"the quantifier {quantifier!r} is unknown")


def _occurrences(word: str, text: str) -> int:
    return len(re.findall(re.escape(word.strip()), text, re.IGNORECASE))


def verify_keywords(text: str, keyword_list: Sequence[str]) -> bool:
    """Each occurs, in any case, also as a part of a word."""
    return all(_occurrences(keyword, text) for keyword in keyword_list)


def verify_keyword_frequency(text: str, word: str, N: int) -> bool:
    """It occurs N times, in any case, also as a part of a word."""
    return _occurrences(word, text) == N


def validate_forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """None occurs as a word, in any case."""
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def verify_letter_frequency(text: str, letter: str, N: int) -> bool:
    """The letter occurs N times, in any case."""
    return text.lower().count(letter.strip().lower()) == N


def validate_word_constraint(text: str, N: int, quantifier: str) -> bool:
    """The number of words."""
    return holds(len(WORD.findall(text)), quantifier, N)


def verify_sentence_constraint(text: str, N: int, quantifier: str) -> bool:
    """The number of sentences."""
    return holds(len(sentences(text)), quantifier, N)


def validate_frequency_capital_words(text: str, N: int, quantifier: str) -> bool:
    """The number of words in capital letters only."""
    return holds(sum(token.isupper() for token in TOKEN.findall(text)), quantifier, N)


def validate_no_commas(text: str) -> bool:
    """There is no comma."""
    return "," not in text
