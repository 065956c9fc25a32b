"""Incomplete or contradictory partners of environments are refused with place, value and remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from roll.errors import Fault, FaultCode
from tests.faults import assert_fault

PLACE = "environments.calculator.partners.rival"
API = "type: api, api_url: 'http://h/v1', model_name: m"
ENGINE = "type: inference, strategy_args: {strategy_name: vllm}"
SERVED = f"{ENGINE}, model_args: {{model_name_or_path: model}}"
CRITIQUE = "environment: critique, partners: {critic: {type: live}}"


def partner(keys: str, more: str = "") -> str:
    return f"+environments={{calculator: {{rows: 10, partners: {{rival: {{{keys}}}}}{more}}}}}"


def critique(keys: str) -> list[str]:
    return [f"+environments={{calculator: {{{keys}}}}}", "+rewards.calculator={reward: math_rule}"]


CASES = [
    ([partner("")], f"{PLACE}.type", "missing", "missing", "type"),
    ([partner("type: human")], f"{PLACE}.type", "not_allowed", "human", "inference"),
    ([partner("type: inference")], f"{PLACE}.strategy_args", "missing", "serves the model", "vllm or hf_infer"),
    (
        [partner(ENGINE)],
        *(f"{PLACE}.model_args.model_name_or_path", "missing", "serves the model", "that of pretrain"),
    ),
    ([partner("type: api, model_name: m")], f"{PLACE}.api_url", "missing", "missing", "http://localhost:8000/v1"),
    ([partner("type: api, api_url: 'http://h/v1'")], f"{PLACE}.model_name", "missing", "missing", "model's name"),
    ([partner("type: api, api_url: 'h:80', model_name: m")], f"{PLACE}.api_url", "malformed", "'h:80'", "base URL"),
    (
        [partner("type: api, api_url: 'http://me:hush@h/v1', model_name: m")],
        *(f"{PLACE}.api_url", "not_allowed", "a password", "api_key_variable"),
    ),
    (
        [partner(f"{API}, api_key_variable: sk-hush")],
        *(f"{PLACE}.api_key_variable", "malformed", "not the name", "PARTNER_API_KEY"),
    ),
    (
        [partner(f"{API}, api_key_variable: NOT_SET_ANYWHERE")],
        *(f"{PLACE}.api_key_variable", "missing", "NOT_SET_ANYWHERE", "export"),
    ),
    ([partner(f"{API}, timeout: 600")], f"{PLACE}.timeout", "not_below", "600 s", "raise episode_timeout"),
    ([partner(f"{API}, world_size: 2")], f"{PLACE}.world_size", "unread", "type api", "remove it"),
    ([partner(f"{SERVED}, max_calls: 2")], f"{PLACE}.max_calls", "unread", "type inference", "remove it"),
    ([partner("type: live, timeout: 5")], f"{PLACE}.timeout", "unread", "type live", "remove it"),
    (
        [partner("type: live, generating_args: {temperature: 0}")],
        *(f"{PLACE}.generating_args", "unread", "type live", "remove it"),
    ),
    (
        [partner(f"{SERVED}, generating_args: {{num_return_sequences: 4}}")],
        *(f"{PLACE}.generating_args.num_return_sequences", "not_supported", "4", "remove it"),
    ),
    (
        [partner(f"{SERVED}, generating_args: {{seeded: true}}")],
        *(f"{PLACE}.generating_args.seeded", "unread", "actor_infer.generating_args.seeded", "remove it"),
    ),
    (
        [partner(f"{ENGINE}, model_args: {{model_name_or_path: model, lora_target: all-linear}}")],
        *(f"{PLACE}.model_args.lora_target", "not_supported", "all-linear", "remove"),
    ),
    (
        [partner("type: live", ", agent: {command: ['true']}")],
        *("environments.calculator.partners", "exclusive", "an agent", "remove agent"),
    ),
    (
        ["+environments={calculator: {rows: 10, scored: last_turn}}"],
        *("environments.calculator.scored", "owner_missing", "no rewards.calculator", "add rewards.calculator"),
    ),
    (
        critique("environment: critique"),
        *("environments.calculator.partners.critic", "missing", "'critic'", "add it"),
    ),
    (
        [f"+environments={{calculator: {{{CRITIQUE}}}}}"],
        *("environments.calculator", "missing", "no reward of its own", "add rewards.calculator"),
    ),
    (
        critique(f"{CRITIQUE}, max_turns: 1"),
        *("environments.calculator.max_turns", "too_small", "1 critiques", "at least 2"),
    ),
    (
        critique(f"{CRITIQUE}, max_turns: 3, environment_args: {{critiques: 3}}"),
        *("environments.calculator.max_turns", "too_small", "3 critiques", "at least 4"),
    ),
]


@pytest.mark.parametrize(
    ("overrides", "place", "code", "value", "remedy"), CASES, ids=[f"{case[2]} {case[1][24:]}" for case in CASES]
)
def test_it_is_refused(
    faults_of: Callable[..., tuple[Fault, ...]],
    overrides: list[str],
    place: str,
    code: FaultCode,
    value: str,
    remedy: str,
) -> None:
    faults = faults_of(*overrides)
    assert_fault(faults, place, code, value, remedy)
    assert "hush" not in str(faults)


@pytest.mark.parametrize(
    "overrides",
    [
        [partner("type: live")],
        [partner(API)],
        [partner(SERVED)],
        [partner(f"{SERVED}, world_size: 2, template: chatml, generating_args: {{max_new_tokens: 8}}")],
        critique(f"{CRITIQUE}, max_turns: 2"),
        critique("rows: 4, scored: last_turn"),
    ],
)
def test_it_is_taken(judged: Callable[..., str | None], overrides: list[str]) -> None:
    assert judged(*overrides) is None
