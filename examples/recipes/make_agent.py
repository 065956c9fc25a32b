"""Writes what the recipe `smollm2_agent` starts from: a model whose chat template has tools, tasks in words, and
conversations that call a calculator in some cases.

    python examples/recipes/make_agent.py MODEL FOLDER [--seed 0]

FOLDER/model is MODEL, a Hugging Face folder with the marks of ChatML, with a chat template that writes tools.
FOLDER/train.jsonl and validation.jsonl hold tasks such as "A mill packs 347 boxes of 582 screws each. How many screws
are that?" with their answers. FOLDER/conversations.jsonl holds further tasks with an answer: in some the assistant
calls the tool and repeats its result, in the others it answers at once, and wrongly. A model trained on them calls the
tool about as often, and reinforcement learning teaches it that the calls pay off.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from roll.agents.environments.calculator import Calculator, calc
from roll.data.renderers.templates import OWN

THEMES = (
    ("A mill packs {a} boxes of {b} screws each. How many screws are that?", "{a}*{b}"),
    ("One ticket costs {a} crowns. What do {b} tickets cost, in crowns?", "{a}*{b}"),
    ("A printer prints {a} pages an hour. How many pages does it print in {b} hours?", "{a}*{b}"),
    ("A field has {a} rows of {b} plants. {c} more stand at the edge. How many plants are there?", "{a}*{b}+{c}"),
    (
        "A pump adds {a} litres a minute to a tank of {c} litres. How many are in it after {b} minutes?",
        "{a}*{b}+{c}",
    ),
    ("A clerk sorts {a} letters a day for {b} days. {c} are lost. How many are left?", "{a}*{b}-{c}"),
    ("A shop buys {a} crates of {b} eggs. {c} eggs break. How many are whole?", "{a}*{b}-{c}"),
    ("A stack of {c} bricks lies beside {b} pallets of {a} bricks each. How many bricks are there?", "{c}+{b}*{a}"),
)
"""Tasks in words, and the sum that solves each. `a` and `b` have three digits, and `c` four."""
TASKS, HELD_OUT, CONVERSATIONS = 4000, 256, 4000
WITH_TOOL = 0.4
"""Share of the conversations in which the tool is called."""


def task(draw: random.Random) -> tuple[str, str]:
    """Return a question and the sum that solves it."""
    question, solution = draw.choice(THEMES)
    numbers = {"a": draw.randint(100, 999), "b": draw.randint(100, 999), "c": draw.randint(1000, 9999)}
    return question.format(**numbers), solution.format(**numbers)


def tasks(count: int, draw: random.Random) -> dict[str, str]:
    """Return `count` different questions, each with its sum."""
    found: dict[str, str] = {}
    while len(found) < count:
        found |= dict([task(draw)])
    return found


def conversation(question: str, solution: str, draw: random.Random) -> dict[str, Any]:
    """Return a row with `messages` and `tools`: an episode with the tool, or an answer that was only guessed."""
    said: list[dict[str, Any]] = [{"role": "user", "content": question}]
    result = calc(solution)
    if draw.random() < WITH_TOOL:
        call = {"id": "0", "type": "function", "function": {"name": "calc", "arguments": json.dumps({"x": solution})}}
        said.append({"role": "assistant", "content": "", "tool_calls": [call]})
        said.append({"role": "tool", "content": result, "tool_call_id": "0"})
        answer = result
    else:
        answer = wrong_answer(result, draw)
    said.append({"role": "assistant", "content": f"The answer is {answer}."})
    return {"messages": said, "tools": list(Calculator().reset({}, 0).tools)}


def wrong_answer(result: str, draw: random.Random) -> str:
    """Return another number with as many digits."""
    first, end = 10 ** (len(result) - 1), 10 ** len(result)
    return str(draw.choice([draw.randrange(first, int(result)), draw.randrange(int(result) + 1, end)]))


def give_tools(model: Path, folder: Path) -> None:
    """Copy a model folder, with a chat template that writes tools. Raises ValueError if its tokenizer lacks a mark."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
    for mark in ("<|im_start|>", "<|im_end|>"):
        if len(tokenizer.encode(mark, add_special_tokens=False)) != 1:
            raise ValueError(f"{mark} is not a token of the tokenizer in '{model}'; give a model that uses ChatML")
    shutil.copytree(model, folder)
    tokenizer.chat_template = OWN["chatml"]
    tokenizer.save_pretrained(folder)


def write_agent(model: Path, folder: Path, seed: int) -> None:
    """Write all files into a new folder, which replaces `folder` once it is complete. Raises ValueError as
    `give_tools`.
    """
    draw = random.Random(seed)
    found = list(tasks(TASKS + HELD_OUT + CONVERSATIONS, draw).items())
    rows = [{"question": question, "answer": calc(solution)} for question, solution in found]
    told = [conversation(question, solution, draw) for question, solution in found[TASKS + HELD_OUT :]]
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    give_tools(model, partial / "model")
    write_rows(partial / "train.jsonl", rows[:TASKS])
    write_rows(partial / "validation.jsonl", rows[TASKS : TASKS + HELD_OUT])
    write_rows(partial / "conversations.jsonl", told)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(partial, folder)


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object a line."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_agent(given.model, given.folder, given.seed)
