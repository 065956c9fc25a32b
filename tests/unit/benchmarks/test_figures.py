"""The arithmetic of the step benchmark, against numbers worked out by hand and parameter counts of torch."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.figures import Result
from benchmarks.models import DENSE, SHAPES, build_config
from benchmarks.plain import LogProbs, packed_rows
from benchmarks.reward import letter_share
from benchmarks.work import Work, adapter_parameters, parameters
from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.plan.plan import make_plan
from roll.types import Prompt

CONFIG = Path(__file__).parents[3] / "benchmarks" / "config"
WORK = Work(
    model="model",
    shape=SHAPES["0.5b"],
    dtype="bf16",
    devices=(0,),
    infer_devices=(0,),
    train_ranks=1,
    score_ranks=1,
    prompts=64,
    samples=8,
    prompt_tokens=128,
    response_tokens=512,
    token_budget=20480,
    lora_rank=0,
    sync="adapter",
    behaviour="engine",
    max_num_seqs=512,
    stage=1,
    repetitions=2,
    scratch=".",
)
FLOORS = {"generate": 3.0, "forward": 0.7, "forward_adapter": 0.9, "train": 2.5, "copy": 0.1, "copy_peer": 0.2}


def result(work: Work, **seconds: float) -> Result:
    line = {f"time/{part}": value for part, value in seconds.items()}
    return Result(asdict(work), {}, [{"time/step": 99.0}] * 2 + [line] * 3, FLOORS, warm_up=2)


@pytest.mark.parametrize("shape", DENSE)
def test_parameters_are_those_of_the_model(shape: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(build_config(shape))
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters(SHAPES[shape])
        adapted = get_peft_model(model, LoraConfig(r=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert trained == adapter_parameters(SHAPES[shape], 32)


def test_a_work_survives_its_file(tmp_path: Path) -> None:
    WORK.write(tmp_path / "work.json")
    assert Work.read(tmp_path / "work.json") == WORK


def test_the_kv_cache_holds_every_sequence() -> None:
    token = 2 * 24 * 2 * 64 * 2
    assert 512 * 640 * token < WORK.kv_cache_bytes < 2 * 512 * 640 * token
    assert replace(WORK, infer_devices=(0, 1)).kv_cache_bytes < WORK.kv_cache_bytes


def test_ratio_counts_the_forwards_that_the_step_runs() -> None:
    once = result(WORK, step=7.0, rollout=3.5, reference=0.8, train=2.6, weight_sync=0.1)
    assert once.ratio == pytest.approx(7.0 / (3.0 + 0.7 + 2.5))
    twice = result(
        replace(WORK, lora_rank=32), step=8.0, rollout=3.5, reference=0.8, log_probs=1.0, train=2.6, weight_sync=0.1
    )
    assert twice.ratio == pytest.approx(8.0 / (3.0 + 0.7 + 0.9 + 2.5))


def test_weights_sent_to_other_gpus_have_own_floor() -> None:
    assert result(WORK, step=1.0).floor("weight_sync") == 0.1
    assert result(replace(WORK, infer_devices=(1, 2)), step=1.0).floor("weight_sync") == 0.2


def test_unmeasured_floor_gives_no_ratio() -> None:
    partial = Result(
        asdict(WORK), {}, [{"time/step": 7.0, "time/rollout": 3.0, "time/train": 3.0}], {"train": 2.5}, warm_up=0
    )
    assert partial.ratio is None and partial.floor_of_step is None


def test_mfu_of_the_measured_train_step() -> None:
    # 6 x 494 million parameters x 327,680 tokens in 2.74 s are 354 TFLOP/s, of a peak of 790.
    assert result(WORK, step=1.0).mfu(2.74) == pytest.approx(0.449, abs=0.001)
    assert result(replace(WORK, devices=(0, 1)), step=1.0).mfu(2.74) == pytest.approx(0.2245, abs=0.001)
    assert result(replace(WORK, lora_rank=32), step=1.0).mfu(2.74) == pytest.approx(
        0.2994, abs=0.001
    )  # no weight gradients


def test_floor_log_probs_use_single_sequences() -> None:
    torch.manual_seed(0)
    from roll.models.attention import register_packed_kernel

    causal = AutoModelForCausalLM.from_config(
        build_config("tiny", "float32"), attn_implementation=register_packed_kernel()
    )
    work = replace(
        WORK, shape=SHAPES["tiny"], prompts=1, samples=3, prompt_tokens=3, response_tokens=5, token_budget=16
    )
    rows = packed_rows(work, 0, 1, "cpu")
    assert [row["input_ids"].shape[1] for row in rows] == [16, 8]
    packed = LogProbs(causal)(rows[0])
    second = rows[0]["input_ids"][:, 8:]
    alone = causal(
        second, cu_seq_lens_q=torch.tensor([0, 8], dtype=torch.int32), max_length_q=8, use_cache=False
    ).logits[0, :-1]
    expected = alone.log_softmax(-1).gather(1, second[0, 1:, None])[:, 0]
    torch.testing.assert_close(packed[8:], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["step_full", "step_lora"])
def test_experiments_of_the_benchmark_plan(name: str) -> None:
    plans = []
    compose(
        ["--config-dir", str(CONFIG), "--config-name", name, "dry_run=true"],
        lambda composed, presets: plans.append(make_plan(checked_config(composed, presets))),
    )
    (plan,) = plans
    assert (plan.batch.sequences_per_step, plan.batch.updates) == (512, 1)
    assert plan.reference == ("role" if name == "step_full" else "adapter_off")


def test_reward_differs_between_responses() -> None:
    prompt = Prompt(0, torch.zeros(0).int().numpy(), "", "benchmark", {})
    assert letter_share(prompt, "aabb", {}).value == 0.5
    assert letter_share(prompt, "", {}).value == 0.0
