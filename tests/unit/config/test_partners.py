"""Partners of environments: their placement, their context, and what the plan and the record of a run say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.config.checks.partners import partner_faults
from roll.config.derived.domains import answers_after_tools, scores_last_turn
from roll.config.derived.fixed_roles import all_partners, api_key_variables, partner_context, partner_roles
from roll.config.derived.placement import is_trainer_side, judging_roles, model_roles, started_roles
from roll.config.load.env_file import secrets_of
from roll.config.plan.phases import phases
from roll.config.plan.plan import Plan, make_plan
from roll.config.plan.show import arithmetic_lines
from roll.config.roll_v2.translate import translate
from roll.config.schema.environments import EnvironmentConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import JudgeConfig
from roll.config.schema.secrets import redacted
from roll.errors import ConfigError
from tests.faults import coded
from tests.unit.config.small_shape import write_shape

ZERO = {"strategy_name": "deepspeed_train", "strategy_config": {"zero_optimization": {"stage": 3}}}
SERVED = {
    "type": "inference",
    "model_args": {"model_name_or_path": "some/rival"},
    "strategy_args": {"strategy_name": "vllm"},
    "device_mapping": [4, 5],
}
API = {"type": "api", "api_url": "http://localhost:8000/v1", "model_name": "rival-7b"}
PLACE = "environments.chess.partners.rival"


def experiment(partner: dict[str, Any], section: dict[str, Any] | None = None, **keys: Any) -> RlvrConfig:
    """Return a configuration whose environment has this partner, with the policy on devices 0 to 3."""
    values: dict[str, Any] = {
        "exp_name": "e",
        "output_dir": "o",
        "pretrain": "nobody/none",
        "max_steps": 1,
        "dry_run": True,
        "sequence_length": 4096,
        "num_return_sequences_in_group": 8,
        "actor_train": {"strategy_args": ZERO, "device_mapping": list(range(4))},
        "actor_infer": {"strategy_args": {"strategy_name": "vllm"}, "device_mapping": list(range(4))},
        "environments": {
            "chess": {"environment": "a:B", "rows": 9, "partners": {"rival": partner}, **(section or {})},
        },
    }
    return RlvrConfig.model_validate_json(json.dumps(values | keys), strict=True)


def plan_of(partner: dict[str, Any], **keys: Any) -> Plan:
    return make_plan(experiment(partner, **keys))


def test_a_served_partner_is_a_role_with_devices() -> None:
    config = experiment(SERVED)
    assert isinstance(partner_roles(config)[PLACE], JudgeConfig) and PLACE in model_roles(config)
    assert not is_trainer_side(PLACE) and not judging_roles([PLACE])
    plan = make_plan(config)
    assert plan.roles[PLACE].devices == ((4,), (5,)) and plan.roles[PLACE].strategy == "vllm"
    assert PLACE not in plan.turns and plan.devices == tuple(range(6))


def test_a_partner_behind_a_url_is_one_process() -> None:
    config = experiment(API)
    assert not partner_roles(config)
    role = make_plan(config).roles[PLACE]
    assert (role.strategy, role.ranks, role.on_cpu) == ("partner", 1, True)


def test_the_policy_itself_needs_no_process() -> None:
    config = experiment({"type": "live"})
    assert all_partners(config).keys() == {PLACE} and PLACE not in make_plan(config).roles


def test_a_replay_starts_no_partner() -> None:
    for partner in (SERVED, API):
        config = experiment(partner, replay_from="kept")
        assert PLACE not in started_roles(config) and PLACE not in make_plan(config).roles


@pytest.mark.parametrize(
    ("partner", "said"),
    [
        (SERVED, "rival (a fixed model)"),
        (API, "rival (rival-7b at http://localhost:8000/v1)"),
        ({"type": "live"}, "rival (the policy"),
    ],
)
def test_the_plan_says_who_answers(partner: dict[str, Any], said: str) -> None:
    config = experiment(partner)
    [line] = [one for one in arithmetic_lines(config, make_plan(config)) if one.startswith("Environment chess")]
    assert f"partners: {said}" in line


def test_its_memory_is_planned(tmp_path: Path) -> None:
    write_shape(tmp_path)
    plan = plan_of({**SERVED, "model_args": {"model_name_or_path": str(tmp_path)}})
    assert plan.memory[PLACE].device["weights"] > 0
    [phase] = phases(plan, 4)
    assert phase.held == plan.memory[PLACE].device_total


def test_context_has_room_for_episode_and_turn() -> None:
    config = experiment({**SERVED, "generating_args": {"max_new_tokens": 10}})
    [(_, _, partner)] = all_partners(config).values()
    assert partner_context(config, partner, None) == 4096 + 1024 + 10
    assert partner_context(config, partner, 64) == 64


def test_devices_of_others_are_refused_unless_all_stay() -> None:
    shared = {**SERVED, "device_mapping": [3]}
    assert coded(partner_faults(experiment(shared))) == [("contradiction", f"{PLACE}.device_mapping")]
    assert not list(partner_faults(experiment(shared, time_sharing=False)))
    assert not list(partner_faults(experiment({**SERVED, "device_mapping": None})))


def test_devices_are_checked_as_a_roles_are() -> None:
    with pytest.raises(ConfigError) as error:
        plan_of({**SERVED, "device_mapping": [4, 4]})
    assert coded(error.value.faults) == [("duplicate", f"{PLACE}.device_mapping")]


def test_key_of_an_api_is_read_and_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    keyed = {**API, "api_key_variable": "RIVAL_KEY"}
    monkeypatch.delenv("RIVAL_KEY", raising=False)
    [warned] = [text for text in plan_of(keyed).warnings if "RIVAL_KEY" in text]
    assert warned.startswith(f"{PLACE}.api_key_variable: ")
    monkeypatch.setenv("RIVAL_KEY", "hush-hush")
    config = experiment(keyed)
    assert api_key_variables(config) == {f"{PLACE}.api_key_variable": "RIVAL_KEY"}
    assert not [text for text in make_plan(config).warnings if "RIVAL_KEY" in text]
    assert secrets_of(config, {}).hide("it is hush-hush") == "it is ***"
    record = redacted(config.model_dump(mode="json"))
    assert record["environments"]["chess"]["partners"]["rival"]["api_key_variable"] == "RIVAL_KEY"


@pytest.mark.parametrize("partner", [SERVED, API, {"type": "live"}])
def test_a_resolved_configuration_says_the_same(partner: dict[str, Any]) -> None:
    config = experiment(partner)
    done = translate(config.model_dump(mode="json"), "")
    assert not done.warnings and not done.faults
    again = RlvrConfig.model_validate_json(json.dumps(done.values), strict=True)
    assert again == config and not list(partner_faults(again))


def test_last_turn_is_scored_after_critiques_and_tools() -> None:
    with_tools = EnvironmentConfig.model_validate({"tools": ("json:dumps",)})
    assert scores_last_turn("towns", with_tools) and answers_after_tools("towns", with_tools)
    assert not scores_last_turn("calculator", with_tools)
    agent = EnvironmentConfig.model_validate({"agent": {"command": ("true",)}})
    assert not scores_last_turn("towns", agent) and not answers_after_tools("towns", agent)
    assert scores_last_turn("critique", EnvironmentConfig.model_validate({}))
    assert not scores_last_turn("critique", EnvironmentConfig.model_validate({"scored": "all_turns"}))
    assert not scores_last_turn("calculator", EnvironmentConfig.model_validate({}))
    assert scores_last_turn("calculator", EnvironmentConfig.model_validate({"scored": "last_turn"}))
