"""Faults in the user's own estimators, losses and rewards (`package.module:Name`) are reported before anything
starts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roll.algorithms.methods import KINDS
from roll.config.load import user_code
from roll.config.load.user_code import InspectedPart, UserPart, ask
from roll.errors import Fault, FaultCode
from roll.pipeline import main
from tests.faults import assert_fault, coded

MODULE = """
from dataclasses import dataclass
from typing import Literal

from roll.algorithms.advantages import Scores, to_tokens
from roll.algorithms.methods import declares
from roll.algorithms.methods import EstimatorTraits
from roll.algorithms.methods import PolicyLossTraits
from roll.algorithms.objectives import Objective, Surrogate
from roll.types import RewardResult


@declares(EstimatorTraits(compares_groups=False))
def plain(scores: Scores, norm, *, power: float = 1.0, side: Literal["up", "down"] = "up"):
    return to_tokens(scores.rewards**power, scores)


def compared(scores, norm):
    return to_tokens(scores.rewards, scores)


@declares(EstimatorTraits(divides_by_mean=True))
def over_the_mean(scores, norm):
    return to_tokens(scores.rewards, scores)


def alone(scores):
    return scores


@declares(EstimatorTraits(discounts="token"))
def misdeclared(scores, norm):
    return scores


@declares(PolicyLossTraits(ratio=None))
def of_another_kind(scores, norm):
    return scores


@declares(PolicyLossTraits(ratio="sequence"))
@dataclass(frozen=True)
class Bounded(Objective):
    bound: float = 2.0
    halves: int = 0

    def __post_init__(self):
        if self.halves % 2:
            raise ValueError("halves is odd")

    def __call__(self, tokens):
        return Surrogate(-tokens.advantages * tokens.log_probs, tokens.log_ratio, tokens.log_ratio > 0)


@dataclass
class Thawed(Objective):
    def __call__(self, tokens):
        return tokens


@dataclass(frozen=True)
class Narrow(Objective):
    def __call__(self):
        return None


def reward(prompt, response, row, *, least: float = 0.0):
    return RewardResult(least)


async def late(prompt, response, row):
    return RewardResult(0.0)


def by_name(prompt, responses, *, row):
    return responses


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)


def swapped(response, prompt, row):
    return RewardResult(1.0)
