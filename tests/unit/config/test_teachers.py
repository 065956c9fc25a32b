"""Teachers by domain in the configuration: refused settings, their roles, and turns on shared devices."""

from __future__ import annotations

from typing import Any

import pytest

from roll.config.derived.fixed_roles import taught_domains
from roll.config.derived.placement import model_roles
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import ConfigError, FaultCode
from tests.unit.config.test_examples import planned

FULL = ("algorithms/on_policy_distillation_full", "~teacher", "+distill_top_k=8", "+rewards.words.reward=no_reward")
STRATEGY = (
    "model_args: {dtype: fp32}, strategy_args: {strategy_name: hf_infer}, world_size: 1, max_tokens_per_microbatch: "
    "4096"
)


def teacher(name: str, domains: str) -> str:
    return f"+teachers.{name}={{domains: {domains}, {STRATEGY}}}"


BOTH = (teacher("exact", "[arithmetic]"), teacher("kind", "[words]"))
ADAPTED = BOTH[1].replace("fp32", "fp32, lora_target: all-linear, lora_rank: 4")


def test_each_teacher_is_a_role_of_its_own() -> None:
    config, plan = planned(*FULL, *BOTH)[:2]
    assert isinstance(config, RlvrConfig)
    assert [name for name in model_roles(config) if "teacher" in name] == ["teachers.exact", "teachers.kind"]
    assert {"teachers.exact", "teachers.kind"} <= set(plan.roles)
    assert taught_domains(config) == {"teachers.exact": ("arithmetic",), "teachers.kind": ("words",)}


@pytest.mark.parametrize(
    ("words", "place", "code", "said", "remedy"),
    [
        (BOTH[:1], "teachers", "missing", " words", "teacher's domains"),
        (
            (BOTH[0], teacher("kind", "[poems, words]")),
            "teachers.kind.domains[0]",
            "unknown_name",
            "'poems'",
            "use one of: arithmetic, words",
        ),
        (
            (BOTH[0], teacher("kind", "[words, arithmetic]")),
            "teachers.kind.domains[1]",
            "duplicate",
            "'arithmetic' already has a teacher, teachers.exact",
            "once",
        ),
        ((*BOTH, "~distill_top_k"), "distill_top_k", "missing", "teachers", "64 is usual"),
        ((*BOTH, f"+teacher={{{STRATEGY}}}"), "teachers", "exclusive", "teacher", "remove one"),
        ((BOTH[0], teacher("kind", "[]")), "teachers.kind.domains", "too_small", "[]", ""),
        ((BOTH[0], ADAPTED), "teachers.kind.model_args.lora_target", "not_supported", "teachers.kind", "remove it"),
    ],
)
def test_domain_without_exactly_one_teacher_is_refused(
    words: tuple[str, ...], place: str, code: FaultCode, said: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(*FULL, *words)
    [fault] = [fault for fault in refused.value.faults if fault.place == place]
    assert fault.code == code and said in fault.problem and remedy in fault.remedy


def test_teachers_on_engine_devices_are_time_shared() -> None:
    devices: dict[str, Any] = {"actor_train": "[0]", "actor_infer": "[0]"}
    words = [f"++{name}.device_mapping={own}" for name, own in devices.items()] + [
        f"~{name}.world_size" for name in devices
    ]
    words += [one.replace("world_size: 1", "device_mapping: [0]") for one in BOTH]
    words += ["actor_train.training_args.per_device_train_batch_size=256", "weight_sync.lora=merged"]
    plan = planned(*FULL, *words)[1]
    sharing = {"actor_train", "actor_infer", "teachers.exact", "teachers.kind"}
    assert {name: others | {name} for name, others in plan.turns.items()} == dict.fromkeys(sharing, sharing)
