"""Checks of instructions about words and letters. Words in an instruction are matched literally, not as patterns.

Splits a text into sentences by rules. IFEval uses the statistical model `punkt`, which needs additional data files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

END = re.compile(r"[.!?]+[\"'”’)\]*_]*(?=\s|$)")
KNOWN = "mr mrs ms dr prof st sr jr vs etc inc ltd co corp fig gen col sgt capt lt rev hon approx dept est"
MONTHS = "jan feb mar apr jun jul aug sep sept oct nov dec"
ABBREVIATION = re.compile(
    rf"(?:^|[\s(\"'“‘])(?:[A-Za-z]|(?:[A-Za-z]\.)+[A-Za-z]|(?i:{'|'.join([*KNOWN.split(), *MONTHS.split()])}))$"
)
"""Matches text after which a full stop does not end a sentence: an initial, letters with full stops, a known
abbreviation.
"""
NUMBERED = re.compile(r"(?:^|\n)\s*\d{1,3}$")
"""Matches the number of a list item."""


def sentences(text: str) -> list[str]:
    """Return the sentences of a text.

    A sentence ends at a full stop, exclamation mark or question mark (with any closing marks) before white space or the
    end of the text. A full stop does not end a sentence after an abbreviation or a list number, or before a lower-case
    letter.
    """
    found, begin = [], 0
    for end in END.finditer(text):
        before, after = text[begin : end.start()], text[end.end() :].lstrip()
        if end[0].startswith(".") and (
            after[:1].islower() or NUMBERED.search(before) or (after and ABBREVIATION.search(before))
        ):
            continue
        if (sentence := text[begin : end.end()].strip()) != "":
            found.append(sentence)
        begin = end.end()
    return [*found, rest] if (rest := text[begin:].strip()) else found


WORD = re.compile(r"\w+")
TOKEN = re.compile(r"\w(?:[\w'.&/-]*\w)?")
"""A word, including marks that join its parts, so that a hyphenated word counts once."""
TOLERANCE = 10
"""`around` allows a difference of a tenth of the number, or of 1 if that is more. IFEval itself has no such relation,
but data sets that use its checks do.
"""


def holds(count: int, quantifier: str, number: int) -> bool:
    """Return whether a count has the relation `quantifier` to the number.

    Raises:
        ValueError: the quantifier is unknown.
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
    """Return whether every keyword occurs, ignoring case, possibly within another word."""
    return all(_occurrences(keyword, text) for keyword in keyword_list)


def verify_keyword_frequency(text: str, word: str, N: int) -> bool:
    """Return whether the word occurs exactly N times, ignoring case. Occurrences within other words count."""
    return keyword_frequency(text, word, N, "exactly")


def keyword_frequency(text: str, word: str, N: int, quantifier: str) -> bool:
    """Return whether the number of occurrences of the word has the relation `quantifier` to N. See
    `verify_keyword_frequency`.
    """
    return holds(_occurrences(word, text), quantifier, N)


def validate_forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """Return whether no forbidden word occurs as a whole word, ignoring case.

    IFEval's pattern never finds a word that begins or ends with a mark, such as `C++`. Here such a word is found too.
    """
    return not any(
        re.search(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, re.IGNORECASE) for word in forbidden_words
    )


def verify_letter_frequency(text: str, letter: str, N: int) -> bool:
    """Return whether the letter occurs exactly N times, ignoring case."""
    return letter_frequency(text, letter, N, "exactly")


def letter_frequency(text: str, letter: str, N: int, quantifier: str) -> bool:
    """Return whether the number of occurrences of the letter, ignoring case, has the relation `quantifier` to N."""
    return holds(text.lower().count(letter.strip().lower()), quantifier, N)


def validate_word_constraint(text: str, N: int, quantifier: str) -> bool:
    """Return whether the number of words has the relation `quantifier` to N."""
    return holds(len(WORD.findall(text)), quantifier, N)


def verify_sentence_constraint(text: str, N: int, quantifier: str) -> bool:
    """Return whether the number of sentences has the relation `quantifier` to N."""
    return holds(len(sentences(text)), quantifier, N)


def validate_frequency_capital_words(text: str, N: int, quantifier: str) -> bool:
    """Return whether the number of words that are all in capitals has the relation `quantifier` to N."""
    return holds(sum(token.isupper() for token in TOKEN.findall(text)), quantifier, N)


def validate_no_commas(text: str) -> bool:
    """Return whether the text has no comma."""
    return "," not in text
