"""IFEval instructions on texts judged by hand. benchmarks/ifeval.py compares them with another implementation."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from benchmarks.ifeval import generated
from roll.rewards.functions.ifeval import CHECKS, ifeval
from roll.rewards.functions.instructions import INSTRUCTIONS, sentences
from roll.types import Prompt

PROMPT = Prompt(0, np.zeros(1, dtype=np.int32), "", "ifeval", {})
ENGLISH = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep"
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("verify_keywords", {"keyword_list": ["fox", "DOG"]}, "a Fox and dogs", "a fox alone"),
    ("verify_keyword_frequency", {"word": "ant", "N": 2}, "Ant, ant", "ant ant ant"),
    ("validate_forbidden_words", {"forbidden_words": ["ant", "c+"]}, "giant plants", "the ANT"),
    ("verify_letter_frequency", {"letter": "A", "N": 3}, "banana", "bananas are"),
    (
        "validate_response_language",
        {"language": "de"},
        "Das ist ein deutscher Satz, den man gut erkennen kann.",
        ENGLISH,
    ),
    ("verify_paragraph_count", {"N": 2}, "one\n***\ntwo", "one\n***\n***\ntwo"),
    ("verify_paragraph_count", {"N": 2}, "* * *\none\n* * *\ntwo\n* * *", "one"),
    ("validate_word_constraint", {"N": 4, "quantifier": "at least"}, "one two-three four", "one two three"),
    ("validate_word_constraint", {"N": 3, "quantifier": "at most"}, "one two three", "one two three four"),
    ("validate_word_constraint", {"N": 30, "quantifier": "around"}, "x " * 33, "x " * 34),
    (
        "verify_sentence_constraint",
        {"N": 2, "quantifier": "less than"},
        "Dr. Smith came at 3.5 p.m. today.",
        "One. Two.",
    ),
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
        (
            '{"func_name": "validate_commas"}',
            "names the unknown check 'validate_commas'; known checks: validate_choice,",
        ),
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


def test_generated_texts_are_deterministic_and_cover_both_verdicts() -> None:
    cases = list(generated(2000, seed=1))
    assert cases == list(generated(2000, seed=1))
    verdicts = {(name, CHECKS[name](text, **arguments)) for name, text, arguments in cases if text.strip()}
    assert verdicts == {(name, verdict) for name in CHECKS for verdict in (True, False)}


@pytest.mark.parametrize(
    "text", ["MACHINE LEARNING MODELS LEARN PATTERNS FROM DATA. NEURAL NETWORKS ARE ONE KIND OF MODEL.", "A1!", "ÉTÉ"]
)
def test_case_is_checked_whatever_the_language(text: str) -> None:
    assert CHECKS["validate_uppercase"](text) and not CHECKS["validate_uppercase"](text + " a")
    assert CHECKS["validate_lowercase"](text.lower()) and not CHECKS["validate_lowercase"](text)


@pytest.mark.parametrize(
    ("word", "text", "is_free"),
    [
        ("C++", "I like C++ best", False),
        ("A.I.", "the A.I. age", False),
        (".NET", "on .NET", False),
        ("C++", "I like C", True),
    ],
)
def test_forbidden_words_with_marks_are_found(word: str, text: str, is_free: bool) -> None:
    assert CHECKS["validate_forbidden_words"](text, forbidden_words=[word]) is is_free


BY_ID: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["fox", "dog"]}, "a Fox and dogs", "a fox alone"),
    ("keywords:frequency", {"keyword": "ant", "frequency": 2, "relation": "at least"}, "ant ant ant", "an ant"),
    ("keywords:frequency", {"keyword": "ant", "frequency": 2, "relation": "less than"}, "an ant", "ant, ant"),
    ("keywords:forbidden_words", {"forbidden_words": ["ant", "C++"]}, "giant C", "C++ is it"),
    (
        "keywords:letter_frequency",
        {"letter": "a", "let_frequency": 3, "let_relation": "at least"},
        "Ananas are",
        "an ant",
    ),
    (
        "language:response_language",
        {"language": "de"},
        "Das ist ein deutscher Satz, den man gut erkennen kann.",
        ENGLISH,
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, "Just one.", "One. Two."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n* * *\ntwo"),
    (
        "length_constraints:number_words",
        {"num_words": 4.0, "relation": "at least"},
        "one two-three four",
        "one two three",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "One.\n\nThen two",
        "One.\n\nNow two",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] [street]", "[name"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Text\nP. S. more", "Text"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two", "* one"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "My answer is perhaps."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and *two*", "*one* and * *"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Part", "num_sections": 2},
        "Part 1\na\nPart 2\nb",
        "Part 2",
    ),
    ("detectable_format:json_format", {}, '{"a": 1}', "{'a': 1}"),
    ("detectable_format:title", {}, "<<a title>>\ntext", "<< >>"),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. Yes", "Yes, say it."),
    ("startend:end_checker", {"end_phrase": "The end."}, 'So: "the end."', "The end. Or not"),
    ("startend:quotation", {}, '"all of it"', '"'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "THE WELL one",
        "THE one",
    ),
    ("change_case:english_capital", {}, ENGLISH.upper(), ENGLISH),
    ("change_case:english_lowercase", {}, ENGLISH.lower(), ENGLISH),
    ("punctuation:no_comma", {}, "none at all", "one, two"),
]
NULLS = {"keywords": None, "num_words": None, "prompt_to_repeat": None, "relation": None}


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), BY_ID)
def test_each_instruction_by_its_id(name: str, arguments: dict[str, Any], right: str, wrong: str) -> None:
    row = {"key": 1000, "instruction_id_list": [name], "kwargs": [NULLS | arguments]}
    assert ifeval(PROMPT, f"<think>{wrong}</think>{right}", row).value == 1.0
    assert ifeval(PROMPT, wrong, row).value == 0.0


def test_every_id_has_a_case() -> None:
    assert {name for name, *_ in BY_ID} == set(INSTRUCTIONS) and len(INSTRUCTIONS) == 25


IDS, KWARGS = ["punctuation:no_comma", "keywords:existence"], [{}, {"keywords": ["fox"]}]


@pytest.mark.parametrize(
    "row",
    [
        {"instruction_id_list": IDS, "kwargs": KWARGS},
        {"instruction_id_list": IDS, "kwargs": [None, json.dumps(KWARGS[1])]},
        {"instruction_id_list": IDS, "kwargs": json.dumps(KWARGS), "ground_truth": None},
        {"instruction_id_list": IDS, "kwargs": KWARGS, "ground_truth": ""},
        {"ground_truth": {"instruction_id_list": IDS, "kwargs": KWARGS}},
        {"ground_truth": json.dumps({"instruction_id_list": IDS, "kwargs": KWARGS})},
        {"ground_truth": json.dumps([{"instruction_id": IDS, "kwargs": KWARGS}])},
        {"ground_truth": repr([{"instruction_id": IDS, "kwargs": [None, KWARGS[1]]}])},
        {"ground_truth": [{"func_name": "validate_no_commas"}, {"instruction_id": IDS[1], "kwargs": KWARGS[1]}]},
    ],
)
def test_rows_with_several_instructions_ask_for_all(row: dict[str, Any]) -> None:
    values = [ifeval(PROMPT, text, row).value for text in ("a fox", "a fox, red", "a dog", "dog, cat", "")]
    shares = [ifeval(PROMPT, text, row, pays="share") for text in ("a fox", "a fox, red", "a dog", "dog, cat", "")]
    assert values == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [(one.value, one.parts["followed"]) for one in shares] == [
        (1.0, 1.0),
        (0.5, 0.5),
        (0.5, 0.5),
        (0.0, 0.0),
        (0.0, 0.0),
    ]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (
            {"instruction_id_list": ["count:words"], "kwargs": [{}]},
            "unknown instruction 'count:words'; known instructions: change_case",
        ),
        ({"instruction_id_list": IDS, "kwargs": [{}]}, "arguments for each of the 2 instructions"),
        ({"instruction_id_list": [], "kwargs": []}, "not a list of instructions"),
        ({"instruction_id_list": IDS}, "the kwargs of keywords:existence have no keywords"),
        (
            {"instruction_id_list": [IDS[1]], "kwargs": [{"keywords": None}]},
            "the kwargs of keywords:existence have no keywords",
        ),
        (
            {"instruction_id_list": [IDS[1]], "kwargs": [{"keywords": [1]}]},
            r"the keywords of the kwargs of keywords:existence is \[1\]",
        ),
        ({"instruction_id_list": [IDS[0]], "kwargs": [{"N": 1}]}, "have N, which it does not take"),
        ({"instruction_id_list": [IDS[0]], "kwargs": ["x"]}, "the kwargs of punctuation:no_comma is not JSON"),
        ({"instruction_id_list": [IDS[0]], "kwargs": [[]]}, "not an object"),
        ({"instruction_id_list": [IDS[0]], "ground_truth": "{}"}, "both 'instruction_id_list' and 'ground_truth'"),
        ({"ground_truth": {"instruction_id_list": ["x:y"]}}, "'ground_truth' names the unknown instruction 'x:y'"),
        (
            {"ground_truth": json.dumps({"func_name": "verify_bullet_points", "N": float("inf")})},
            "the N of 'ground_truth' is inf",
        ),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 3, "relation": "nearly"}],
            },
            "quantifier 'nearly' is unknown",
        ),
    ],
)
def test_rows_by_ids_that_cannot_be_read(row: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        ifeval(PROMPT, "words", row)


def test_what_an_instruction_pays_is_all_or_share() -> None:
    with pytest.raises(ValueError, match="pays is 'half'"):
        ifeval(PROMPT, "words", {"instruction_id_list": [IDS[0]]}, pays="half")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "is_chosen"),
    [
        ("My answer is no.", True),
        ("I know nothing", False),
        ("No", False),
        ("yes/no", True),
        ("Eyes", False),
        ("(yes)", True),
        ("", False),
        ("**no**", True),
    ],
)
def test_an_option_is_chosen_as_a_whole_word(text: str, is_chosen: bool) -> None:
    assert CHECKS["validate_choice"](text, options=["yes", "no"]) is is_chosen
