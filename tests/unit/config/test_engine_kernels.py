"""The key `engine_kernels`, which needs an engine with the same kernels, and vLLM's key `compile_model`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roll.backend import Rank
from roll.config.checks.engine_kernels import engine_kernel_faults
from roll.config.derived.model_shape import ModelShape, VisionShape, shape_of
from roll.config.plan.plan import make_plan
from roll.config.schema.model import ModelConfig
from roll.config.schema.offline import DpoConfig, SftConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.engines.vllm.settings import VllmConfig, VllmSettings
from roll.errors import ConfigError, FaultCode
from tests import limits
from tests.faults import coded
from tests.unit.config.small_shape import SHAPE, write_shape
from tests.unit.config.test_model_rewards import INFERENCE, ZERO, experiment

KEYS = {"engine_kernels": True}
PLACE = "actor_train.model_args.engine_kernels"
PLAIN: dict[str, Any] = {"batch_invariant": True, "compile_model": False}
"""Settings of an engine with the same kernels."""
DATA = {"data_args": {"file_name": "x", "prompt": "p"}}
GPUS = {"device_mapping": range(4)}
SCORING = {"strategy_args": {"strategy_name": "hf_infer"}}
TOWER = VisionShape("qwen3_vl", 8, 8, 1, tower=8, projector=8, patches_per_token=4, patch_values=4)


def engine(name: str = "vllm", dtype: str = "bf16", **keys: Any) -> dict[str, Any]:
    """Return the role `actor_infer`."""
    return {"strategy_args": {"strategy_name": name, "strategy_config": keys}, "model_args": {"dtype": dtype}, **GPUS}


def trainer(block: Any = (), **keys: Any) -> dict[str, Any]:
    """Return the role `actor_train` with the key, further settings of DeepSpeed and further keys of `model_args`."""
    strategy = {**ZERO, "strategy_config": {"zero_optimization": {"stage": 1}, **dict(block)}}
    return {"strategy_args": strategy, "model_args": KEYS | keys, **DATA, **GPUS}


def rlvr(**roles: Any) -> RlvrConfig:
    """Return a configuration with these roles, and with the right trainer and engine if they are not given."""
    return experiment(
        {"world_size": 1}, "math_rule", **({"actor_train": trainer(), "actor_infer": engine(**PLAIN)} | roles)
    )


def shape(**changed: Any) -> ModelShape:
    found = shape_of(SHAPE | changed)
    assert found
    return found


def assert_refused(
    config: Config, part: str, place: str = PLACE, code: FaultCode = "not_supported", **shapes: ModelShape
) -> None:
    """Assert that the configuration has one fault, and that its problem says `part`."""
    faults = engine_kernel_faults(config, shapes)
    assert coded(faults) == [(code, place)], faults
    assert part in faults[0].problem


def test_without_the_key_nothing_is_checked() -> None:
    others = trainer(engine_kernels=False, liger=True, dtype="fp32")
    config = rlvr(actor_train=others, actor_infer=engine("hf_infer"), reference=SCORING)
    assert engine_kernel_faults(config, {"actor_train": shape(hidden_act="gelu")}) == []


@pytest.mark.parametrize(
    ("part", "block", "keys"),
    [
        ("lora_target is given", {}, {"lora_target": "all-linear"}),
        ("liger", {}, {"liger": True}),
        ("attn_implementation is fa2", {}, {"attn_implementation": "fa2"}),
        ("compile_layers is true", {}, {"compile_layers": True}),
        ("sequence_parallel_size", {"sequence_parallel_size": 2}, {}),
        ("autotp_size", {"tensor_parallel": {"autotp_size": 2}}, {}),
        ("ZeRO-3", {"zero_optimization": {"stage": 3}}, {}),
    ],
)
def test_other_settings_are_refused(part: str, block: dict[str, Any], keys: dict[str, Any]) -> None:
    assert_refused(rlvr(actor_train=trainer(block, **keys)), part)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_dtypes_are_refused(dtype: str) -> None:
    config = rlvr(actor_train=trainer(dtype=dtype), actor_infer=engine(dtype=dtype, **PLAIN))
    assert_refused(config, f"dtype is {dtype}")
    assert_refused(rlvr(actor_infer=engine(dtype=dtype, **PLAIN)), f"computes in {dtype}", code="contradiction")


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    "keys", [{}, {"compile_layers": False}, {"attn_implementation": "sdpa"}, {"gradient_checkpointing": "all"}]
)
def test_the_right_settings_are_accepted(stage: int, keys: dict[str, Any]) -> None:
    config = rlvr(actor_train=trainer({"zero_optimization": {"stage": stage}}, **keys))
    assert engine_kernel_faults(config, {"actor_train": shape()}) == []


@pytest.mark.parametrize(
    ("block", "is_right"),
    [
        (PLAIN, True),
        ({"batch_invariant": True, "enforce_eager": True}, True),
        (PLAIN | {"enforce_eager": True}, True),
        ({}, False),
        ({"batch_invariant": True}, False),
        ({"compile_model": False}, False),
        ({"enforce_eager": True}, False),
        (PLAIN | {"tensor_parallel_size": 2}, False),
        (PLAIN | {"engine_args": {"kv_cache_memory_bytes": 1 << 30}}, True),
        (PLAIN | {"engine_args": {"hf_overrides": {"head_dtype": "float32"}}}, False),
    ],
)
def test_the_engine_must_run_the_same_kernels(block: dict[str, Any], is_right: bool) -> None:
    config = rlvr(actor_infer=engine(**block))
    assert config.actor_infer.strategy_args.traits.runs_plain_kernels is is_right
    if is_right:
        assert engine_kernel_faults(config, {}) == []
    else:
        assert_refused(config, "run other kernels", code="contradiction")


@pytest.mark.parametrize(("name", "block"), [("hf_infer", {}), ("vllm_server", {"base_urls": ["http://h:8000"]})])
def test_other_backends_run_other_kernels(name: str, block: dict[str, Any]) -> None:
    config = rlvr(actor_infer=engine(name, **block))
    assert_refused(config, "run other kernels", code="contradiction")


def test_the_reference_may_have_it_alone() -> None:
    alone = {"actor_train": trainer(engine_kernels=False), "reference": {**SCORING, **GPUS, "model_args": KEYS}}
    assert engine_kernel_faults(rlvr(**alone), {}) == []
    place = PLACE.replace("actor_train", "reference")
    assert_refused(rlvr(**alone, actor_infer=engine()), "run other kernels", place, "contradiction")
    assert_refused(rlvr(**alone), "kernels are not known", place, reference=shape(hidden_act="gelu"))
    alone["reference"]["model_args"] = KEYS | {"liger": True}
    assert_refused(rlvr(**alone), "liger", place)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("critic", {name: block for name, block in trainer().items() if name != "data_args"}),
        ("actor_infer", engine(**PLAIN) | {"model_args": KEYS}),
    ],
)
def test_roles_without_log_probs_are_refused(name: str, role: dict[str, Any]) -> None:
    config = rlvr(**{"actor_train": trainer(engine_kernels=False), name: role})
    assert_refused(config, f"{name} computes no log-probs", f"{name}.model_args.engine_kernels")


def test_a_judge_is_refused() -> None:
    judge = INFERENCE | {"model_args": KEYS | {"model_name_or_path": "some/judge"}, **GPUS}
    config = rlvr(rewards={"llm_judge": judge})
    assert_refused(config, "rewards.llm_judge computes no log-probs", "rewards.llm_judge.model_args.engine_kernels")


def test_without_gpus_it_is_refused() -> None:
    on_cpu = {key: value for key, value in trainer().items() if key != "device_mapping"}
    assert_refused(rlvr(actor_train=on_cpu), "need a GPU")


def offline(pipeline: str, **roles: Any) -> dict[str, Any]:
    values = {"pipeline": pipeline, "exp_name": "e", "output_dir": "o", "pretrain": "nobody/none", **roles}
    return json.loads(json.dumps(values, default=list))


def test_without_an_engine_it_is_refused() -> None:
    sft = SftConfig.model_validate_json(json.dumps(offline("sft", sft_train=trainer())), strict=True)
    assert_refused(sft, "without an engine", PLACE.replace("actor", "sft"))
    roles = {"actor_train": trainer(), "reference": {**SCORING, **GPUS, "model_args": KEYS}}
    dpo = DpoConfig.model_validate_json(json.dumps(offline("dpo", **roles)), strict=True)
    places = [PLACE, PLACE.replace("actor_train", "reference")]
    assert coded(engine_kernel_faults(dpo, {})) == [("not_supported", place) for place in places]


def test_the_model_must_have_known_operations() -> None:
    known, unknown = shape(), shape(model_type="gemma2")
    assert known.has_known_operations and not unknown.has_known_operations
    config = rlvr()
    assert engine_kernel_faults(config, {"actor_train": known, "actor_infer": unknown}) == []
    for one in (unknown, shape(sliding_window=8, use_sliding_window=True), replace(known, vision=TOWER)):
        assert_refused(config, "kernels are not known", actor_train=one)


def test_each_reason_is_a_fault() -> None:
    config = rlvr(actor_train=trainer(liger=True, compile_layers=True, dtype="fp32"), actor_infer=engine())
    codes = [code for code, _ in coded(engine_kernel_faults(config, {"actor_train": shape(hidden_act="gelu")}))]
    assert codes == ["not_supported"] * 4 + ["contradiction"] * 2


def test_the_plan_asks_for_them(tmp_path: Path) -> None:
    write_shape(tmp_path)
    right, wrong = (rlvr(actor_infer=engine(**block), pretrain=str(tmp_path)) for block in (PLAIN, {}))
    assert make_plan(right).shapes["actor_train"].has_known_operations
    with pytest.raises(ConfigError) as caught:
        make_plan(wrong)
    assert coded(caught.value.faults) == [("contradiction", PLACE)]


@pytest.mark.parametrize(
    ("block", "given"),
    [({}, None), ({"compile_model": False}, {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"})],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_an_engine_compiles(block: dict[str, Any], given: Any, device: str) -> None:
    from roll.engines.vllm.strategy import engine_arguments

    settings = VllmSettings(
        "model", ModelConfig.model_validate({}), VllmConfig.model_validate(block), 64, None, 0, False, False
    )
    rank = Rank("actor_infer", 0, 1, "127.0.0.1", 0, device, limits.START)
    assert engine_arguments(settings, rank).get("compilation_config") == given
