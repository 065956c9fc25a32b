"""The checks of IFEval (arXiv 2311.07911), strict variant: each checks whether a text follows a verifiable
instruction. `INSTRUCTIONS` has them by the ids of the data set google/IFEval.

Words in an instruction are matched literally, not as patterns. A text is split into sentences by rules; IFEval uses the
statistical model `punkt`, which needs additional data files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from langdetect import DetectorFactory, LangDetectException, detect

END = re.compile(r"[.!?]+[\"'”’)\]*_]*(?=\s|$)")
KNOWN = "mr mrs ms dr prof st sr jr vs etc inc ltd co corp fig gen col sgt capt lt rev hon approx dept est"
MONTHS = "jan feb mar apr jun jul aug sep sept oct nov dec"
ABBREVIATION = re.compile(
    rf"(?:^|[\s(\"'“‘])(?:[A-Za-z]|(?:[A-Za-z]\.)+[A-Za-z]|(?i:{'|'.join([*KNOWN.split(), *MONTHS.split()])}))$"
)
"""Matches text after which a full stop ends no sentence: an initial, letters with stops, an abbreviation."""
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
    """Return whether a count has the relation `quantifier` to the number. Raises ValueError for an unknown one."""
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
    """Return whether the number of the word's occurrences has the relation `quantifier` to N."""
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


DIVIDER = re.compile(r"\s?(?:\*\*\*|\* \* \*)\s?")
"""Divider between paragraphs: `***` in IFEval, `* * *` in the RLVR-IFeval data set."""
THREE_STARS = re.compile(r"\s?\*\*\*\s?")
PLACEHOLDER = re.compile(r"\[.*?\]")
STARRED, DASHED = re.compile(r"^\s*\*[^\*].*$", re.MULTILINE), re.compile(r"^\s*-.*$", re.MULTILINE)
TITLE = re.compile(r"<<[^\n]+>>")
HIGHLIGHT, DOUBLE = re.compile(r"\*[^\n\*]*\*"), re.compile(r"\*\*[^\n\*]*\*\*")
FIRST_WORD = re.compile(r"""'*"*([^.,?!'"]*)""")
POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
"""Patterns of the usual markers, which may contain spaces."""
SIX_STARS = "******"


def verify_paragraph_count(text: str, N: int, *, divider: re.Pattern[str] = DIVIDER) -> bool:
    """Return whether dividers separate N paragraphs. Text may be empty only before the first and after the last."""
    parts = [part.strip() for part in divider.split(text)]
    if not all(parts[1:-1]):
        return False
    return len(parts) - (not parts[0]) - (len(parts) > 1 and not parts[-1]) == N


def validate_paragraphs(text: str, N: int, first_word: str, i: int) -> bool:
    """Return whether empty lines separate N paragraphs, and paragraph number i (from 1) begins with `first_word`."""
    paragraphs = text.split("\n\n")
    count = sum(1 for paragraph in paragraphs if paragraph.strip())
    if not 1 <= i <= count or not (paragraph := paragraphs[i - 1].strip()):
        return False
    found = FIRST_WORD.match(paragraph.split()[0])
    return count == N and found is not None and found[1].lower() == first_word.strip().lower()


def verify_postscript(text: str, postscript_marker: str) -> bool:
    """Return whether the marker of a postscript occurs, ignoring case."""
    marker = postscript_marker.strip()
    return re.search(POSTSCRIPTS.get(marker, re.escape(marker.lower())), text.lower()) is not None


def validate_placeholders(text: str, N: int) -> bool:
    """Return whether there are at least N placeholders in square brackets."""
    return len(PLACEHOLDER.findall(text)) >= N


def verify_bullet_points(text: str, N: int) -> bool:
    """Return whether exactly N lines begin with `-` or a single `*`."""
    return len(STARRED.findall(text)) + len(DASHED.findall(text)) == N


def validate_title(text: str) -> bool:
    """Return whether there is a non-empty title in double angle brackets."""
    return any(title.lstrip("<").rstrip(">").strip() for title in TITLE.findall(text))


def validate_choice(text: str, options: Sequence[str]) -> bool:
    """Return whether one of the options occurs, not within a word: `no` does not occur in `nothing`."""
    return any(re.search(rf"(?<!\w){re.escape(option)}(?!\w)", text) for option in options if option)


def validate_highlighted_sections(text: str, N: int) -> bool:
    """Return whether there are at least N non-empty parts between single or double asterisks.

    Both kinds are counted separately, as in IFEval, so a part can count twice, such as `a` in `***a***`.
    """
    single = sum(1 for part in HIGHLIGHT.findall(text) if part.strip("*").strip())
    return single + sum(1 for part in DOUBLE.findall(text) if part.removeprefix("**").removesuffix("**").strip()) >= N


def validate_sections(text: str, N: int, section_splitter: str) -> bool:
    """Return whether there are at least N sections that begin with the splitter and a number."""
    return len(re.findall(rf"\s?{re.escape(section_splitter.strip())}\s?\d+\s?", text)) >= N


