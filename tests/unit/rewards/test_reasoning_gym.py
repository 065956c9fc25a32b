"""The verdicts of reasoning-gym's verifiers: of a package in its place everywhere, of the package where it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from roll.api import load_config
from roll.config.load import on_disk
from roll.data.generated import generated, task
from roll.errors import ConfigError
from roll.rewards.functions.reasoning_gym import check_row, reasoning_gym, verifier
from roll.types import Prompt, RewardOutcome

PROMPT = Prompt(0, np.zeros(1, dtype=np.int32), "", "any", {})
SEVERAL = ("graph_color", "chain_sum", "rearc", "arc_agi", "prime_factorization", "letter_counting")


def row(**metadata: Any) -> dict[str, Any]:
    return {"prompt": "?", "ground_truth": "7", "metadata": json.dumps({"source_dataset": "sevens", **metadata})}


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Put a package with one family in the place of reasoning-gym, whose verifier is given to the fixture."""

    def install(verify: Any) -> None:
        def of_family(name: str) -> Any:
            if name != "sevens":
                raise ValueError(f"Dataset '{name}' not registered")
            return verify

        module = ModuleType("reasoning_gym")
        module.__dict__["get_score_answer_fn"] = of_family
        monkeypatch.setitem(sys.modules, "reasoning_gym", module)
        verifier.cache_clear()

    yield install
    verifier.cache_clear()


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<think>8</think> It is <answer> 7 </answer>.", "7"),
        ("<answer>6</answer> no, <answer>7</answer>", "7"),
        ("<think>8</think>\n7\n", "7"),
    ],
)
def test_the_answer_stands_in_tags_or_alone(response: str, answer: str, package: Any) -> None:
    asked: list[Any] = []
    package(lambda said, entry: asked.append((said, entry)) or 0.01)
    assert reasoning_gym(PROMPT, response, row(n=1)).value == 0.01
    assert asked == [(answer, {"question": "?", "answer": "7", "metadata": {"source_dataset": "sevens", "n": 1}})]


def test_tuples_of_the_metadata_survive_json(package: Any) -> None:
    package(lambda said, entry: float(entry["metadata"]["grid"] == ((1, 2), (3, 4))))
    assert reasoning_gym(PROMPT, "7", row(grid=((1, 2), (3, 4)))).value == 1.0


def test_an_unreadable_answer_has_no_verdict(package: Any) -> None:
    package(lambda said, entry: float(int(said) == 7))
    result = reasoning_gym(PROMPT, "seven", row())
    assert (result.value, result.outcome) == (0.0, RewardOutcome.UNPARSABLE) and "ValueError" in result.note


@pytest.mark.parametrize("wrong", [{"metadata": None}, {"metadata": "{"}, {"metadata": "{}"}, row(source_dataset="x")])
def test_rows_without_a_known_family_are_refused(wrong: dict[str, Any], package: Any) -> None:
    package(lambda said, entry: 1.0)
    check_row(row())
    with pytest.raises(ValueError):
        check_row({**row(), **wrong})


def test_a_missing_package_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = find_spec
    monkeypatch.setattr(on_disk, "find_spec", lambda name: None if name == "reasoning_gym" else there(name))
    (tmp_path / "rows.jsonl").write_text(json.dumps(row()) + "\n")
    words = [
        "actor_train.data_args.file_name=rows.jsonl",
        "~rewards.arithmetic",
        "+rewards.sevens.reward=reasoning_gym",
    ]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config("tiny/tiny_rlvr_lora_zero3", words)
    faults = {fault.place: fault for fault in caught.value.faults}
    assert faults["rewards.sevens.reward"].code == "not_installed"
    assert "pip install 'reasoning-gym" in faults["rewards.sevens.reward"].remedy


@pytest.mark.parametrize("family", SEVERAL)
def test_prepared_rows_satisfy_the_packages_verifier(family: str) -> None:
    pytest.importorskip("reasoning_gym")
    for made in generated(family, {}, 3, 4):
        columns = json.loads(json.dumps(task(made, family).columns))
        check_row(columns)
        right = columns["ground_truth"] or json.dumps(made["metadata"]["possible_answer"])
        assert reasoning_gym(PROMPT, f"<answer>{right}</answer>", columns).value == 1.0
        assert reasoning_gym(PROMPT, "", columns).value < 1.0
