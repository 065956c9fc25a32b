"""Small imitations of public data sets: the files, columns and types of the Hub, with a few rows of text written for
the tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets

SCORES = ((9.0, 7.5), (8.0, 2.0), (6.5, 6.5), (8.5, 4.0), (7.0, 3.0), (9.5, 1.0))


def gsm8k_row(first: int, second: int) -> dict[str, str]:
    """Return a row like those of https://huggingface.co/datasets/openai/gsm8k, with calculator annotations and
    thousands separators.
    """
    total = first + second
    return {
        "question": f"What is {first} plus {second}?",
        "answer": f"It is {first}+{second} = <<{first}+{second}={total}>>{total:,}.\n#### {total:,}",
    }


def write_gsm8k(folder: Path, train: int = 40, test: int = 8) -> Path:
    """Write the data set's configuration `main` to the folder, and return the folder."""
    rows = [gsm8k_row(number * 37 % 101 + number // 101, 950 + number) for number in range(train + test)]
    return _write(folder, {"train-00000-of-00001": rows[:train], "test-00000-of-00001": rows[train:]})


def pair_row(number: int) -> dict[str, Any]:
    """Return a row of https://huggingface.co/datasets/HuggingFaceH4/ultrafeedback_binarized. Every sixth pair has equal
    scores.
    """
    question, good, bad = f"Name {number} colours.", f"Red, and {number - 1} others.", "No."
    chosen, rejected = (
        [{"content": question, "role": "user"}, {"content": text, "role": "assistant"}] for text in (good, bad)
    )
    better, worse = SCORES[number % len(SCORES)]
    return {
        "prompt": question,
        "prompt_id": f"{number:064x}",
        "chosen": chosen,
        "rejected": rejected,
        "messages": chosen,
        "score_chosen": better,
        "score_rejected": worse,
    }


def write_ultrafeedback(folder: Path, train: int = 24, test: int = 6) -> Path:
    """Write four of the data set's six splits to the folder, and return the folder."""
    rows = [pair_row(number) for number in range(train + test)]
    splits = {"train": rows[:train], "test": rows[train:]}
    files = {f"data/{split}_{kind}-00000-of-00001": part for kind in ("prefs", "sft") for split, part in splits.items()}
    return _write(folder, files)


def write_capybara(folder: Path, train: int = 12, test: int = 3) -> Path:
    """Write conversations of two turns with the columns of https://huggingface.co/datasets/trl-lib/Capybara, and return
    the folder.
    """
    texts = ("user", "Hello {}."), ("assistant", "Good day."), ("user", "And {}?"), ("assistant", "Fine.")
    rows = [
        {
            "source": "Made",
            "messages": [{"content": text.format(number), "role": role} for role, text in texts],
            "num_turns": 2,
        }
        for number in range(train + test)
    ]
    return _write(folder, {"data/train-00000-of-00001": rows[:train], "data/test-00000-of-00001": rows[train:]})


def deepmath_row(number: int) -> dict[str, Any]:
    """Return a row of https://huggingface.co/datasets/zwhe99/DeepMath-103K."""
    return {
        "question": f"Compute ${number}+1$.",
        "final_answer": str(number + 1),
        "difficulty": 4.5,
        "topic": "Mathematics -> Algebra",
        **{f"r1_solution_{index}": "One more." for index in (1, 2, 3)},
    }


def math500_row(number: int) -> dict[str, Any]:
    """Return a row of https://huggingface.co/datasets/HuggingFaceH4/MATH-500."""
    answer = f"\\frac{{{number}}}{{7}}"
    return {
        "problem": f"What is ${number}/7$?",
        "solution": f"It is ${answer}$.",
        "answer": answer,
        "subject": "Algebra",
        "level": 2,
        "unique_id": f"test/algebra/{number}.json",
    }


def kodcode_row(number: int) -> dict[str, Any]:
    """Return a row of https://huggingface.co/datasets/KodCode/KodCode-Light-RL-10K, without the columns on the trials
    of other models.
    """
    name = f"add_{number}"
    test = f"from solution import {name}\n\ndef test_zero():\n    assert {name}(0) == {number}\n"
    return {
        "version": "v1.0",
        "style": "instruct",
        "subset": "Prefill",
        "question_id": f"Prefill_{number}_I",
        "question": f"Write a function that adds {number} to a number.",
        "solution": f"def {name}(value):\n    return value + {number}",
        "test": f"{test}\ndef test_five():\n    assert {name}(5) == {number + 5}",
        "test_info": [
            {
                "docstring": "Adds.",
                "function_declaration": f"def {name}(value):",
                "function_name": name,
                "parameter_list": "(value)",
            }
        ],
        "gpt_difficulty": "easy",
    }


def subjects_row(number: int) -> dict[str, Any]:
    """Return a row of https://huggingface.co/datasets/virtuoussy/Multi-subject-RLVR."""
    query = [
        {"role": "system", "content": "Solve the problem."},
        {"role": "user", "content": f"Who was number {number}?"},
    ]
    return {"query": query, "label": f"Number {number}", "subject": None, "subset": None}


def crossthink_row(number: int) -> dict[str, Any]:
    """Return a row of https://huggingface.co/datasets/nvidia/Nemotron-CrossThink, split `train_qa`."""
    question = f"Which is {number}?\nA. {number}\nB. 0"
    return {
        "prompt": [{"role": "user", "content": f"Answer in a box. {question}"}],
        "reward_model": {"ground_truth": "A", "style": "rule"},
        "meta_data": {"index": number, "question": question},
    }


def ifeval_row(number: int) -> dict[str, Any]:
    """Return a row of https://huggingface.co/datasets/allenai/RLVR-IFeval."""
    check = {"func_name": "verify_paragraph_count", "N": number + 1, "keyword_list": None, "quantifier": None}
    asked = f"Write a letter of {number + 1} paragraphs, separated by ***."
    return {
        "messages": [{"content": asked, "role": "user"}],
        "ground_truth": json.dumps(check),
        "dataset": "ifeval",
        "constraint_type": "Number Paragraphs",
        "constraint": "There should be {N} paragraphs.",
    }


def write_roll_copies(folder: Path, rows: int = 6) -> Path:
    """Write copies of the sets of ROLL's files, with the paths that they have on the Hub, and return the folder."""
    parquet = {
        "DeepMath-103K/data/train-00000-of-00001": deepmath_row,
        "KodCode-Light-RL-10K/data/train-00000-of-00001": kodcode_row,
        "Multi-subject-RLVR/data/train-00000-of-00001": subjects_row,
        "Multi-subject-RLVR/data/test-00000-of-00001": lambda number: subjects_row(number + 100),
        "RLVR-IFeval/data/train-00000-of-00001": ifeval_row,
    }
    _write(folder, {name: [make(number) for number in range(rows)] for name, make in parquet.items()})
    lines: dict[str, Callable[[int], dict[str, Any]]] = {
        "MATH-500/test.jsonl": math500_row,
        "Nemotron-CrossThink/Data/Nemotron-CrossThink-QA.jsonl": crossthink_row,
        "Nemotron-CrossThink/Data/Nemotron-CrossThink-Math.jsonl": crossthink_row,
    }
    for name, make in lines.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(make(number)) + "\n" for number in range(rows)))
    return folder


def _write(folder: Path, files: Mapping[str, Sequence[Mapping[str, Any]]]) -> Path:
    for name, rows in files.items():
        file = folder / f"{name}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list([dict(row) for row in rows]).to_parquet(file)
    return folder
