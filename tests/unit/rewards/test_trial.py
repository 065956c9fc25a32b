"""The trial of rewards before a run, which reports faults with file and line."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roll.config.schema.roles import RewardConfig
from roll.errors import Fault
from roll.runs.rlvr.reward_trial import try_rewards
from tests import limits
from tests.unit.rewards.running import PROMPT

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
MODULE = """
import asyncio
import json
import os
import time

from roll.algorithms.methods import declares
from roll.rewards.answers import ground_truth
from roll.rewards.base import RewardTraits
from roll.types import RewardOutcome, RewardResult


def sound(prompt, response, row):
    assert response in ("", "1")
    return row["base"] == 100.0


async def sound_awaited(prompt, responses, row):
    return [0.0 for _ in responses]


def column(prompt, response, row):
    return row["answr"] == response  # column


def unread(prompt, response, row):
    return bool(response) and response == row["answr"]  # unread


def helped(prompt, response, row):
    return ground_truth(row)  # helped


def library(prompt, response, row):
    return json.loads(response)  # library


def nothing(prompt, response, row):
    row["base"] = 1.0


def hangs(prompt, response, row):
    time.sleep(3600)


def exits(prompt, response, row):
    os._exit(4)


def unavailable(prompt, response, row):
    return RewardResult(0.0, RewardOutcome.UNAVAILABLE, note="namespaces are off")


def unparsable(prompt, response, row):
    return RewardResult(0.0, RewardOutcome.UNPARSABLE)


@declares(RewardTraits(needs_service=True))
async def asks(prompt, response, row):
    raise ConnectionError("nobody listens")


def keyed(prompt, response, row, *, least):
    return least
"""
CRASHES = [
    ("column", "KeyError: 'answr'"),
    ("unread", "KeyError: 'answr'"),
    ("helped", "ValueError: the row has neither 'ground_truth' nor 'answer'"),
    ("library", "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
]


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (file := tmp_path / "tried_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return file


def tried(domains: dict[str, Any], with_rows: bool = True) -> list[Fault]:
    """Return the faults of domains. Each domain is given by the keys of its section."""
    sections = {name: RewardConfig.model_validate({"timeout": limits.CALL, **keys}) for name, keys in domains.items()}
    firsts = {name: replace(PROMPT, domain=name) for name in domains} if with_rows else {}
    return asyncio.run(try_rewards(sections, firsts, limits.START)).faults


def test_sound_and_service_rewards_pass_trial() -> None:
    parts = {"a": {"reward": "tried_rewards:asks"}, "b": {"reward": "tried_rewards:unparsable"}}
    sound = {"reward": "tried_rewards:sound"}
    assert not tried(
        {"sound": sound, "asks": {"reward": "tried_rewards:asks"}, "parts": {"parts": parts, "concurrency": 2}}
    )
    assert not tried({"group": {"reward": "tried_rewards:sound_awaited", "group": True}})


def test_a_domain_without_rows_is_imported_alone() -> None:
    assert not tried({"column": {"reward": "tried_rewards:column"}}, with_rows=False)
    (fault,) = tried({"absent": {"reward": "tried_rewards:absent"}}, with_rows=False)
    assert fault.place == "rewards.absent.reward"


def test_trial_names_every_faulty_domain_with_line(module: Path) -> None:
    faults = tried({name: {"reward": f"tried_rewards:{name}"} for name, _ in CRASHES})
    for (name, said), fault in zip(CRASHES, faults, strict=True):
        line = next(number for number, text in enumerate(MODULE.splitlines(), 1) if text.endswith(f"# {name}"))
        assert (fault.code, fault.place) == ("failed", f"rewards.{name}.reward")
        assert fault.problem.startswith(f"'tried_rewards:{name}', called with")
        assert fault.problem.endswith(f"fails: {said} ({module}, line {line})")
        assert fault.remedy.endswith(" columns base")


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"reward": "tried_rewards:nothing"}, "returned a NoneType, not a RewardResult or a number: None"),
        ({"reward": "tried_rewards:exits"}, "the process ended itself with status 4"),
        ({"reward": "tried_rewards:hangs", "timeout": limits.EXPIRY}, f"returns no verdict within {limits.EXPIRY:g} s"),
        ({"reward": "tried_rewards:unavailable"}, "cannot reach a verdict: namespaces are off"),
        ({"reward": "tried_rewards:sound", "group": True}, "fails: AssertionError"),
        ({"reward": "tried_rewards:sound", "concurrency": 2}, "is a plain function"),
        ({"reward": "tried_rewards:keyed"}, "missing a required argument: 'least'"),
        ({"reward": "tried_rewards:keyed", "reward_args": {"least": 1, "leats": 1}}, "'leats'"),
        ({"reward": "tried_rewrds:sound"}, "No module named 'tried_rewrds'"),
    ],
)
def test_forbidden_reward_behaviour_is_a_fault(keys: dict[str, Any], problem: str) -> None:
    (fault,) = tried({"own": keys})
    assert problem in fault.problem


def test_a_part_is_named() -> None:
    parts = {"good": {"reward": "tried_rewards:sound"}, "bad": {"reward": "tried_rewards:column"}}
    (fault,) = tried({"own": {"parts": parts}})
    assert fault.place == "rewards.own.parts.bad.reward"
