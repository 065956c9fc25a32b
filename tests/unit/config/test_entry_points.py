"""Rewards and environments that installed packages register are used by their names."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from roll.config.schema.rlvr import RlvrConfig
from roll.errors import ConfigError
from roll.registry import ENVIRONMENT_GROUP, REWARD_GROUP
from tests.faults import assert_fault, coded
from tests.unit.config.test_examples import planned
from tests.unit.docs.pages import blocks

CODE = """
def brief_and_right(prompt, response, row, *, limit=200):
    return len(response) < limit

class Shop:
    pass
"""
GSM8K = "quickstart/gsm8k_rlvr"
AGENT = "tiny/tiny_agent"


def distribution(folder: Path, name: str, groups: dict[str, dict[str, str]]) -> None:
    """Write what pip leaves of an installed package: its entry points, and the module that they name."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    lines = [f"[{group}]\n" + "".join(f"{one} = {path}\n" for one, path in of.items()) for group, of in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    (folder / "my_package.py").write_text(CODE, encoding="utf-8")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of installed packages."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return tmp_path


def planned_rlvr(name: str, *words: str) -> RlvrConfig:
    config, _ = planned(name, *words)
    assert isinstance(config, RlvrConfig)
    return config


def refused(*words: str, name: str = GSM8K) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        planned(name, *words)
    return caught.value


def test_a_registered_reward_becomes_its_path(site: Path) -> None:
    distribution(site, "my-package", {REWARD_GROUP: {"brief_and_right": "my_package:brief_and_right"}})
    config = planned_rlvr(
        GSM8K, "rewards.math_rule.reward=brief_and_right", "rewards.math_rule.reward_args={limit: 80}"
    )
    assert config.rewards["math_rule"].reward == "my_package:brief_and_right"
    of_domain = planned_rlvr(GSM8K, "~rewards.math_rule", "+rewards.brief_and_right={world_size: 4}")
    assert of_domain.rewards["brief_and_right"].reward == "my_package:brief_and_right"
    parts = "rewards.math_rule.parts={brief_and_right: {}, exact_match: {weight: 0.5}}"
    of_parts = planned_rlvr(GSM8K, parts)
    assert of_parts.rewards["math_rule"].parts["brief_and_right"].reward == "my_package:brief_and_right"
    assert of_parts.rewards["math_rule"].parts["exact_match"].reward is None


def test_arguments_of_a_registered_reward_are_checked(site: Path) -> None:
    distribution(site, "my-package", {REWARD_GROUP: {"brief_and_right": "my_package:brief_and_right"}})
    error = refused("rewards.math_rule.reward=brief_and_right", "rewards.math_rule.reward_args={limitt: 80}")
    assert coded(error.faults) == [("unknown_key", "rewards.math_rule.reward_args.limitt")]


def test_a_registered_environment_becomes_its_path(site: Path) -> None:
    distribution(site, "my-package", {ENVIRONMENT_GROUP: {"shop": "my_package:Shop"}})
    config = planned_rlvr(AGENT, "environments.calculator.environment=shop")
    assert config.environments["calculator"].environment == "my_package:Shop"


def test_an_unknown_name_lists_packages(site: Path) -> None:
    groups = {REWARD_GROUP: {"briefness": "my_package:brief_and_right"}, ENVIRONMENT_GROUP: {"shop": "my_package:Shop"}}
    distribution(site, "my-package", groups)
    error = refused("rewards.math_rule.reward=brifness")
    assert_fault(
        error.faults, "math_rule.reward", "unknown_name", "did you mean 'briefness'", "briefness (of my-package)"
    )
    error = refused("environments.calculator.environment=shopp", name=AGENT)
    assert_fault(error.faults, "calculator.environment", "unknown_name", "'shop'", "shop (of my-package)")


def test_a_name_of_roll_is_a_fault(site: Path) -> None:
    groups = {
        REWARD_GROUP: {"math_rule": "my_package:brief_and_right"},
        ENVIRONMENT_GROUP: {"calculator": "my_package:Shop"},
    }
    distribution(site, "my-package", groups)
    assert coded(refused().faults) == [("duplicate", "rewards.math_rule.reward")]
    assert_fault(refused().faults, "math_rule.reward", "duplicate", "my-package", "my_package:brief_and_right")
    assert coded(refused(name=AGENT).faults) == [("duplicate", "environments.calculator.environment")]
    config = planned_rlvr(GSM8K, "rewards.math_rule.reward='my_package:brief_and_right'")
    assert config.rewards["math_rule"].reward == "my_package:brief_and_right"


def test_a_name_of_two_packages_is_one_fault(site: Path) -> None:
    for package in ("one", "two"):
        distribution(site, package, {REWARD_GROUP: {"brief": "my_package:brief_and_right"}})
    error = refused("rewards.math_rule.reward=brief")
    assert coded(error.faults) == [("duplicate", "rewards.math_rule.reward")]
    assert "one and two" in str(error)


def test_a_malformed_entry_point_is_one_fault(site: Path) -> None:
    distribution(site, "my-package", {REWARD_GROUP: {"brief": "my_package"}})
    assert coded(refused("rewards.math_rule.reward=brief").faults) == [("malformed", "rewards.math_rule.reward")]


def test_the_entry_points_of_the_page_work(site: Path) -> None:
    [block] = [block for block in blocks("docs/extending.md") if block.info == "toml"]
    named = dict(re.findall(r'^(\w+) = "(\S+)"$', block.text, re.MULTILINE))
    assert set(re.findall(r'entry-points."(\S+)"', block.text)) == {REWARD_GROUP, ENVIRONMENT_GROUP}
    distribution(site, "my-package", {REWARD_GROUP: named})
    config = planned_rlvr(GSM8K, "rewards.math_rule.reward=brief_and_right")
    assert config.rewards["math_rule"].reward == named["brief_and_right"]
