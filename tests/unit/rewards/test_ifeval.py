"""IFEval instructions on texts judged by hand. benchmarks/ifeval.py compares them with another implementation."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from benchmarks.ifeval import generated
from roll.rewards.ifeval import CHECKS, ifeval
from roll.rewards.instructions.sentences import sentences
from roll.types import Prompt

PROMPT = Prompt(0, np.zeros(1, dtype=np.int32), "", "ifeval", {})
ENGLISH = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep"
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("verify_keywords", {"keyword_list": ["fox", "DOG"]}, "a Fox and dogs", "a fox alone"),
    ("verify_keyword_frequency", {"word": "ant", "N": 2}, "Ant, ant", "ant ant ant"),
    ("validate_forbidden_words", {"forbidden_words": ["ant", "c+"]}, "giant plants", "the ANT"),
    ("verify_letter_frequency", {"letter": "A", "N": 3}, "banana", "bananas are"),
    ("validate_response_language", {"language": "de"}, "Das ist ein deutscher Satz, den man gut erkennen kann.", ENGLISH),
    ("verify_paragraph_count", {"N": 2}, "one\n***\ntwo", "one\n***\n***\ntwo"),
    ("verify_paragraph_count", {"N": 2}, "* * *\none\n* * *\ntwo\n* * *", "one"),
    ("validate_word_constraint", {"N": 4, "quantifier": "at least"}, "one two-three four", "one two three"),
    ("validate_word_constraint", {"N": 3, "quantifier": "at most"}, "one two three", "one two three four"),
    ("validate_word_constraint", {"N": 30, "quantifier": "around"}, "x " * 33, "x " * 34),
    ("verify_sentence_constraint", {"N": 2, "quantifier": "less than"}, "Dr. Smith came at 3.5 p.m. today.", "One. Two."),
    ("validate_paragraphs", {"N": 2, "first_word": "Then", "i": 2}, "One.\n\n'then, two", "One.\n\nNow two"),
    ("verify_postscript", {"postscript_marker": "P.P.S"}, "Text\np. p. s more", "Text\nP.S. more"),
    ("validate_placeholders", {"N": 2}, "[name] [street]", "[name"),
    ("verify_bullet_points", {"N": 2}, "* one\n- two\n**bold**", "* one\n* two\n* three"),
    ("validate_title", {}, "<<a title>>\ntext", "<< >>"),
    ("validate_choice", {"options": ["yes", "no"]}, "My answer is yes.", "My answer is maybe."),
    ("validate_highlighted_sections", {"N": 2}, "*one* and *two*", "*one* and * *"),
    ("validate_sections", {"N": 2, "section_splitter": "Part"}, "Part 1\na\nPart 2\nb", "Part one\nPart 2"),
    ("validate_json_format", {}, '```json\n{"a": 1}\n```', "{'a': 1}"),
    ("validate_repeat_prompt", {"original_prompt": "Say it."}, "say it. Yes", "Yes, say it."),
    ("validate_two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("validate_uppercase", {}, ENGLISH.upper(), ENGLISH),
    ("validate_lowercase", {}, ENGLISH.lower(), ENGLISH),
    ("validate_frequency_capital_words", {"N": 2, "quantifier": "at least"}, "THE WELL-KNOWN one", "WELL-KNOWN one"),
    ("validate_end", {"end_phrase": "The end."}, 'So: "the end."', "The end. Or not"),
    ("validate_quotation", {}, '"all of it"', '"'),
    ("validate_no_commas", {}, "none at all", "one, two"),
]


def reward(text: str, **truth: Any) -> float:
    return ifeval(PROMPT, text, {"ground_truth": json.dumps(truth)}).value


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), CASES)
def test_each_instruction(name: str, arguments: dict[str, Any], right: str, wrong: str) -> None:
    unused = {"forbidden_words": None, "end_phrase": None, "N": None}
    assert reward(f"<think>{wrong}</think>{right}", **{"func_name": name, **unused, **arguments}) == 1.0
    assert reward(wrong, func_name=name, **arguments) == 0.0


def test_every_check_has_a_case() -> None:
    assert {name for name, *_ in CASES} == set(CHECKS) and len(CHECKS) == 25


def test_no_answer_keeps_to_nothing() -> None:
    assert reward("<think>words, words</think> ", func_name="validate_no_commas") == 0.0


@pytest.mark.parametrize(
    ("truth", "fault"),
    [
        ("{", "is not JSON"),
        ("[1]", "is a list"),
        (None, "is a NoneType"),
        ('{"func_name": "validate_commas"}', "names the unknown check 'validate_commas'; known checks: validate_choice,"),
        ('{"func_name": "validate_end", "end_phrase": null}', "has no end_phrase for the check validate_end"),
        ('{"func_name": "verify_bullet_points", "N": "two"}', "the N of 'ground_truth' is 'two'"),
        ('{"func_name": "validate_word_constraint", "N": 2, "quantifier": "nearly"}', "quantifier 'nearly' is unknown"),
    ],
)
def test_instructions_that_cannot_be_read(truth: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        ifeval(PROMPT, "words", {"ground_truth": truth})


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two! Three?", 3),
        ("Mr. Jones and J. R. Smith left. They, e.g. both, went at 3.5 km/h.", 2),
        ("1. First\n2. Second", 1),
        ('He said "no." Then he left...', 2),
        ("No end", 1),
        ("", 0),
    ],
)
def test_sentences(text: str, count: int) -> None:
    assert len(sentences(text)) == count


def test_generated_texts_are_the_same_each_time_and_meet_each_check_both_ways() -> None:
    cases = list(generated(2000, seed=1))
    assert cases == list(generated(2000, seed=1))
    verdicts = {(name, CHECKS[name](text, **arguments)) for name, text, arguments in cases if text.strip()}
    assert verdicts == {(name, verdict) for name in CHECKS for verdict in (True, False)}


@pytest.mark.parametrize("text", ["MACHINE LEARNING MODELS LEARN PATTERNS FROM DATA. NEURAL NETWORKS ARE ONE KIND OF MODEL.", "A1!", "ÉTÉ"])
def test_case_is_checked_whatever_the_language(text: str) -> None:
    assert CHECKS["validate_uppercase"](text) and not CHECKS["validate_uppercase"](text + " a")
    assert CHECKS["validate_lowercase"](text.lower()) and not CHECKS["validate_lowercase"](text)


@pytest.mark.parametrize(
    ("word", "text", "is_free"),
    [("C++", "I like C++ best", False), ("A.I.", "the A.I. age", False), (".NET", "on .NET", False), ("C++", "I like C", True)],
)
def test_forbidden_words_with_marks_are_found(word: str, text: str, is_free: bool) -> None:
    assert CHECKS["validate_forbidden_words"](text, forbidden_words=[word]) is is_free
