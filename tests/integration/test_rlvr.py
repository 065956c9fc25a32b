"""Whole RLVR runs with the real engines: Ray, DeepSpeed ZeRO-3, vLLM, PEFT."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests import limits
from tests.integration.conftest import World, engine_processes

pytestmark = pytest.mark.engines

PROMISED = (
    "reward/mean",
    "reward/std",
    "reward/arithmetic/mean",
    "response/length_mean",
    "response/truncated_fraction",
    "policy/loss",
    "policy/kl_ref",
    "policy/clip_fraction",
    "policy/entropy",
    "policy/grad_norm",
    "policy/lr",
    "mismatch/logprob_abs_diff_mean",
    "mismatch/kl",
    "staleness/mean",
    "staleness/min",
    "staleness/max",
    "engine/idle_fraction",
    "engine/running",
    "engine/waiting",
    "engine/kv_cache_use",
    "engine/preemptions",
    "engine/prefilled_tokens",
    "engine/generated_tokens",
    "engine/tokens_in_flight",
    "time/step",
    "time/rollout",
    "time/reference",
    "time/train",
    "time/weight_sync",
    "throughput/tokens_per_second",
    "throughput/tokens_per_second_per_device",
    "throughput/samples_per_second",
    "memory/actor_train/peak_bytes",
    "memory/actor_infer/peak_bytes",
)


STAGES = {
    "driver": ("starting Ray", "all roles are ready"),
    "actor_train": ("loading libraries",),
    "actor_infer": ("engine's process",),  # starting, or started
}
"""By role: what stages say that last for seconds even on a fast machine.

