"""Invalid or unsupported keys for mixtures of experts: exit status 2, with place, value and remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll.engines.vllm import checks
from roll.errors import Fault
from tests.faults import assert_fault

KEY = "actor_train.training_args.router_aux_loss_coef"
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("overrides", "place", "value", "remedy"),
    [
        ([f"+{KEY}=0.001"], KEY, "0.001, but the model has no experts", "remove it"),
        ([f"+{KEY}=-1"], KEY, "-1", "at least 0"),
        (
            [f"+{KEY}=0.001", "actor_train.model_args.dtype=fp16"],
            KEY,
            "dtype is fp16",
            "actor_train.model_args.dtype to bf16",
        ),
        (
            [f"+{KEY}=0", "+deepspeed_zero3.sequence_parallel_size=2", "+actor_train.world_size=2"],
            KEY,
            "sequence_parallel_size is 2",
            "set only one of the two",
        ),
    ],
)
def test_the_routers_loss(
    refused: Callable[..., str], overrides: list[str], place: str, value: str, remedy: str
) -> None:
    message = refused(*overrides)
    lines = message.split("\n  ")
    said = ["\n".join(lines[index : index + 2]) for index, line in enumerate(lines) if f"{place}:" in line]
    assert any(value in one and remedy in one for one in said), message


@pytest.fixture
def experts(tiny_model: Path, tmp_path: Path) -> Path:
    """Return a copy of the tiny model's folder whose configuration is that of a mixture of experts."""
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | EXPERTS))
    return tmp_path


def test_adapters_that_the_engine_cannot_take(refused: Callable[..., str], experts: Path) -> None:
    message = refused(
        f"pretrain={experts}", "+actor_train.model_args.lora_target='q_proj,v_proj'", "+weight_sync.lora=adapter"
    )
    assert "weight_sync.lora: adapter, but" in message and "mixture of experts" in message
    assert "set it to merged" in message


def test_dropout_of_an_adapter_on_experts(refused: Callable[..., str], experts: Path) -> None:
    adapter = ["+actor_train.model_args.lora_target=all-linear", "+actor_train.model_args.lora_dropout=0.1"]
    message = refused(f"pretrain={experts}", *adapter)
    assert "actor_train.model_args.lora_dropout: 0.1, but lora_target all-linear" in message
    assert "lora_target to q_proj,k_proj,v_proj,o_proj" in message


@pytest.mark.parametrize("given", ["use_dora=true", "init_lora_weights=pissa_niter_4"])
def test_variant_of_an_adapter_on_experts(given: str, refused: Callable[..., str], experts: Path) -> None:
    message = refused(
        f"pretrain={experts}", "+actor_train.model_args.lora_target=all-linear", f"+actor_train.model_args.{given}"
    )
    key, value = given.split("=")
    assert f"actor_train.model_args.{key}: {value}, but lora_target all-linear adapts experts" in message


def test_experts_are_not_held_in_four_bits(refused: Callable[..., str], experts: Path) -> None:
    adapter = ["+actor_train.model_args.lora_target=q_proj", "+actor_train.model_args.quantized_base=nf4"]
    message = refused(f"pretrain={experts}", *adapter)
    assert "model_args.quantized_base: nf4, but" in message and "has experts" in message


DEEPSPEED = "deepspeed_zero3"
ZERO = f"{DEEPSPEED}.zero_optimization"
BLOCK = "actor_train.strategy_args.strategy_config.expert_parallel"
OVER_RANKS = [f"+{DEEPSPEED}.expert_parallel.autoep_size=2", "+actor_train.world_size=2"]
ON_GPUS = ["+actor_train.device_mapping=[0,1]", "~actor_train.world_size"]
TOGETHER = [
    ([f"{ZERO}.stage=0", "actor_train.model_args.dtype=bf16"], "in bf16 DeepSpeed's stage 0 clips by a norm without"),
    (["+actor_train.model_args.lora_target='q_proj,v_proj'"], "lora_target is q_proj,v_proj: with frozen experts"),
    ([f"+{DEEPSPEED}.tensor_parallel.autotp_size=2"], "tensor_parallel.autotp_size is 2"),
    ([f"+{ZERO}.zero_hpz_partition_size=2"], "zero_hpz_partition_size would share a second copy"),
    ([f"+{ZERO}.zero_quantized_weights=true", *ON_GPUS], "zero_quantized_weights is true"),
    (
        [f"+{ZERO}.offload_optimizer.device=nvme", f"+{ZERO}.offload_optimizer.nvme_path=/tmp"],
        "offload_optimizer.device is nvme",
    ),
    ([f"{ZERO}.stage=2", f"+{ZERO}.reduce_scatter=false"], "reduce_scatter is false"),
    ([f"{ZERO}.stage=1", f"{ZERO}.contiguous_gradients=false"], "contiguous_gradients is false"),
]