def validate_two_responses(text: str) -> bool:
    """Return whether there are two different responses, separated by six asterisks."""
    parts = [part.strip() for part in text.split(SIX_STARS)]
    responses = [part for part in parts if part]
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


FENCES = ("```json", "```Json", "```JSON", "```")


def language_of(text: str) -> str | None:
    """Return the language's code (ISO 639-1) that langdetect finds, or None if it finds none. Deterministic."""
    DetectorFactory.seed = 0  # otherwise langdetect is random
    try:
        return detect(text)
    except LangDetectException:
        return None


def validate_response_language(text: str, language: str) -> bool:
    """Return whether the text is in this language. A text whose language cannot be detected passes."""
    return language_of(text) in (language, None)


def validate_uppercase(text: str) -> bool:
    """Return whether there are letters, and all are capitals.

    IFEval also asks langdetect for English, which calls most English text in capitals another language. Only the case
    is checked here.
    """
    return text.isupper()


def validate_lowercase(text: str) -> bool:
    """Return whether there are letters, all lower-case. As in `validate_uppercase`, of any language."""
    return text.islower()


def validate_json_format(text: str) -> bool:
    """Return whether the whole text is JSON, with or without a code fence."""
    body = text.strip()
    for fence in FENCES:
        body = body.removeprefix(fence)
    try:
        json.loads(body.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def validate_repeat_prompt(text: str, original_prompt: str) -> bool:
    """Return whether the text begins with the prompt, ignoring case."""
    return text.strip().lower().startswith(original_prompt.strip().lower())


def validate_end(text: str, end_phrase: str) -> bool:
    """Return whether the text ends with the phrase, ignoring case and quotation marks around the text."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def validate_quotation(text: str) -> bool:
    """Return whether the whole text is in double quotation marks."""
    stripped = text.strip()
    return len(stripped) > 1 and stripped.startswith('"') and stripped.endswith('"')


ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""The options of `constrained_response`, which no row names."""


class Instruction(NamedTuple):
    """How an instruction is checked."""

    check: Callable[..., bool]
    """Called with the text and the arguments by the names of roll."""
    arguments: Mapping[str, str] = {}
    """Names of the arguments: IFEval's and roll's."""


INSTRUCTIONS: Mapping[str, Instruction] = {
    "keywords:existence": Instruction(verify_keywords, {"keywords": "keyword_list"}),
    "keywords:frequency": Instruction(
        keyword_frequency, {"keyword": "word", "frequency": "N", "relation": "quantifier"}
    ),
    "keywords:forbidden_words": Instruction(validate_forbidden_words, {"forbidden_words": "forbidden_words"}),
    "keywords:letter_frequency": Instruction(
        letter_frequency, {"letter": "letter", "let_frequency": "N", "let_relation": "quantifier"}
    ),
    "language:response_language": Instruction(validate_response_language, {"language": "language"}),
    "length_constraints:number_sentences": Instruction(
        verify_sentence_constraint, {"num_sentences": "N", "relation": "quantifier"}
    ),
    "length_constraints:number_paragraphs": Instruction(
        partial(verify_paragraph_count, divider=THREE_STARS), {"num_paragraphs": "N"}
    ),
    "length_constraints:number_words": Instruction(
        validate_word_constraint, {"num_words": "N", "relation": "quantifier"}
    ),
    "length_constraints:nth_paragraph_first_word": Instruction(
        validate_paragraphs, {"num_paragraphs": "N", "nth_paragraph": "i", "first_word": "first_word"}
    ),
    "detectable_content:number_placeholders": Instruction(validate_placeholders, {"num_placeholders": "N"}),
    "detectable_content:postscript": Instruction(verify_postscript, {"postscript_marker": "postscript_marker"}),
    "detectable_format:number_bullet_lists": Instruction(verify_bullet_points, {"num_bullets": "N"}),
    "detectable_format:constrained_response": Instruction(partial(validate_choice, options=ANSWERS)),
    "detectable_format:number_highlighted_sections": Instruction(
        validate_highlighted_sections, {"num_highlights": "N"}
    ),
    "detectable_format:multiple_sections": Instruction(
        validate_sections, {"section_spliter": "section_splitter", "num_sections": "N"}
    ),
    "detectable_format:json_format": Instruction(validate_json_format),
    "detectable_format:title": Instruction(validate_title),
    "combination:two_responses": Instruction(validate_two_responses),
    "combination:repeat_prompt": Instruction(validate_repeat_prompt, {"prompt_to_repeat": "original_prompt"}),
    "startend:end_checker": Instruction(validate_end, {"end_phrase": "end_phrase"}),
    "startend:quotation": Instruction(validate_quotation),
    "change_case:capital_word_frequency": Instruction(
        validate_frequency_capital_words, {"capital_frequency": "N", "capital_relation": "quantifier"}
    ),
    "change_case:english_capital": Instruction(validate_uppercase),
    "change_case:english_lowercase": Instruction(validate_lowercase),
    "punctuation:no_comma": Instruction(validate_no_commas),
}
