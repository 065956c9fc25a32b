"""Functions and rows as Python objects: their files, the names of these, and what other processes make of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from roll.agents.environments.child import _tools
from roll.api import load_config
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import ConfigError
from roll.given.digest import digest_of
from roll.given.experiment import Objects, holds_object
from roll.given.functions import MOST_BYTES, name_of
from roll.given.rows import file_of
from roll.rewards.base import load_reward
from roll.rewards.functions.exact_match import exact_match
from tests import limits
from tests.unit.docs.pages import ROOT

ROWS = [{"prompt": "1+1=", "ground_truth": "2"}, {"prompt": "2+2=", "ground_truth": "4", "note": None}]
PROGRAM = """{comment}
import sys
from pathlib import Path
from roll.given.functions import name_of

KNOWN, LIMIT = {{"a", "b", "c"}}, {limit}

class Scale:
    factor = 2.0

def helper(response):
    return response in {{"x", "y", "z"}} or response in KNOWN

def close(prompt, response, row, *, more: float = 0.0):
    "Doc."
    return min(LIMIT, Scale.factor * helper(response)) + more

print(name_of(close, Path("given"), "reward"))
"""


def run_program(folder: Path, comment: str = "", limit: float = 5.0, seed: str = "1") -> str:
    """Run the program and return the name that it prints."""
    (folder / "program.py").write_text(PROGRAM.format(comment=comment, limit=limit))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limits.PROCESS,
        check=True,
    )
    return done.stdout.strip()


def test_a_function_keeps_its_name_between_processes(tmp_path: Path) -> None:
    first = run_program(tmp_path)
    assert first == run_program(tmp_path, comment="# moved\n\n", seed="2")
    assert first != run_program(tmp_path, limit=6.0)


def test_other_processes_call_a_written_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = run_program(tmp_path, limit=1.5)
    monkeypatch.chdir(tmp_path)
    reward = load_reward(name)
    assert [reward(None, text, {}, more=1.0) for text in ("x", "c", "d")] == [2.5, 2.5, 1.0]
    assert "def close(prompt, response, row" in Path(name.rpartition(":")[0]).read_text()


def test_an_importable_function_is_named(tmp_path: Path) -> None:
    name = name_of(exact_match, tmp_path, "reward")
    assert name == "roll.rewards.functions.exact_match:exact_match" and not list(tmp_path.iterdir())


def scaled(factor: float) -> Callable[..., float]:
    def reward(prompt: Any, response: str, row: Any) -> float:
        return factor * len(response)

    return reward


def test_a_closure_is_part_of_a_function() -> None:
    assert digest_of(scaled(1.0)) == digest_of(scaled(1.0)) != digest_of(scaled(2.0))


def test_a_function_with_large_values_is_refused(tmp_path: Path) -> None:
    text = "x" * (MOST_BYTES + 1)
    with pytest.raises(ConfigError) as caught:
        name_of(lambda: text, tmp_path, "reward")
    assert caught.value.faults[0].code == "too_large"


def test_rows_become_files(tmp_path: Path) -> None:
    lines = file_of(ROWS, tmp_path, "rows")
    assert [json.loads(line) for line in Path(lines).read_text().splitlines()] == ROWS
    dataset = datasets.Dataset.from_list(ROWS).add_column("note", ["a", "b"]).select([1])
    parquet = file_of(dataset, tmp_path, "rows", "held")
    read = datasets.Dataset.from_parquet(parquet, cache_dir=str(tmp_path))
    assert list(read) == list(dataset) and Path(parquet).name == "held.parquet"
    assert file_of(dataset, tmp_path, "rows", "held") == parquet and file_of(ROWS, tmp_path, "rows") == lines
    assert file_of(ROWS[:1], tmp_path, "rows") != lines


@pytest.mark.parametrize("alone", [True, False])
def test_objects_become_names_in_the_run_folder(alone: bool, tmp_path: Path) -> None:
    reward = scaled(1.0)
    own: Any = reward if alone else {"arithmetic": reward}
    keys: dict[str, Any] = {"rewards": {"arithmetic": {"tag_included": ["a"]}}}
    config = load_config(
        "tiny/tiny_rlvr_lora_zero3", reward=own, rows=ROWS, validation_rows={"a": ROWS}, output_dir=tmp_path,
        dry_run=True, **keys,
    )  # fmt: skip
    assert isinstance(config, RlvrConfig) and config.validation and config.actor_train.data_args
    assert config.rewards["arithmetic"].reward == name_of(reward, tmp_path / "given", "reward")
    assert config.actor_train.data_args.file_name == file_of(ROWS, tmp_path / "given", "rows")
    held_out = config.validation.sets["a"].data_args
    assert held_out and (held_out.prompt, held_out.template) == ("prompt", "raw"), "the columns of the training rows"


def test_objects_may_stand_in_blocks(tmp_path: Path) -> None:
    def lookup(word: str) -> str:
        """Look up a word."""
        return word

    blocks = {"environments": {"own": {"tools": [lookup, "a.b:c"]}}, "data_args": {"file_name": ROWS}, "seed": 3}
    named = Objects(tmp_path).replaced(blocks)
    tools = named["environments"]["own"]["tools"]
    assert _tools(tuple(tools[:1]), "tools").names == {"lookup"} and tools[1] == "a.b:c"
    assert named["data_args"]["file_name"] == file_of(ROWS, tmp_path, "rows") and named["seed"] == 3
    assert holds_object(blocks) and not holds_object(named)
