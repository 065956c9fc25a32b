"""Settings from guides of DeepSpeed and accelerate are refused with their replacement, or read with a warning."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from roll.config.schema.foreign_names import DEEPSPEED_REFUSED
from roll.pipeline import main

RLVR = ("--config-name", "rlvr_zero3", "dry_run=true")
MODEL = "actor_train.model_args"


def test_refused_deepspeed_keys_say_what_to_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*RLVR, *(f"deepspeed_zero3.{key}=2" for key in DEEPSPEED_REFUSED)]) == 2
    said = capsys.readouterr().err
    place = "actor_train.strategy_args.strategy_config"
    assert [
        key
        for key, (why, use) in DEEPSPEED_REFUSED.items()
        if f"  {place}.{key}: 2, but {why}\n    remove it; {use}\n" not in said
    ] == []


def test_model_names_of_transformers_are_read_with_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RLVR, f"{MODEL}.device_map=auto", f"{MODEL}.attn_implementation=flash_attention_2"]) == 0
    said = capsys.readouterr().err
    assert f'warning: {MODEL}.device_map: "auto" is ignored' in said
    assert f'warning: {MODEL}.attn_implementation: "flash_attention_2" is read as fa2' in said


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_fa2_without_its_package_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    roles = ("actor_train", "reference")
    assert main([*RLVR, *(f"{role}.model_args.attn_implementation=fa2" for role in roles)]) == 0
    [said] = [line for line in capsys.readouterr().err.splitlines() if "fa2" in line]
    assert said.startswith("warning: actor_train, reference: ") and "flash-attn is not installed" in said


def test_every_precision_and_schedule_of_the_guides_plans() -> None:
    for word in ("bf16", "fp16", "fp32"):
        roles = ("actor_train", "actor_infer", "reference")
        assert main([*RLVR, *(f"{role}.model_args.dtype={word}" for role in roles)]) == 0
    for word in ("linear", "cosine", "constant_with_warmup"):
        assert main([*RLVR, f"actor_train.training_args.lr_scheduler_type={word}"]) == 0
