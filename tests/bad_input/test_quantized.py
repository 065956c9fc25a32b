"""Settings that do not combine with `quantized_base`: place, value and remedy."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec as found_spec
from typing import Any

import pytest

from roll.config.load import on_disk
from roll.errors import Fault, FaultCode
from tests.faults import assert_fault

KEY = "actor_train.model_args.quantized_base"
TENSOR = "tensor_parallel.autotp_size"
STAGE = "deepspeed_zero3.zero_optimization.stage"
SOUND = [
    "+actor_train.model_args.lora_target=all-linear",
    f"+{KEY}=nf4",
    f"{STAGE}=2",
    "+weight_sync.lora=merged",
]
CASES: list[tuple[list[str], str, FaultCode, str, str]] = [
    ([f"{STAGE}=3"], KEY, "not_supported", "nf4, but weights are rounded whole", "stage 0, 1 or 2"),
    ([f"+deepspeed_zero3.{TENSOR}=2", "+actor_train.world_size=2"], KEY, "not_supported", "AutoTP", "one of the two"),
    (["+actor_train.model_args.use_dora=true"], KEY, "not_supported", "use_dora is true", "one of the two"),
    (["+actor_train.model_args.init_lora_weights=pissa"], KEY, "not_supported", "is pissa", "one of the two"),
    (["weight_sync.lora=adapter"], "weight_sync.lora", "not_supported", "weights before rounding", "merged"),
    (
        ["+reference.strategy_args.strategy_name=hf_infer", "+use_kl_loss=true"],
        "reference",
        "contradiction",
        "would not start at 0",
        "adapter off",
    ),
    (["~actor_train.model_args.lora_target"], KEY, "owner_missing", "lora_target", "all-linear"),
    ([f"{KEY}=fp4"], KEY, "not_allowed", "fp4", "nf4"),
    (["+actor_infer.model_args.quantized_base=nf4_double"], "actor_infer.model_args.quantized_base", "contradiction",
     "'nf4_double'", "equal"),
]  # fmt: skip


def test_sound_settings_have_no_fault(faults_of: Callable[..., tuple[Fault, ...]]) -> None:
    assert faults_of(*SOUND) == ()


@pytest.mark.parametrize(
    ("mistake", "place", "code", "problem", "remedy"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_mistakes_are_refused_by_name(
    faults_of: Callable[..., tuple[Fault, ...]],
    mistake: list[str],
    place: str,
    code: FaultCode,
    problem: str,
    remedy: str,
) -> None:
    assert_fault(faults_of(*SOUND, *mistake), place, code, problem, remedy)


def test_missing_package_is_refused(
    faults_of: Callable[..., tuple[Fault, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(name: str, *more: Any) -> Any:
        return None if name == "bitsandbytes" else found_spec(name, *more)

    monkeypatch.setattr(on_disk, "find_spec", without)
    assert_fault(faults_of(*SOUND), KEY, "not_installed", "bitsandbytes is not installed", "roll[bitsandbytes]")
