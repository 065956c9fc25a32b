"""Incomplete or contradictory environments are refused with place, value and remedy; valid ones are accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from roll.errors import Fault, FaultCode
from tests.bad_input.test_sets_and_filters import SETS
from tests.faults import assert_fault

WORLD = "+environments={calculator: {rows: 10}}"
NO_ROWS = "+environments={calculator: {max_turns: 2}}"
AGENT, MCP = "+environments.calculator.agent", "environments.calculator.mcp"
TAG = "environments.calculator.tag_included=[sums]"
SHELL = "+environments={sums: {environment: shell, image: tasks, step_timeout: 90, max_turns: 30}}"
CASES = [
    (["~rewards"], "rewards", "missing", "missing", "each domain"),
    (["~actor_train.data_args"], "actor_train.data_args", "missing", "missing", "with the data file"),
    (
        ["~actor_train.data_args", NO_ROWS],
        "environments.calculator.rows",
        "missing",
        "missing, and so is actor_train.data_args",
        "a data file",
    ),
    (
        [WORLD, "+sequence_length=20"],
        "sequence_length",
        "too_small",
        "20 is less than prompt_length + response_length = 24",
        "at least 24",
    ),
    (
        [WORLD, "+sequence_length=65"],
        "response_length",
        "too_large",
        "'model' has 64 positions",
        "within 64",
    ),
    (
        [WORLD, "+sequence_length=60", "+actor_infer.strategy_args.strategy_config.max_model_len=50"],
        "actor_infer.strategy_args.strategy_config.max_model_len",
        "too_small",
        "50 is less than sequence_length = 60",
        "at least 60",
    ),
    (
        [WORLD, "environments.calculator.step_timeout=700"],
        "environments.calculator.step_timeout",
        "not_below",
        "more than episode_timeout",
        "lower it",
    ),
    (
        [WORLD, "environments.calculator.tools=[add]"],
        "environments.calculator.tools[0]",
        "malformed",
        "'add'",
        "package.module:function",
    ),
    (
        ["+environments={sums: {tools: ['a:b'], rows: 4}}"],
        "environments.sums",
        "missing",
        "no rewards.sums",
        "add rewards.sums",
    ),
    (
        [WORLD, f"{AGENT}={{}}"],
        "environments.calculator.agent",
        "exclusive",
        "command, function and verifiers",
        "command, function or verifiers",
    ),
    (
        [WORLD, f"{AGENT}={{function: play}}"],
        "environments.calculator.agent.function",
        "malformed",
        "'play'",
        "package.module:function",
    ),
    (
        [WORLD, f"{AGENT}={{command: ['true'], verifiers: {{env_id: a, python: b}}}}"],
        *("environments.calculator.agent", "exclusive", "command, function and verifiers", "or verifiers"),
    ),
    (
        [WORLD, f"{AGENT}={{command: ['true'], reports_reward: true}}"],
        *("environments.calculator.environment", "exclusive", "'calculator'", "tool_use"),
    ),
    (
        [WORLD, f"{AGENT}={{verifiers: {{env_id: a}}}}"],
        *("environments.calculator.agent.verifiers.python", "missing", "missing", "python"),
    ),
    (
        [WORLD, f"{AGENT}={{command: ['true']}}", "environments.calculator.tools=['a:b']"],
        *("environments.calculator.tools", "exclusive", "agent", "remove it, or remove agent"),
    ),
    (
        ["+environments={sums: {agent: {command: ['true']}, rows: 4}}"],
        "environments.sums",
        "missing",
        "no rewards.sums",
        "add rewards.sums",
    ),
    (
        [WORLD, f"{MCP}=[{{command: [a], url: 'http://b'}}]"],
        "environments.calculator.mcp[0]",
        "exclusive",
        "exactly one",
        "command or url",
    ),
    (
        [WORLD, f"{MCP}=[{{url: 'b:8000'}}]"],
        "environments.calculator.mcp[0].url",
        "malformed",
        "'b:8000'",
        "write http://",
    ),
    (
        [WORLD, f"{MCP}=[{{command: [a], call_timeout: 10}}]"],
        *("environments.calculator.mcp[0].call_timeout", "not_below", "step_timeout", "raise step_timeout"),
    ),
    (
        [WORLD, "environments.calculator.max_turns=0"],
        "environments.calculator.max_turns",
        "out_of_range",
        "0",
        "above 0",
    ),
    (
        ["+environments={sums: {environment: shell, image: ./image}}"],
        *("environments.sums.step_timeout", "too_small", "10 s", "command_seconds"),
    ),
    (
        [SHELL, "environments.sums.image=./nowhere"],
        *("environments.sums.image", "not_found", "./nowhere", "make the image"),
    ),
    (
        [SHELL, "+environments.sums.container={memory_gib: 9}"],
        *("environments.sums.container.memory_gib", "too_large", "9 GiB", "memory_gib to 9"),
    ),
    (
        [WORLD, "+environments.calculator.container={cpus: 2}"],
        *("environments.calculator.container", "owner_missing", "no image", "set image"),
    ),
    (
        [SHELL, "+environments.sums.container={engine: lxc}"],
        *("environments.sums.container.engine", "not_allowed", "lxc", "podman"),
    ),
    ([WORLD, "adv_estimator=remax"], "adv_estimator", "not_supported", "'remax'", "grpo"),
    ([WORLD, "+overlong_buffer={len: 4}"], "overlong_buffer", "not_supported", "several turns", "remove it"),
    (
        [WORLD, TAG, "rewards.math_rule.tag_included=[sums]"],
        "environments.calculator.tag_included",
        "duplicate",
        "already belongs to rewards.math_rule",
        "one domain",
    ),
    (
        [WORLD, "+rewards.calculator={reward: math_rule, tag_included: [sums]}"],
        "rewards.calculator.tag_included",
        "misplaced",
        "go to environments.calculator",
        "move it to environments.calculator.tag_included",
    ),
    (
        [WORLD, SETS, "+validation.sets.held.rows={sums: 4}"],
        "validation.sets.held.rows.sums",
        "unknown_name",
        "'sums'",
        "its own tasks",
    ),
    (
        [WORLD, "+validation={sets: {held: {}}}"],
        "validation.sets.held.data_args",
        "missing",
        "missing",
        "rows of environments",
    ),
    (
        [WORLD, SETS, "+validation.rows={calculator: 4}"],
        "validation.rows",
        "exclusive",
        "and so is validation.sets",
        "one of the sets",
    ),
    (["+environments={a b: {}}"], "environments.a b", "malformed", '"a b"', "a string of the form"),
]


@pytest.mark.parametrize(
    ("overrides", "place", "code", "value", "remedy"), CASES, ids=[case[0][-1][:60] for case in CASES]
)
def test_it_is_refused(
    faults_of: Callable[..., tuple[Fault, ...]],
    overrides: list[str],
    place: str,
    code: FaultCode,
    value: str,
    remedy: str,
) -> None:
    assert_fault(faults_of(*overrides), place, code, value, remedy)


@pytest.mark.parametrize(
    "overrides",
    [
        [WORLD],
        [WORLD, "~rewards", "~actor_train.data_args"],
        [WORLD, "+sequence_length=64", "adv_estimator=step_reinforce"],
        [WORLD, "+rewards.calculator={reward: math_rule}"],
        ["+environments={sums: {tools: ['a:b']}}", "+rewards.sums={reward: math_rule}"],
        [WORLD, "+validation={rows: {calculator: 4}}", "eval_steps=1"],
        [SHELL, "+environments.sums.container={memory_gib: 2, disk_gib: 0.25, network: true}"],
    ],
)
def test_it_is_taken(judged: Callable[..., str | None], overrides: list[str]) -> None:
    assert judged(*overrides) is None


def test_lengths_follow_from_the_episode(folder: Path, judged: Callable[..., str | None]) -> None:
    """max_model_len only has to hold the longest episode, and a micro-batch may be smaller than that."""
    engine = "+actor_infer.strategy_args.strategy_config.max_model_len"
    assert judged(WORLD, "+sequence_length=60", f"{engine}=60") is None
    assert judged(WORLD, "+sequence_length=60", "+actor_train.max_tokens_per_microbatch=24") is None, (
        "a sequence may exceed the budget"
    )
