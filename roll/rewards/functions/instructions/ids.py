"""IFEval's 25 instructions by their ids, each with its check and the names of its arguments, as in the data set
google/IFEval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from roll.rewards.functions.instructions import layout, whole, words

ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""The options of `constrained_response`, which no row names."""


class Instruction(NamedTuple):
    """How an instruction is checked."""

    check: Callable[..., bool]
    """Called with the text and the arguments by the names of roll."""
    arguments: Mapping[str, str] = {}
    """Names of the arguments: IFEval's and roll's."""


INSTRUCTIONS: Mapping[str, Instruction] = {
    "keywords:existence": Instruction(words.verify_keywords, {"keywords": "keyword_list"}),
    "keywords:frequency": Instruction(
        words.keyword_frequency, {"keyword": "word", "frequency": "N", "relation": "quantifier"}
    ),
    "keywords:forbidden_words": Instruction(words.validate_forbidden_words, {"forbidden_words": "forbidden_words"}),
    "keywords:letter_frequency": Instruction(
        words.letter_frequency, {"letter": "letter", "let_frequency": "N", "let_relation": "quantifier"}
    ),
    "language:response_language": Instruction(whole.validate_response_language, {"language": "language"}),
    "length_constraints:number_sentences": Instruction(
        words.verify_sentence_constraint, {"num_sentences": "N", "relation": "quantifier"}
    ),
    "length_constraints:number_paragraphs": Instruction(
        partial(layout.verify_paragraph_count, divider=layout.THREE_STARS), {"num_paragraphs": "N"}
    ),
    "length_constraints:number_words": Instruction(
        words.validate_word_constraint, {"num_words": "N", "relation": "quantifier"}
    ),
    "length_constraints:nth_paragraph_first_word": Instruction(
        layout.validate_paragraphs, {"num_paragraphs": "N", "nth_paragraph": "i", "first_word": "first_word"}
    ),
    "detectable_content:number_placeholders": Instruction(layout.validate_placeholders, {"num_placeholders": "N"}),
    "detectable_content:postscript": Instruction(layout.verify_postscript, {"postscript_marker": "postscript_marker"}),
    "detectable_format:number_bullet_lists": Instruction(layout.verify_bullet_points, {"num_bullets": "N"}),
    "detectable_format:constrained_response": Instruction(partial(layout.validate_choice, options=ANSWERS)),
    "detectable_format:number_highlighted_sections": Instruction(
        layout.validate_highlighted_sections, {"num_highlights": "N"}
    ),
    "detectable_format:multiple_sections": Instruction(
        layout.validate_sections, {"section_spliter": "section_splitter", "num_sections": "N"}
    ),
    "detectable_format:json_format": Instruction(whole.validate_json_format),
    "detectable_format:title": Instruction(layout.validate_title),
    "combination:two_responses": Instruction(layout.validate_two_responses),
    "combination:repeat_prompt": Instruction(whole.validate_repeat_prompt, {"prompt_to_repeat": "original_prompt"}),
    "startend:end_checker": Instruction(whole.validate_end, {"end_phrase": "end_phrase"}),
    "startend:quotation": Instruction(whole.validate_quotation),
    "change_case:capital_word_frequency": Instruction(
        words.validate_frequency_capital_words, {"capital_frequency": "N", "capital_relation": "quantifier"}
    ),
    "change_case:english_capital": Instruction(whole.validate_uppercase),
    "change_case:english_lowercase": Instruction(whole.validate_lowercase),
    "punctuation:no_comma": Instruction(words.validate_no_commas),
}
