"""What is refused of DeepSpeed's configuration and of the optimizer's keys: exit status 2, place, value and remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

TRAIN = "actor_train.training_args"
DEEPSPEED = "deepspeed_zero3"
ZERO = f"{DEEPSPEED}.zero_optimization"

CASES = [
    ([f"{DEEPSPEED}.bf16.check_grad_overflow=false"], "strategy_config.bf16.check_grad_overflow", "false", "remove it"),
    ([f"{ZERO}.compute_grad_norm=false"], "zero_optimization.compute_grad_norm", "false", "remove it"),
    ([f"{TRAIN}.max_consecutive_skips=-1"], f"{TRAIN}.max_consecutive_skips", "-1", "at least 0"),
]


@pytest.mark.parametrize(("overrides", "place", "value", "remedy"), CASES, ids=[" ".join(case[0])[:70] for case in CASES])
def test_a_bad_override_is_refused(refused: Callable[..., str], overrides: list[str], place: str, value: str, remedy: str) -> None:
    message = refused(*overrides)
    faults = message.split("\n  ")
    said = [index for index, line in enumerate(faults) if f"{place}:" in line]
    assert said, message
    fault = "\n".join(faults[said[0] : said[0] + 2])
    assert value in fault, message
    assert remedy in fault, message
