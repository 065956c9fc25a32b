"""Writes tasks whose instructions a program checks, such as "Write a note about the moon. Do not use commas."

    python examples/recipes/make_instructions.py FOLDER [--seed 0]

FOLDER/train.jsonl and validation.jsonl have the columns of IFEval (arXiv 2311.07911) that the reward `ifeval` reads:
`prompt`, `instruction_id_list` and `kwargs`. A row has one or two instructions. No prompt is in both files.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FORMS = ("a note", "a letter", "an advertisement", "a report", "a story", "a description", "an answer to a child")
SUBJECTS = (
    "a lost key", "the first snow", "a broken bicycle", "a garden in spring", "the sea at night", "an old clock",
    "a train that is late", "a cup of tea", "the moon", "a new school", "a market in the rain", "a lighthouse",
    "bread from yesterday", "a dog that waits", "a bridge over a river", "an empty house", "a power cut",
    "a long walk", "a village fair", "a library", "a red coat", "the smell of coffee", "an unread book",
    "a mountain hut", "a quiet street", "a chess game", "a violin", "the last bus", "a painted wall", "a small boat",
)  # fmt: skip
WORDS = ("window", "morning", "friend", "water", "music", "winter", "letter", "garden", "silver", "market")
ENDS = ("That is all.", "Thank you for reading.", "Let me know what you think.", "The end.")
TASKS, HELD_OUT = 4000, 256

Instruction = tuple[str, str, Mapping[str, Any]]
"""An instruction's id, its sentence in the prompt, and its arguments."""


def _words(draw: random.Random) -> Instruction:
    relation, number = draw.choice(
        (("at least", draw.randrange(40, 121, 10)), ("less than", draw.randrange(20, 61, 10)))
    )
    return (
        "length_constraints:number_words",
        f"Use {relation} {number} words.",
        {"relation": relation, "num_words": number},
    )


def _sentences(draw: random.Random) -> Instruction:
    relation, number = draw.choice((("at least", draw.randint(3, 6)), ("less than", draw.randint(3, 5))))
    said = f"Use {relation} {number} sentences."
    return "length_constraints:number_sentences", said, {"relation": relation, "num_sentences": number}


def _bullets(draw: random.Random) -> Instruction:
    number = draw.randint(2, 5)
    said = f'Write exactly {number} bullet points, each on a line that begins with "* ".'
    return "detectable_format:number_bullet_lists", said, {"num_bullets": number}


def _keywords(draw: random.Random) -> Instruction:
    words = draw.sample(WORDS, 2)
    return "keywords:existence", f'Use the words "{words[0]}" and "{words[1]}".', {"keywords": words}


def _forbidden(draw: random.Random) -> Instruction:
    words = draw.sample(("the", "and", "is", "was", "very", "with"), 2)
    said = f'Do not use the words "{words[0]}" and "{words[1]}".'
    return "keywords:forbidden_words", said, {"forbidden_words": words}


def _end(draw: random.Random) -> Instruction:
    phrase = draw.choice(ENDS)
    return "startend:end_checker", f'End with exactly this sentence: "{phrase}"', {"end_phrase": phrase}


def _fixed(name: str, said: str) -> Callable[[random.Random], Instruction]:
    return lambda draw: (name, said, {})


KINDS: tuple[Callable[[random.Random], Instruction], ...] = (
    _words,
    _sentences,
    _bullets,
    _keywords,
    _forbidden,
    _end,
    _fixed("punctuation:no_comma", "Do not use commas."),
    _fixed("change_case:english_lowercase", "Use only small letters, no capital letters."),
    _fixed("change_case:english_capital", "Use only capital letters."),
    _fixed("detectable_format:title", "Give it a title in double angular brackets, such as <<title>>."),
    _fixed("startend:quotation", "Put the whole answer in double quotation marks."),
)
APART = (
    {"change_case:english_lowercase", "change_case:english_capital", "startend:end_checker"},
    {"startend:quotation", "startend:end_checker"},
    {"length_constraints:number_words", "length_constraints:number_sentences"},
    {"detectable_format:number_bullet_lists", "length_constraints:number_sentences"},
    {"keywords:existence", "change_case:english_capital"},
    {"keywords:forbidden_words", "startend:end_checker"},
)
"""Sets of instructions of which a row has at most one: no text, or hardly any, follows two of them."""


def task(draw: random.Random) -> dict[str, Any]:
    """Return a row with one or two instructions that do not contradict each other."""
    while True:
        asked = [kind(draw) for kind in draw.sample(KINDS, draw.choice((1, 2)))]
        names = [name for name, _, _ in asked]
        if all(len(group.intersection(names)) < 2 for group in APART):
            break
    said = " ".join(sentence for _, sentence, _ in asked)
    prompt = f"Write {draw.choice(FORMS)} about {draw.choice(SUBJECTS)}. {said}"
    arguments = [dict(given) for _, _, given in asked]
    return {"prompt": prompt, "instruction_id_list": names, "kwargs": json.dumps(arguments), "tag": "ifeval"}


def write_tasks(folder: Path, seed: int) -> None:
    """Write both files into a new folder, which replaces `folder` once it is complete."""
    draw = random.Random(seed)
    found = dict[str, dict[str, Any]]()
    while len(found) < TASKS + HELD_OUT:
        row = task(draw)
        found[row["prompt"]] = row
    rows = list(found.values())
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, part in (("train", rows[:TASKS]), ("validation", rows[TASKS:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (partial / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(partial, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_tasks(given.folder, given.seed)