@pytest.mark.parametrize(("overrides", "value"), TOGETHER, ids=lambda value: value if isinstance(value, str) else "")
def test_divided_experts_refuse_by_name(
    faults_of: Callable[..., tuple[Fault, ...]], experts: Path, overrides: list[str], value: str
) -> None:
    faults = faults_of(f"pretrain={experts}", *OVER_RANKS, *overrides)
    assert_fault(faults, f"{BLOCK}.autoep_size", "not_supported", value, "set only one of the two")


def test_divided_experts_are_not_compiled(faults_of: Callable[..., tuple[Fault, ...]], experts: Path) -> None:
    faults = faults_of(f"pretrain={experts}", *OVER_RANKS, *ON_GPUS)
    assert_fault(faults, "actor_train.model_args.compile_layers", "not_supported", "auto", "compile_layers=false")


def test_experts_must_fit_model_and_ranks(faults_of: Callable[..., tuple[Fault, ...]], experts: Path) -> None:
    place = f"{BLOCK}.autoep_size"
    assert_fault(faults_of(*OVER_RANKS), place, "no_effect", "the model has no experts", "remove it")
    of_three = [f"pretrain={experts}", f"+{DEEPSPEED}.expert_parallel.autoep_size=3", "+actor_train.world_size=4"]
    faults = faults_of(*of_three)
    assert_fault(faults, place, "not_divisible", "8 experts cannot be divided evenly among 3", "a divisor of 8")
    assert_fault(faults, place, "not_divisible", "actor_train has 4 rank(s)", "a divisor of the ranks")


@pytest.mark.parametrize(
    ("key", "code", "value"),
    [
        ("route_norm=true", "not_supported", "own router"),
        ("autoep_sise=2", "unknown_key", "did you mean 'autoep_size'"),
    ],
)
def test_other_keys_of_autoep_are_refused(
    faults_of: Callable[..., tuple[Fault, ...]], experts: Path, key: str, code: Any, value: str
) -> None:
    faults = faults_of(f"pretrain={experts}", *OVER_RANKS, f"+{DEEPSPEED}.expert_parallel.{key}")
    assert_fault(faults, f"{BLOCK}.{key.partition('=')[0]}", code, value, "autoep_size and enabled")


def test_experts_over_ranks_are_accepted(judged: Callable[..., str | None], experts: Path) -> None:
    said = judged(f"pretrain={experts}", *OVER_RANKS, f"+{DEEPSPEED}.expert_parallel.enabled=true")
    assert "expert_parallel" not in (said or "")


def test_an_engine_that_would_not_follow_the_trainer(refused: Callable[..., str], experts: Path) -> None:
    config = json.loads((experts / "config.json").read_text())
    (experts / "config.json").write_text(json.dumps(config | {"model_type": "gpt_oss"}))
    message = refused(f"pretrain={experts}")
    assert "actor_infer.strategy_args.strategy_name: vllm, but" in message and "gpt-oss" in message
    assert "use hf_infer" in message


REPLAY = "+router_replay=true"
INFER = "actor_infer.strategy_args"


def test_routes_that_cannot_be_replayed(faults_of: Callable[..., tuple[Fault, ...]], experts: Path) -> None:
    assert_fault(faults_of(REPLAY), "router_replay", "no_effect", "the model has no experts", "remove it")
    faults = faults_of(REPLAY, f"{INFER}.strategy_name=hf_infer", f"~{INFER}.strategy_config")
    assert_fault(faults, "router_replay", "not_supported", "hf_infer", f"{INFER}.strategy_name to vllm")
    without = f"+{INFER}.strategy_config.enable_prefix_caching=false"
    faults = faults_of(f"pretrain={experts}", REPLAY, without)
    assert_fault(faults, f"{INFER}.strategy_config.enable_prefix_caching", "exclusive", "router_replay is true", "true")
    config = json.loads((experts / "config.json").read_text())
    (experts / "config.json").write_text(json.dumps(config | {"model_type": "granitemoe", "num_local_experts": 8}))
    faults = faults_of(f"pretrain={experts}", REPLAY)
    assert_fault(faults, "router_replay", "not_supported", "qwen3_moe", "a model of one of these types")


def test_routes_on_the_cpu_need_triton_there(
    faults_of: Callable[..., tuple[Fault, ...]],
    judged: Callable[..., str | None],
    experts: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = faults_of(f"pretrain={experts}", REPLAY)
    assert_fault(faults, "router_replay", "not_installed", "no backend for the CPU", "actor_infer.device_mapping")
    monkeypatch.setattr(checks, "entry_points", lambda **asked: [asked])
    assert "router_replay" not in (judged(f"pretrain={experts}", REPLAY) or "")


def test_router_replay_is_accepted_on_gpus(judged: Callable[..., str | None], experts: Path) -> None:
    said = judged(f"pretrain={experts}", REPLAY, "+actor_infer.device_mapping=[0]")
    assert "router_replay" not in (said or "")
