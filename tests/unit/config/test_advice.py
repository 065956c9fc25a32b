"""What a plan says to help with a choice, compared with hand calculations and with measured steps."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from omegaconf import DictConfig

from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.plan.advice import LEFT_OUT, advice_lines, cache_room, host_lines
from roll.config.plan.phases import misfits
from roll.config.plan.plan import Plan, make_plan
from roll.config.plan.show import plan_text
from roll.config.plan.speed import generation_seconds, speed_lines, training_seconds
from roll.config.plan.sync import LARGEST_BUCKET_MIB, MESSAGE_SECONDS, sync_estimate, sync_lines
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import ConfigError
from roll.system import gpus
from roll.system.sizes import GIB
from tests.faults import coded

GRPO_8B = (
    "rlvr_zero3", "pretrain=Qwen/Qwen3-8B", "gpu_memory_gib=79", "prompt_length=2048", "response_length=8192",
    "rollout_batch_size=128", "num_return_sequences_in_group=8",
    "actor_infer.strategy_args.strategy_config.gpu_memory_utilization=0.85",
    "actor_infer.strategy_args.strategy_config.max_model_len=null",
)  # fmt: skip
MEASURED = ("gsm8k_rlvr", "gpu_name=H200", "gpu_memory_gib=141", "prompt_length=128", "num_gpus_per_node=4")


@pytest.fixture(autouse=True)
def _no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "GPUS", tmp_path)


def planned(*words: str) -> tuple[RlvrConfig, Plan]:
    jobs: list[tuple[RlvrConfig, Plan]] = []

    def check(composed: DictConfig, presets: set[str]) -> None:
        config = checked_config(composed, presets)
        assert isinstance(config, RlvrConfig)
        jobs.append((config, make_plan(config)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compose(["--config-name", *words, "dry_run=true"], check)
    return jobs[0]


def test_room_of_the_kv_cache_by_hand() -> None:
    """Qwen3-8B: 8,190,735,360 parameters of 2 bytes; keys and values of 36 layers, 8 heads of 128, 2 bytes each."""
    config, plan = planned(*GRPO_8B)
    memory = plan.memory["actor_infer"]
    left, token = 0.85 * 79 * 2**30 - 2 * 8_190_735_360, 2 * 36 * 8 * 128 * 2
    room = cache_room(memory, 10_240, 79 * GIB)
    assert room.tokens == int(left / token)
    assert room.sequences == int(left / token / 10_240) == 36
    (line,) = [line for line in advice_lines(config, plan) if line.startswith("KV cache")]
    engines = plan.roles["actor_infer"].ranks
    assert f"36 sequences of 10,240; {-(-1024 // engines)} are assigned" in line
    assert "some would wait" in line


def test_suggested_utilization_holds_all_sequences() -> None:
    config, plan = planned("gsm8k_rlvr")
    (line,) = [line for line in advice_lines(config, plan) if line.startswith("KV cache")]
    found = re.search(r"512 are assigned .* gpu_memory_utilization ([\d.]+) is enough", line)
    assert found
    _, tight = planned("gsm8k_rlvr", f"actor_infer.strategy_args.strategy_config.gpu_memory_utilization={found[1]}")
    memory = tight.memory["actor_infer"]
    assert 24 * GIB * float(found[1]) >= 512 * memory.device["kv_cache"] + memory.device["weights"] + LEFT_OUT
    assert cache_room(memory, 1024, 24 * GIB).sequences >= 512


def test_larger_micro_batch_fits_and_no_more() -> None:
    words = ("gsm8k_rlvr", "rollout_batch_size=256")
    config, plan = planned(*words)
    (line,) = [line for line in advice_lines(config, plan) if line.startswith("Micro-batch of actor_train")]
    found = re.search(r"16,384 tokens; about ([\d,]+) would fit", line)
    assert found
    tokens = int(found[1].replace(",", ""))
    _, larger = planned(*words, f"actor_train.max_tokens_per_microbatch={tokens}")
    assert not misfits(larger, 24 * GIB - LEFT_OUT)
    _, too_large = planned(*words, f"actor_train.max_tokens_per_microbatch={tokens + 2048}")
    assert misfits(too_large, 24 * GIB - LEFT_OUT)


def test_micro_batch_is_no_larger_than_an_update() -> None:
    config, plan = planned("gsm8k_rlvr", "updates_per_step=16")
    (line,) = [line for line in advice_lines(config, plan) if line.startswith("Micro-batch of actor_train")]
    assert "about 32,768, a replica" in line


def test_host_memory_is_summed_for_each_node() -> None:
    config, plan = planned("rlvr_72b_lora_zero3_2nodes")
    (line,) = host_lines(config, plan)
    total = 8 * plan.memory["actor_train"].host + plan.memory["actor_infer"].host
    assert line.startswith("Host memory of node 0-1:")
    assert f"{total / GIB:.1f} GiB" in line


@pytest.mark.parametrize(
    ("words", "training", "generation"),
    # Seconds of 64 x 8 responses of 512 tokens on H200s, from docs/performance.md.
    [
        (("pretrain=Qwen/Qwen2.5-0.5B", "response_length=512"), 2.41, 4.00),
        (("pretrain=Qwen/Qwen2.5-1.5B", "response_length=512"), 6.24, 4.03),
        (
            ("pretrain=Qwen/Qwen2.5-7B", "response_length=512", "actor_train.model_args.lora_target=all-linear"),
            19.38,
            11.62,
        ),
        (
            (
                "pretrain=Qwen/Qwen2.5-7B",
                "response_length=512",
                "actor_train.device_mapping=[0,1,2,3]",
                "actor_infer.device_mapping=[0,1,2,3]",
            ),
            7.28,
            3.39,
        ),
    ],
)
def test_estimated_times_are_near_measured_ones(words: tuple[str, ...], training: float, generation: float) -> None:
    config, plan = planned(*MEASURED, *words)
    assert plan.gpu
    shape = plan.shapes["actor_train"]
    found = training_seconds(config, plan, shape, config.actor_train, plan.gpu)
    assert found == pytest.approx(training, rel=0.25)
    assert generation_seconds(config, plan, shape, plan.gpu) == pytest.approx(generation, rel=0.3)


def test_training_time_by_hand() -> None:
    """Qwen2.5-7B has 7,615,616,512 parameters; a token attends in 28 layers with 28 heads of 128."""
    config, plan = planned(*MEASURED, "pretrain=Qwen/Qwen2.5-7B", "response_length=512")
    assert plan.gpu
    products, pairs = 6 * 7_615_616_512 * 512 * 640, 3 * 4 * 28 * 28 * 128 * 512 * 640**2 / 2
    found = training_seconds(config, plan, plan.shapes["actor_train"], config.actor_train, plan.gpu)
    assert found == pytest.approx((products + pairs) / (0.45 * 989e12))


def test_waiting_sequences_are_generated_after_others() -> None:
    config, plan = planned(*GRPO_8B, "gpu_name=H100")
    wide, ample = planned(*GRPO_8B, "gpu_name=H100", "gpu_memory_gib=500")
    assert plan.gpu and ample.gpu
    slow = generation_seconds(config, plan, plan.shapes["actor_infer"], plan.gpu)
    assert slow > generation_seconds(wide, ample, ample.shapes["actor_infer"], ample.gpu)


def test_unknown_gpus_have_no_estimate_of_time(tmp_path: Path) -> None:
    config, plan = planned("gsm8k_rlvr")
    assert speed_lines(config, plan) == []
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   1\n")
    config, plan = planned("gsm8k_rlvr")
    assert speed_lines(config, plan)[0].startswith("Roughly, on H100 ")
    assert "MFU" in plan_text(config, plan)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "information").write_text("Model: \t\t NVIDIA L4\n")
    assert speed_lines(*planned("gsm8k_rlvr")) == []


HUGE = (
    "rlvr_zero3", "gpu_name=H200", "gpu_memory_gib=141", "num_gpus_per_node=8",
    'actor_train.device_mapping="list(range(0,2048))"', 'actor_infer.device_mapping="list(range(2048,4096))"',
    "actor_infer.strategy_args.strategy_config.tensor_parallel_size=8",
    "actor_infer.strategy_args.strategy_config.max_model_len=null", "rollout_batch_size=16384",
    "num_return_sequences_in_group=8",
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "parameters"),
    [("meta-llama/Llama-3.1-405B", 405_853_388_800), ("Qwen/Qwen3-Coder-480B-A35B-Instruct", 480_154_875_392)],
)
def test_messages_of_a_sync_by_hand(model: str, parameters: int) -> None:
    config, plan = planned(*HUGE, f"pretrain={model}")
    found = sync_estimate(config, plan, 512)
    assert found and found.nbytes == 2 * parameters
    assert found.buckets == -(-2 * parameters // 2**29)
    assert found.messages == found.buckets * (2048 + 256)
    assert found.call_seconds == pytest.approx(MESSAGE_SECONDS * found.messages)
    (line,) = sync_lines(config, plan)
    assert f"{found.messages:,} messages" in line and f"bucket_mib {LARGEST_BUCKET_MIB}" in line


def test_sync_of_small_run_needs_no_advice() -> None:
    (line,) = sync_lines(*planned(*MEASURED, "pretrain=Qwen/Qwen2.5-7B"))
    assert "29 buckets" in line and "bucket_mib" not in line
    assert (
        sync_lines(*planned(*MEASURED, "pretrain=Qwen/Qwen2.5-7B", "actor_train.model_args.lora_target=all-linear"))
        == []
    )


def test_routes_of_a_step_by_hand() -> None:
    """48 layers with 8 experts per token of 2 bytes each; 1024 sequences of 10,240 tokens."""
    config, plan = planned(*GRPO_8B, "pretrain=Qwen/Qwen3-30B-A3B", "+router_replay=true")
    (line,) = [line for line in advice_lines(config, plan) if line.startswith("Routes")]
    assert " 768 bytes" in line and " 7.5 GiB" in line
    assert not [line for line in advice_lines(*planned(*GRPO_8B)) if line.startswith("Routes")]


def test_cpu_has_no_advice() -> None:
    words = ("gpu_name=H100", "actor_train.device_mapping=null", "actor_infer.device_mapping=null")
    config, plan = planned("gsm8k_rlvr", *words)
    assert plan.memory
    assert [*advice_lines(config, plan), *speed_lines(config, plan)] == []


def test_unknown_name_of_a_gpu_is_a_fault() -> None:
    with pytest.raises(ConfigError) as caught:
        planned("gsm8k_rlvr", "gpu_name=H10")
    assert coded(caught.value.faults) == [("unknown_name", "gpu_name")]
    assert "'H100'" in caught.value.faults[0].problem