A shorter stage, such as the first rollout, may end between two checks of the processes, and is then not shown.
"""


@pytest.fixture(scope="module")
def uninterrupted(world: World) -> str:
    """Make a run of six steps without interruption, and return its name."""
    outcome = world.run(*world.rlvr("whole", "max_steps=6", "save_steps=2", "eval_steps=3"))
    assert outcome.status == 0, outcome.output
    return "whole"


def test_warm_up_learns(world: World) -> None:
    losses = [line["sft/loss"] for line in world.metrics("warm")]
    assert len(losses) == 60
    assert losses[-1] < losses[0] / 4


def test_run_folder_is_complete(world: World, uninterrupted: str) -> None:
    folder = world.folder / uninterrupted
    records = ("config.yaml", "metrics.jsonl", "samples.jsonl", "validation_samples.jsonl", "starts.jsonl")
    for name in (*records, "report.html", "tensorboard", "logs", "export/adapter_config.json"):
        assert (folder / name).exists(), name
    assert sorted(path.name for path in (folder / "checkpoints").glob("step_*")) == ["step_4", "step_6"]
    lines = world.metrics(uninterrupted)
    assert [line["step"] for line in lines] == list(range(7))
    for line in lines[1:]:
        assert not [name for name in PROMISED if name not in line]
    assert [line["step"] for line in lines if "val/heldout/pass@1" in line] == [0, 3, 6]
    sample = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    assert sample["step"] == 1 and len(sample["responses"]) == 8 and sample["ground_truth"]
    held_out = [json.loads(line) for line in (folder / "validation_samples.jsonl").read_text().splitlines()]
    assert {(one["set"], one["step"]) for one in held_out} == {("heldout", step) for step in (0, 3, 6)}


def test_every_role_reports_stages_before_first_step(world: World, uninterrupted: str) -> None:
    """For each role except the driver, the lines also show the CPU time of its processes, which grows."""
    log = (world.folder / uninterrupted / "logs" / "driver.log").read_text()
    start = log[: log.index("step 1/6")]
    for role, stages in STAGES.items():
        lines = [
            line.partition(f"{role}: ")[2] for line in start.splitlines() if f"roll.tracking.life: {role}: " in line
        ]
        places = [next((place for place, line in enumerate(lines) if stage in line), None) for stage in stages]
        assert None not in places, (role, stages, lines)
        seconds = [float(line.partition(" s of CPU")[0].rpartition(" ")[2]) for line in lines if " s of CPU" in line]
        assert role == "driver" or (seconds == sorted(seconds) and seconds[0] < seconds[-1]), lines


def test_trainer_and_engine_agree_after_every_sync(world: World, uninterrupted: str) -> None:
    for line in world.metrics(uninterrupted)[1:]:
        assert line["mismatch/logprob_abs_diff_mean"] < 1e-4
        assert line["staleness/max"] == 0


def test_export_is_the_policy_that_trained(world: World, uninterrupted: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(world.folder / "warm" / "export")
    tokens = torch.arange(40, 56)[None]
    before = base(tokens).logits
    policy = PeftModel.from_pretrained(base, str(world.folder / uninterrupted / "export"))
    assert policy.peft_config["default"].to_dict()["r"] == 16
    assert (policy(tokens).logits - before).abs().max() > 1e-4


@pytest.mark.full
def test_process_deaths_change_no_metric(world: World, uninterrupted: str) -> None:
    """The only engine is killed, then a rank of the trainer, and finally the driver. The run is then resumed."""
    arguments = world.rlvr("killed", "max_steps=6", "save_steps=2", "eval_steps=3")
    process = world.start(*arguments)
    world.wait_for_step("killed", 1, process)
    [engine] = engine_processes(process.pid)
    engine.kill()
    saved = (
        world.folder / "killed" / "checkpoints" / "step_2"
    )  # the checkpoint is written after the metrics of the step
    limits.until(saved.exists, "the checkpoint of step 2 is written")
    world.working_rank("killed", process, "actor_train", 1).kill()
    log = world.folder / "killed" / "logs" / "driver.log"
    limits.until(lambda: "restart 1 of 3" in log.read_text(), "the trainer restarts after the kill of its rank")
    world.wait_for_step("killed", 5, process)
    psutil.Process(process.pid).send_signal(signal.SIGKILL)
    process.communicate(timeout=limits.CALL)
    outcome = world.run(*arguments)
    assert outcome.status == 0, outcome.output
    course = log.read_text()
    assert "actor_infer rank 0 died: " in course and "actor_infer rank 0 is back" in course
    assert any("restart 1 of 3: " in line and "checkpoint of step" in line for line in course.splitlines())
    world.assert_same_steps("killed", uninterrupted)


@pytest.mark.full
def test_death_of_only_engine_does_not_end_run(
    world: World, uninterrupted: str, leaves_nothing: Callable[[], None]
) -> None:
    process = world.start(*world.rlvr("healed", "max_steps=6", "save_steps=2", "eval_steps=3"))
    world.wait_for_step("healed", 1, process)
    [engine] = engine_processes(process.pid)
    engine.kill()
    outcome = world.wait(process)
    assert outcome.status == 0, outcome.output
    assert "actor_infer rank 0 died: " in outcome.output and "actor_infer rank 0 is back" in outcome.output
    world.assert_same_steps("healed", uninterrupted)
    restarts = [line["engine/restarts"] for line in world.metrics("healed")]
    assert restarts[:2] == [0, 0] and restarts[-1] == 1
    leaves_nothing()


@pytest.mark.full
def test_stopped_trainer_rank_restarts_its_group(
    world: World, uninterrupted: str, leaves_nothing: Callable[[], None]
) -> None:
    """The rank is stopped during a step. The engine keeps running."""
    run = "stopped"
    process = world.start(*world.rlvr(run, "max_steps=6", "save_steps=2", "eval_steps=3"))
    world.wait_for_step(run, 3, process)
    engines = world.descendants(process, "VLLM::EngineCore")
    world.working_rank(run, process, "actor_train", 1).send_signal(signal.SIGSTOP)
    limits.until(
        lambda: "restart 1 of 3" in (world.folder / run / "logs" / "driver.log").read_text(), "the trainer restarts"
    )
    assert engines and world.descendants(process, "VLLM::EngineCore") == engines
    outcome = world.wait(process)
    assert outcome.status == 0, outcome.output
    (line,) = (line for line in outcome.output.splitlines() if "restart 1 of 3" in line)
    assert "actor_train rank 1: " in line and "is stopped (SIGSTOP)" in line, outcome.output
    assert "checkpoint of step " in line
    step = int(line.rpartition(" ")[2])
    assert step in (2, 4) and [line["run/restarts"] for line in world.metrics(run)] == [
        float(later > step) for later in range(7)
    ]
    world.assert_same_steps(run, uninterrupted)
    first, second = ((world.folder / name / "samples.jsonl").read_text() for name in (uninterrupted, run))
    assert first == second
    leaves_nothing()


def test_finished_run_is_not_run_again(world: World, uninterrupted: str) -> None:
    outcome = world.run(*world.rlvr(uninterrupted, "max_steps=6", "save_steps=2", "eval_steps=3"))
    assert outcome.status == 0
    assert "already completed its 6 steps" in outcome.last_line
    assert "Unhandled error" not in outcome.output and "ActorDiedError" not in outcome.output


@pytest.mark.full
def test_merged_adapter_in_bf16(world: World, leaves_nothing: Callable[[], None]) -> None:
    bf16 = [f"{role}.model_args.dtype=bf16" for role in ("actor_train", "actor_infer", "reference")]
    checkpointing = "actor_train.model_args.gradient_checkpointing=all"
    outcome = world.run(*world.rlvr("merged", "max_steps=3", "weight_sync.lora=merged", checkpointing, *bf16))
    assert outcome.status == 0, outcome.output
    lines = world.metrics("merged")[1:]
    assert all(line["mismatch/logprob_abs_diff_mean"] < 0.02 for line in lines)
    assert lines[-1]["policy/kl_ref"] > 0
    leaves_nothing()


@pytest.mark.full
def test_engine_samples_from_base_in_four_bits(world: World, leaves_nothing: Callable[[], None]) -> None:
    """From the first rollout on, and after the run has resumed."""
    keys = ["weight_sync.lora=merged", "~reference", "deepspeed_zero3.zero_optimization.stage=2", "save_steps=2"]
    keys += ["+actor_train.model_args.quantized_base=nf4_double", "rollout_batch_size=8"]
    for steps in (2, 4):
        outcome = world.run(*world.rlvr("qlora", f"max_steps={steps}", *keys))
        assert outcome.status == 0, outcome.output
        assert "BitsAndBytesConfig" in outcome.last_line
    lines = world.metrics("qlora")[1:]
    assert len(lines) == 4 and all(line["mismatch/logprob_abs_diff_mean"] < 1e-5 for line in lines)
    assert lines[0]["policy/kl_ref"] == 0 and lines[-1]["policy/kl_ref"] > 0
    leaves_nothing()


def test_asynchronous_full_training_checkpoints_on_interrupt(world: World, leaves_nothing: Callable[[], None]) -> None:
    """All weights are sent in small buckets, rollouts run one step ahead, and the reference is sharded by ZeRO-3."""
    process = world.start(
        *world.rlvr(
            "full",
            "max_steps=500",
            "async_generation_ratio=1",
            "rollout_window=32",
            "weight_sync.bucket_mib=1",
            "lora_target=null",
            "actor_train.training_args.learning_rate=1e-4",
            "reference.strategy_args={strategy_name: deepspeed_infer, strategy_config: ${deepspeed_zero3}}",
            "reference.world_size=2",
            "add_token_level_kl=true",
            "init_kl_coef=0.01",
        )
    )
    world.wait_for_step("full", 4, process)
    process.send_signal(signal.SIGINT)
    outcome = world.wait(process)
    assert outcome.status == 130, outcome.output
    lines = world.metrics("full")[1:]
    assert lines[0]["staleness/max"] == 0
    assert max(line["staleness/max"] for line in lines) > 0
    assert all(
        line["mismatch/logprob_abs_diff_mean"] < 1e-4 for line in lines if "mismatch/logprob_abs_diff_mean" in line
    )
    checkpoint = world.folder / "full" / "checkpoints" / f"step_{lines[-1]['step']}"
    assert (checkpoint / "manifest.json").exists()
    end = json.loads((world.folder / "full" / "end.json").read_text())
    assert end["outcome"] == "interrupted" and end["checkpoint"].endswith(checkpoint.name), end
    log = (world.folder / "full" / "logs" / "driver.log").read_text()
    saved = f"checkpoint of step {lines[-1]['step']}: "
    for course in (
        "the plan:",
        "actor_infer has started",
        "step 4/500",
        "SIGINT: the run",
        saved,
    ):
        assert course in log, course
    assert log.index(saved) < log.index("the run ended: interrupted")
    leaves_nothing()


@pytest.mark.full
def test_hf_engine_run_with_base_model_as_reference(world: World) -> None:
    outcome = world.run(
        *world.rlvr(
            "plain",
            "max_steps=2",
            "rollout_batch_size=8",
            "actor_infer.strategy_args.strategy_name=hf_infer",
            "~actor_infer.strategy_args.strategy_config",
            "~reference",
            "adv_estimator=reinforce",
            "norm_mean_type=batch",
            "whiten_advantages=true",
        )
    )
    assert outcome.status == 0, outcome.output
    lines = world.metrics("plain")[1:]
    assert all(line["mismatch/logprob_abs_diff_mean"] < 1e-4 for line in lines)
    assert lines[0]["policy/kl_ref"] == pytest.approx(0.0, abs=1e-6) and lines[1]["policy/kl_ref"] > 0


@pytest.mark.full
def test_engine_that_fails_to_start_ends_run(world: World, leaves_nothing: Callable[[], None]) -> None:
    nonsense = "+actor_infer.strategy_args.strategy_config.engine_args={kv_cache_dtype: nonsense}"
    outcome = world.run(*world.rlvr("unstartable", "max_steps=2", nonsense))
    assert outcome.status == 3, outcome.output
    assert "actor_infer rank 0" in outcome.last_line and "nonsense" in outcome.last_line, outcome.output
    assert "; there is no checkpoint" in outcome.output
    leaves_nothing()


def test_bad_rows_are_reported_before_anything_starts(
    world: World, leaves_nothing: Callable[[], None], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "ground_truth": "2", "tag": "arithmetic"}\n{"question": "1+2="}\n')
    outcome = world.run(*world.rlvr("bad_rows", f"actor_train.data_args.file_name={rows}"))
    assert outcome.status == 2
    assert f"{rows}:2" in outcome.output and "Traceback" not in outcome.output
    leaves_nothing()


@pytest.mark.full
def test_unreadable_model_is_reported_before_anything_starts(
    world: World, leaves_nothing: Callable[[], None], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((world.folder / "warm" / "export" / name).read_bytes())
    (model / "model.safetensors").write_bytes(b"\x00" * 64)
    outcome = world.run(*world.rlvr("bad_model", f"pretrain={model}"))
    assert outcome.status == 2
    assert str(model) in outcome.output and "pretrain" in outcome.output and "Traceback" not in outcome.output
    leaves_nothing()


ESTIMATOR = '''
import numpy as np

from roll.algorithms.advantages import Normalisation, Scores, to_tokens
from roll.algorithms.methods import declares
from roll.algorithms.methods import EstimatorTraits


@declares(EstimatorTraits(compares_groups=False))
def against_bar(scores: Scores, norm: Normalisation, *, bar: float = 0.5) -> np.ndarray:
    """1 for a reward above the bar, -1 for any other."""
    return to_tokens(np.where(scores.rewards > bar, 1.0, -1.0), scores)
'''
LOSS = '''
from dataclasses import dataclass

import torch

from roll.algorithms.methods import declares
from roll.algorithms.methods import PolicyLossTraits
from roll.algorithms.objectives import Objective, PolicyTokens, Surrogate


@declares(PolicyLossTraits(ratio="token"))
@dataclass(frozen=True)
class Capped(Objective):
    """-A log pi, weighted by the ratio up to a cap, without a gradient through the weight."""

    cap: float = 2.0

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        ratio = tokens.log_ratio.detach().exp()
        weight = ratio.clamp(max=self.cap)
        return Surrogate(-weight * tokens.advantages * tokens.log_probs, torch.full_like(ratio, self.cap),
        tokens.advantages > 0)
'''
REWARD = '''
from roll.rewards.answers import final_text, ground_truth
from roll.types import Prompt, RewardResult


def contains(prompt: Prompt, response: str, row: dict, *, worth: float = 1.0) -> RewardResult:
    """`worth` for a response that contains the answer."""
    return RewardResult(worth * (ground_truth(row) in final_text(response)))
'''


OWN = (
    "adv_estimator=own_estimator:against_bar",
    "adv_estimator_args={bar: 0.1}",
    "policy_loss=own_loss:Capped",
    "policy_loss_args={cap: 0.75}",
    "rewards.arithmetic.reward=own_reward:contains",
    "rewards.arithmetic.reward_args={worth: 0.25}",
)


@pytest.mark.full
def test_methods_of_the_working_directory(world: World, leaves_nothing: Callable[[], None]) -> None:
    """A custom estimator, loss and reward each receive the value of their own configuration key."""
    for name, text in {"own_estimator": ESTIMATOR, "own_loss": LOSS, "own_reward": REWARD}.items():
        (world.folder / f"{name}.py").write_text(text)
        assert len(text.splitlines()) < 30
    outcome = world.run(*world.rlvr("own", "max_steps=2", *OWN))
    assert outcome.status == 0, outcome.output
    for line in world.metrics("own")[1:]:
        assert line["policy/ratio"] == pytest.approx(0.75)
        right = 128 * line["reward/arithmetic/mean"] / 0.25
        assert 0 < right < 128 and right == pytest.approx(round(right), abs=1e-3)
        assert line["policy/clip_fraction"] > 0
    leaves_nothing()
