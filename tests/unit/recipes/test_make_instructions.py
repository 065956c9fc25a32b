"""The tasks of the recipe of instructions can be checked, do not contradict themselves, and are in one file each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.recipes.make_instructions import APART, HELD_OUT, KINDS, TASKS, write_tasks
from roll.config.schema.rlvr import RlvrConfig
from roll.rewards.functions.ifeval import ifeval, instructions_of
from roll.types import Prompt
from tests.unit.config.test_examples import planned

PROMPT = Prompt(0, np.zeros(1, dtype=np.int32), "", "ifeval", {})


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("instructions") / "rows"
    write_tasks(folder, seed=0)
    return {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in folder.glob("*.jsonl")}


def test_no_task_is_in_two_files(rows: dict[str, list[dict[str, Any]]]) -> None:
    assert {name: len(found) for name, found in rows.items()} == {"train": TASKS, "validation": HELD_OUT}
    assert len({row["prompt"] for found in rows.values() for row in found}) == TASKS + HELD_OUT


def test_every_kind_is_asked_and_none_contradicts(rows: dict[str, list[dict[str, Any]]]) -> None:
    asked = [set(row["instruction_id_list"]) for row in rows["train"]]
    assert len(set.union(*asked)) == len(KINDS)
    assert all(len(names & group) < 2 for names in asked for group in APART)
    assert all(len(instructions_of(row)) == len(row["instruction_id_list"]) for row in rows["train"])


@pytest.mark.parametrize(
    ("name", "follows", "fails"),
    [
        ("punctuation:no_comma", "No pause here.", "Yes, here."),
        ("change_case:english_lowercase", "all small.", "Not small."),
        ("detectable_format:title", "<<Moon>> It shines.", "Moon. It shines."),
        ("startend:quotation", '"The moon."', "The moon."),
    ],
)
def test_one_instruction_tells_answers_apart(
    name: str, follows: str, fails: str, rows: dict[str, list[dict[str, Any]]]
) -> None:
    row = next(row for row in rows["train"] if row["instruction_id_list"] == [name])
    assert [ifeval(PROMPT, text, row).value for text in (follows, fails)] == [1.0, 0.0]


def test_the_recipe_reads_what_the_script_writes() -> None:
    config = planned("recipes/smollm2_ifeval_grpo")[0]
    assert isinstance(config, RlvrConfig) and list(config.rewards) == ["ifeval"]
    assert config.actor_train.data_args and config.actor_train.data_args.file_name == "data/instructions/train.jsonl"


def test_recipes_of_sums_take_equal_numbers_of_responses() -> None:
    names = ("grpo", "lora", "async", "ppo", "distill")
    configs = [planned(f"recipes/smollm2_sums_{name}")[0] for name in names]
    sizes = {
        config.rollout_batch_size * config.num_return_sequences_in_group
        for config in configs
        if isinstance(config, RlvrConfig)
    }
    assert sizes == {512} and len({config.output_dir for config in configs}) == len(names)
    assert isinstance(configs[-1], RlvrConfig) and configs[-1].teacher is not None
    teacher = configs[-1].teacher.model_args.model_name_or_path
    assert teacher is not None and Path(teacher) == Path(configs[0].output_dir) / "export"
