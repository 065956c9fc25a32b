"""Learning from feedback in the configuration: refused settings, with place, code, value and remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from roll.errors import Fault, FaultCode
from tests.bad_input.test_contradictions import ONE, TEACHER
from tests.faults import assert_fault

OWN = "self_distillation"
LORA = "actor_train.model_args.lora_target=all-linear"
REFERENCE = "+reference={model_args: {}, strategy_args: {strategy_name: hf_infer}}"


def taught(keys: str = "sees: [success]") -> str:
    return f"+{OWN}={{prompt_length: 32, {keys}}}"


WORLD = "+environments={calculator: {rows: 4, max_turns: 2, world_size: 1}}"
FAULTS: list[tuple[list[str], str, FaultCode, str, str]] = [
    ([taught("sees: []")], f"{OWN}.sees", "too_small", "[]", ""),
    ([taught("sees: [answer]")], f"{OWN}.sees[0]", "not_allowed", "answer", "success"),
    ([taught("sees: [success, success]")], f"{OWN}.sees[1]", "duplicate", "'success'", "once"),
    ([taught("sees: [success], weight: 0")], f"{OWN}.weight", "out_of_range", "0", "above 0"),
    ([taught("sees: [success], weight: 1.5")], f"{OWN}.weight", "out_of_range", "1.5", "at most 1"),
    ([taught("sees: [success], teacher: old")], f"{OWN}.teacher", "not_allowed", "old", "frozen"),
    ([taught("sees: [success], solution_column: proof")], f"{OWN}.solution_column", "unread", "'proof'", "solution"),
    (
        [taught('sees: [success], feedback_template: "{feedback}"')],
        "feedback_template",
        "unread",
        "{feedback}",
        "remove",
    ),
    (
        [taught('sees: [success], template: "{hints}"')],
        f"{OWN}.template",
        "missing",
        "{prompt}",
        "{prompt} and {hints}",
    ),
    ([taught('sees: [success], template: "{prompt}{hints}{x}"')], f"{OWN}.template", "unknown_name", "{x}", "doubled"),
    ([taught('sees: [success], template: "{prompt}{hints}{"')], f"{OWN}.template", "malformed", "{", "doubled"),
    ([taught('sees: [success], template: "{prompt!r}{hints}"')], f"{OWN}.template", "malformed", "format", "{prompt}"),
    ([taught('sees: [success], success_template: "so"')], f"{OWN}.success_template", "missing", "{success}", "write"),
    ([taught(), *ONE], "num_return_sequences_in_group", "no_effect", "success", "at least 2"),
    ([taught("sees: [success], teacher: frozen")], "reference", "missing", "frozen", "teacher=live"),
    ([taught("sees: [success], prompt_length: 60")], f"{OWN}.prompt_length", "too_large", "68 tokens", "within 64"),
    ([taught(), TEACHER], "teacher", "exclusive", OWN, "remove one"),
    ([taught(), "replay_from=kept"], "replay_from", "not_supported", "'kept'", "remove one"),
    ([taught(), "router_replay=true"], "router_replay", "not_supported", OWN, "remove one"),
    ([taught(), WORLD], "environments.calculator", "not_supported", "several turns", "a domain of rewards"),
    ([taught(), "policy_loss=gmpo"], "policy_loss", "contradiction", OWN, "ppo"),
    ([taught("sees: [solution], weight: 0.5"), *ONE, "adv_estimator=grpo"], "in_group", "no_effect", "grpo", "2"),
]


@pytest.mark.parametrize(("words", "place", "code", "value", "remedy"), FAULTS, ids=lambda one: str(one)[:60])
def test_refused_with_place_value_and_remedy(
    words: list[str], place: str, code: FaultCode, value: str, remedy: str, faults_of: Callable[..., tuple[Fault, ...]]
) -> None:
    words = [word.replace("prompt_length: 32, ", "") if word.count("prompt_length") > 1 else word for word in words]
    assert_fault(faults_of(*words), place, code, value, remedy)


@pytest.mark.parametrize(
    "words",
    [
        [taught()],
        [taught("sees: [solution]"), *ONE, "adv_estimator=grpo"],
        [taught("sees: [success], teacher: frozen"), LORA],
        [taught("sees: [success], teacher: frozen"), REFERENCE],
        [taught('sees: [solution, feedback, success], template: "{{}} {hints} {prompt}"')],
    ],
    ids=str,
)
def test_learning_from_feedback_is_accepted(words: list[str], faults_of: Callable[..., tuple[Fault, ...]]) -> None:
    assert faults_of(*words) == ()