"""
ONE = ("num_return_sequences_in_group=1", "actor_train.training_args.per_device_train_batch_size=4")
REWARD = "rewards.math_rule.reward"
PARTS = "{right: {reward: math_rule}, same: {reward: exact_match}}"


def part(key: str, name: str, **arguments: Any) -> UserPart:
    """Return the part under a method's key, such as `policy_loss`. Any other `key` stands for the reward of the domain
    math_rule.
    """
    if key in KINDS:
        return UserPart(name, (key,), (KINDS[key].arguments,), arguments, key)
    return UserPart(name, tuple(REWARD.split(".")), ("rewards", "math_rule", "reward_args"), arguments)


ESTIMATOR, LOSS = "adv_estimator", "policy_loss"
CASES: list[tuple[UserPart, str, FaultCode, str, str]] = [
    (
        part(ESTIMATOR, "my_methds:plain"),
        ESTIMATOR,
        "not_found",
        "no module 'my_methds' (did you mean 'my_methods'?)",
        "working directory",
    ),
    (
        part(ESTIMATOR, "my_methods:plane"),
        ESTIMATOR,
        "not_found",
        "no 'plane' (did you mean 'plain'?)",
        ": Bounded, Narrow, Thawed",
    ),
    (
        part(ESTIMATOR, "my_methods:Bounded"),
        ESTIMATOR,
        "unfit",
        "a class, but an advantage estimator",
        "def Bounded(scores",
    ),
    (
        part(ESTIMATOR, "my_methods:alone"),
        ESTIMATOR,
        "unfit",
        "called with scores, norm",
        "def alone(scores, norm",
    ),
    (
        part(ESTIMATOR, "my_methods:misdeclared"),
        ESTIMATOR,
        "not_allowed",
        "declares discounts='token'",
        "EstimatorTraits",
    ),
    (
        part(ESTIMATOR, "my_methods:of_another_kind"),
        ESTIMATOR,
        "unfit",
        "declares PolicyLossTraits",
        "declare EstimatorTraits",
    ),
    (
        part(ESTIMATOR, "my_methods:plain", powr=2),
        "adv_estimator_args.powr",
        "unknown_key",
        "value 2",
        "did you mean 'power'?",
    ),
    (
        part(ESTIMATOR, "my_methods:plain", power="two"),
        "adv_estimator_args.power",
        "wrong_type",
        '"two" is not allowed',
        "give a number",
    ),
    (
        part(ESTIMATOR, "my_methods:plain", side="left"),
        "adv_estimator_args.side",
        "not_allowed",
        '"left" is not allowed',
        "'up' or 'down'",
    ),
    (
        part(LOSS, "my_methods:plain"),
        LOSS,
        "unfit",
        "a function, but a policy loss",
        "__call__(self, tokens)",
    ),
    (part(LOSS, "my_methods:Thawed"), LOSS, "unfit", "is not a frozen dataclass", "@dataclass(frozen=True)"),
    (
        part(LOSS, "my_methods:Narrow"),
        LOSS,
        "unfit",
        "called with self, tokens",
        "__call__(self, tokens)",
    ),
    (
        part(LOSS, "my_methods:Bounded", bond=2),
        "policy_loss_args.bond",
        "unknown_key",
        "value 2",
        "did you mean 'bound'?",
    ),
    (
        part(LOSS, "my_methods:Bounded", halves=0.5),
        "policy_loss_args.halves",
        "wrong_type",
        "0.5 is not allowed",
        "give a whole number",
    ),
    (
        part(LOSS, "my_methods:Bounded", halves=3),
        "policy_loss_args",
        "unfit",
        "halves is odd",
        "use values that it accepts",
    ),
    (
        part(LOSS, "broken:Loss"),
        LOSS,
        "failed",
        "ZeroDivisionError: division by zero (broken.py, line 1)",
        "fix the module",
    ),
    (part(LOSS, "unclosed:Loss"), LOSS, "failed", "SyntaxError: '(' was never closed (unclosed.py, line 1)", "fix"),
    (
        part(LOSS, "lacking:Loss"),
        LOSS,
        "not_installed",
        "No module named 'nowhere_at_all'",
        "install the package",
    ),
    (part(LOSS, "deadly:Loss"), LOSS, "failed", "with status 7: its last words", "fix the module"),
    (
        part("preference_loss", "my_methods:Bounded"),
        "preference_loss",
        "unfit",
        "a class, but a preference loss",
        "self, chosen, rejected",
    ),
    (part("reward", "my_methods:rewrd"), REWARD, "not_found", "did you mean 'reward'?", "it defines"),
    (part(ESTIMATOR, "my_methods:late"), ESTIMATOR, "unfit", "is asynchronous", "a plain function"),
    (
        replace(part("reward", "my_methods:reward"), concurrency=4),
        "rewards.math_rule.concurrency",
        "not_supported",
        "my_methods:reward is a plain function",
        "world_size: 4",
    ),
    (
        replace(part("reward", "my_methods:by_name"), group=True),
        REWARD,
        "unfit",
        "prompt, responses, row: too many",
        "def by_name(prompt, responses, row",
    ),
    (
        part("reward", "my_methods:of_verl"),
        REWARD,
        "unfit",
        "'data_source' would be the prompt",
        "def of_verl(prompt, response, row",
    ),
    (
        part("reward", "my_methods:swapped"),
        REWARD,
        "unfit",
        "'response' would be the prompt",
        "def swapped(prompt, response, row",
    ),
    (
        replace(
            part("reward", "my_methods:late", depth=1),
            arguments_place=("rewards", "d", "parts", "p", "reward_args"),
            concurrency=4,
        ),
        "rewards.d.parts.p.reward_args.depth",
        "unknown_key",
        "value 1",
        "known keys of rewards.d.parts.p.reward_args: none",
    ),
    (
        part("reward", "roll.rewards.functions.exact_match:exact_match", ignore_case="no"),
        f"{REWARD}_args.ignore_case",
        "wrong_type",
        '"no" is not allowed',
        "true or false",
    ),
    (
        part("reward", "my_methods:reward", leats=1),
        f"{REWARD}_args.leats",
        "unknown_key",
        "value 1",
        "did you mean 'least'?",
    ),
    (
        part("reward", "my_methods:reward", least="low"),
        f"{REWARD}_args.least",
        "wrong_type",
        '"low" is not allowed',
        "give a number",
    ),
]
COMMANDS = [
    (
        ["adv_estimator=my_methods.plain"],
        "adv_estimator",
        "not_allowed",
        '"my_methods.plain" is not allowed',
        "or your own, as package.module:Name",
    ),
    (
        ["+adv_estimator_args.power=2"],
        "adv_estimator_args",
        "unread",
        "adv_estimator grpo",
        "package.module:Name",
    ),
    (
        ["adv_estimator=my_methods:plain", "+adv_estimator_args.powr=2", "gamma=0.9"],
        "adv_estimator_args.powr",
        "unknown_key",
        "value 2",
        "did you mean 'power'?",
    ),
    (
        ["adv_estimator=my_methods:plain", "gamma=0.9"],
        "gamma",
        "no_effect",
        "my_methods:plain",
        "reinforce",
    ),
    (
        [
            "adv_estimator=my_methods:over_the_mean",
            f"rewards.math_rule.parts={PARTS}",
            "rewards.math_rule.normalise=group",
        ],
        "rewards.math_rule.normalise",
        "contradiction",
        "my_methods:over_the_mean",
        "set it to none",
    ),
    (
        ["adv_estimator=my_methods:compared", *ONE],
        "num_return_sequences_in_group",
        "no_effect",
        "my_methods:compared compares",
        "at least 2",
    ),
    (
        ["policy_loss=my_methods:Bounded", "behaviour_log_probs=trainer", "mismatch_correction=tis"],
        "mismatch_correction",
        "contradiction",
        "policy_loss my_methods:Bounded",
        "seq_tis",
    ),
    (
        ["rewards.math_rule.reward=exact_match", "rewards.math_rule.reward_args={ignore_cas: true}"],
        "rewards.math_rule.reward_args.ignore_cas",
        "unknown_key",
        "value true",
        "did you mean 'ignore_case'?",
    ),
    (
        ["rewards.math_rule.parts={right: {reward: exact_match, reward_args: {ignore_cas: true}}}"],
        "rewards.math_rule.parts.right.reward_args.ignore_cas",
        "unknown_key",
        "value true",
        "did you mean 'ignore_case'?",
    ),
    (
        ["rewards.math_rule.parts={right: {reward: my_methods:plain}}"],
        "rewards.math_rule.parts.right.reward",
        "unfit",
        "is called with prompt, response, row",
        "def plain(prompt, response, row",
    ),
]


def write_modules(folder: Path) -> None:
    (folder / "my_methods.py").write_text(MODULE)
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "unclosed.py").write_text("def reward(\n")
    (folder / "lacking.py").write_text("import nowhere_at_all\n")
    (folder / "deadly.py").write_text(
        "import os, sys\nsys.stderr.write('its last words')\nsys.stderr.flush()\nos._exit(7)\n"
    )
    (folder / "hanging.py").write_text("import threading\nthreading.Event().wait()\n")


@pytest.fixture
def modules(folder: Path) -> Path:
    """Return the working directory, with the user's modules in it."""
    write_modules(folder)
    return folder


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> Sequence[InspectedPart]:
    """Return the result of each case. All cases are inspected in one call."""
    folder = tmp_path_factory.mktemp("modules")
    write_modules(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return ask([case[0] for case in CASES], {})


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{one.name} {one.arguments or ''}" for one, *_ in CASES])
def test_faulty_user_code_yields_place_problem_and_remedy(looked: Sequence[InspectedPart], number: int) -> None:
    _, place, code, problem, remedy = CASES[number]
    (fault,) = looked[number].faults
    assert coded([fault]) == [(code, place)]
    assert problem in fault.problem
    assert remedy in fault.remedy


def test_no_fault_names_a_file_of_roll(looked: Sequence[InspectedPart]) -> None:
    problems = [fault.problem for one in looked for fault in one.faults]
    assert [problem for problem in problems if "registry.py" in problem or "user_code.py" in problem] == []


@pytest.mark.parametrize(
    ("overrides", "place", "code", "value", "remedy"), COMMANDS, ids=[" ".join(case[0])[:70] for case in COMMANDS]
)
def test_command_with_faulty_user_code_is_refused(
    faults_of: Callable[..., tuple[Fault, ...]],
    modules: Path,
    overrides: list[str],
    place: str,
    code: FaultCode,
    value: str,
    remedy: str,
) -> None:
    assert_fault(faults_of(*overrides), place, code, value, remedy)


@pytest.mark.full  # waits for a deadline that leaves time to import the other modules on a busy machine
def test_hanging_module_is_named_and_others_are_checked(
    refused: Callable[..., str], modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code, "IMPORT_SECONDS", 20.0)
    message = refused("policy_loss=hanging:Loss", f"{REWARD}=broken:reward")
    assert message.startswith("2 faults")
    assert "  policy_loss: 'hanging:Loss' " in message and "within 20 s" in message
    assert f"{REWARD}: 'broken:reward' cannot be imported: ZeroDivisionError" in message


def test_dry_run_does_not_import_user_code(modules: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["adv_estimator=my_methods:plain", "adv_estimator_args={power: 2}", "policy_loss=my_methods:Bounded", *ONE]
    reward = [f"{REWARD}=my_methods:reward", "rewards.math_rule.reward_args={least: 1}"]
    assert main(["--config-path", str(modules / "exp"), "--config-name", "sound", *words, *reward, "dry_run=true"]) == 0
    assert "Roles" in capsys.readouterr().out
    assert "my_methods" not in sys.modules
