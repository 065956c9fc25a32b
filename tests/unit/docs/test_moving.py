"""Runs the code and the translations on the pages for those who move to roll."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.agents.environments.process import EnvironmentProcess
from roll.config.load.user_code import inspect_user_code
from roll.config.schema.environments import EnvironmentConfig
from roll.convert.__main__ import main as convert
from roll.types import RewardResult
from tests import limits
from tests.unit.docs.pages import blocks
from tests.unit.environments.running import says
from tests.unit.rewards.running import run

PAGE = "docs/moving/from_roll.md"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Make the page's modules importable, and return its files by name."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    found = {file: block.text for block in blocks(PAGE) if (file := block.option("file")) is not None}
    for name, text in found.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return found


def test_the_pages_environment_plays_an_episode(files: dict[str, str]) -> None:
    keys: dict[str, Any] = yaml.safe_load(files["shop/agentic_shop.yaml"])["environments"]["WebShopEnv"]
    section = EnvironmentConfig.model_validate_json(json.dumps(keys))

    async def go() -> list[float]:
        process = EnvironmentProcess("WebShopEnv", section, limits.START)
        try:
            await process.open(0, {"seed": 3}, 0)
            steps = [await process.step(0, says(text)) for text in ("what is there?", "buy blue cup")]
            return [step.reward for step in steps]
        finally:
            await process.close()

    assert run(go()) == [0.0, 1.0]


def test_the_pages_reward_tells_score_from_reward(files: dict[str, str]) -> None:
    name = "my_shop_rewards:names_the_item"
    assert inspect_user_code({"rewards": {"shop": {"reward": name}}}) == ({}, [])
    import my_shop_rewards  # type: ignore[import-not-found]  # written by the fixture

    result: RewardResult = my_shop_rewards.names_the_item(None, "a red cup" + " " * 1000, {"ground_truth": "red cup"})
    assert (result.value, result.score) == (0.9, 1.0)


MOVED = [
    ("from_verl", "moved/verl_grpo.sh", "moved/verl_grpo.yaml", ("--rows", "7473")),
    ("from_trl", "moved/trl_grpo_config.yaml", "moved/trl_grpo.yaml", ("--gpus", "8")),
    ("from_openrlhf", "moved/openrlhf_ppo.sh", "moved/openrlhf_ppo.yaml", ("--rows", "20000")),
]
SCORES = {"from_verl": "moved_score", "from_trl": "moved_reward", "from_openrlhf": "moved_rewards"}


@pytest.mark.parametrize(("page", "source", "experiment", "words"), MOVED, ids=lambda value: str(value)[:12])
def test_the_pages_experiment_is_the_translation(
    page: str, source: str, experiment: str, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {file: block.text for block in blocks(f"docs/moving/{page}.md") if (file := block.option("file"))}
    (tmp_path / "moved").mkdir()
    (tmp_path / source).write_text(files[source], encoding="utf-8")
    assert convert([str(tmp_path / source), *words]) == 0
    assert capsys.readouterr().out == files[experiment]
    text = " ".join(block.text for block in blocks(f"docs/moving/{page}.md") if block.info == "bash")
    assert f"python -m roll.convert {source} {' '.join(words)} > {experiment}\n" in text


@pytest.mark.parametrize("page", SCORES)
def test_the_pages_score_calls_the_other_function(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = SCORES[page]
    (block,) = [one for one in blocks(f"docs/moving/{page}.md") if one.option("file") == f"{name}.py"]
    (tmp_path / f"{name}.py").write_text(block.text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert inspect_user_code({"rewards": {"maths": {"reward": f"{name}:score"}}}) == ({}, [])
    score = importlib.import_module(name).score
    row = {"data_source": "x", "ground_truth": "42"}
    assert (score(None, "It is 42.", row), score(None, "It is 41.", row)) == (1.0, 0.0)
