"""The quickstart's experiments on the CPU with a random model, from rows in the public layout to an evaluation and an
export.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import limits
from tests.integration.conftest import TINY, World
from tests.unit.data.public_copies import write_gsm8k, write_ultrafeedback
from tests.unit.docs.notebooks import RUN_CELLS, SMOLLM2, code_of, write_stand_ins
from tests.unit.docs.pages import blocks

pytestmark = [pytest.mark.engines, pytest.mark.full]

SHORT = ("gpu_memory_gib=null", "prompt_length=192", "response_length=96")
LEARNERS = {
    "gsm8k_sft": "sft_train",
    "ultrafeedback_dpo": "actor_train",
    "ultrafeedback_reward_model": "reward_train",
    "gsm8k_distill": "student",
}
SECOND = {"ultrafeedback_dpo": "reference", "gsm8k_distill": "teacher"}
MODEL = "output/tiny/agent-model"


def on_cpu(*roles: str) -> list[str]:
    """Return overrides that move roles from their GPUs to the CPU, with models in fp32."""
    return [
        f"{role}.{key}" for role in roles for key in ("device_mapping=null", "world_size=1", "model_args.dtype=fp32")
    ]


def ran(folder: Path, *words: str) -> str:
    """Run a command that must succeed, and return its output."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=limits.RUN,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a folder with both data sets, prepared by `roll.data.prepare`, and a random model with a byte
    tokenizer.
    """
    folder = tmp_path_factory.mktemp("quickstart")
    copies = {
        "gsm8k": write_gsm8k(folder / "copies" / "gsm8k", 400, 16),
        "ultrafeedback": write_ultrafeedback(folder / "copies" / "pairs", 96),
    }
    for name, copy in copies.items():
        ran(folder, "-m", "roll.data.prepare", name, "--source", str(copy), "--validation", "16")
    ran(folder, str(TINY / "make_model.py"), MODEL, "--agent")
    return World(folder)


def fine_tuned(world: World, name: str, *overrides: str) -> list[dict[str, float]]:
    """Run an offline experiment for a few steps, and return its metrics."""
    learner, second = LEARNERS[name], SECOND.get(name)
    words = [*SHORT, *on_cpu(learner, *([second] if second else [])), f"pretrain={MODEL}", f"output_dir={name}"]
    words += [f"{learner}.training_args.per_device_train_batch_size=8", f"{learner}.max_tokens_per_microbatch=4096"]
    words += ["teacher.model_args.model_name_or_path=gsm8k_sft/export"] if second == "teacher" else []
    outcome = world.run("--config-name", name, *words, *overrides)
    assert outcome.status == 0, outcome.output
    return world.metrics(name)


@pytest.fixture(scope="module")
def solver(prepared: World) -> World:
    """Return the folder after `gsm8k_sft` has fine-tuned the random model."""
    words = (
        "max_steps=150",
        "eval_steps=75",
        "sft_train.training_args.learning_rate=2e-3",
        "sft_train.training_args.num_train_epochs=10",
    )
    losses = [
        line["val/validation/loss"]
        for line in fine_tuned(prepared, "gsm8k_sft", *words)
        if "val/validation/loss" in line
    ]
    assert losses[-1] < losses[0] / 3, "the model must learn the common form of the solutions"
    return prepared


def test_gsm8k_from_download_to_evaluation_and_export(solver: World, leaves_nothing: Callable[[], None]) -> None:
    engine = "actor_infer.strategy_args.strategy_config"
    words = ["rollout_batch_size=8", "num_return_sequences_in_group=4"]
    words += [f"~{engine}.gpu_memory_utilization", f"+{engine}.kv_cache_gib=0.5", f"+{engine}.enforce_eager=true"]
    words += [
        *SHORT,
        *on_cpu("actor_train", "actor_infer"),
        "actor_train.max_tokens_per_microbatch=4096",
        "rewards.math_rule.world_size=1",
    ]
    words += ["pretrain=gsm8k_sft/export", "output_dir=rlvr", "eval_steps=2"]
    outcome = solver.run("--config-name", "gsm8k_rlvr", *words, "max_steps=2")
    assert outcome.status == 0, outcome.output
    steps = solver.metrics("rlvr")
    assert [line["step"] for line in steps if "val/gsm8k/pass@1" in line] == [0, 2]
    assert all(line["mismatch/logprob_abs_diff_mean"] < 1e-4 for line in steps[1:]), (
        "the engine has the trainer's weights"
    )

    printed = ran(solver.folder, "-m", "roll.evaluate", "rlvr", "--data", "data/gsm8k/test.jsonl")
    assert "accuracy" in printed
    results = solver.folder / "rlvr" / "evaluations" / "step_2"
    lines = [json.loads(line) for line in (results / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == 16
    boxes = [
        (re.findall(r"\\boxed\{(\d+)\}", line["responses"][0]["text"]), line["row"]["ground_truth"]) for line in lines
    ]
    assert sum(bool(found) for found, _ in boxes) >= 8, "the policy writes its answers in a box"
    right = [bool(found) and int(found[-1]) == int(truth) for found, truth in boxes]
    assert [line["responses"][0]["passed"] for line in lines] == right
    [one] = json.loads((results / "evaluation.json").read_text())["sets"].values()
    assert one["estimates"]["accuracy"]["value"] == pytest.approx(sum(right) / 16)

    ran(solver.folder, "-m", "roll.export", "rlvr", "exported", "--format", "hf")
    [script] = [block for block in blocks("docs/quickstart.md") if block.option("file")]
    (solver.folder / "ask.py").write_text(script.text.replace("export/gsm8k_policy", "exported"))
    assert ran(solver.folder, "ask.py").strip(), "transformers loads the exported model and generates text"

    outcome = solver.run("--config-name", "gsm8k_rlvr", *words, "max_steps=3")
    assert outcome.status == 0, outcome.output
    assert "resumed from step 2" in outcome.output
    assert [line["step"] for line in solver.metrics("rlvr")] == [0, 1, 2, 3]
    leaves_nothing()


@pytest.mark.parametrize("name", ["ultrafeedback_dpo", "ultrafeedback_reward_model"])
def test_pairs_of_ultrafeedback_are_learnt(prepared: World, name: str) -> None:
    learner = LEARNERS[name]
    second = [f"{SECOND[name]}.max_tokens_per_microbatch=4096"] if name in SECOND else []
    rate = (f"{learner}.training_args.learning_rate=1e-3", f"{learner}.training_args.warmup_steps=0")
    steps = fine_tuned(prepared, name, "max_steps=8", "eval_steps=8", "save_steps=0", *rate, *second)
    assert steps[0]["val/validation/loss"] > steps[-1]["val/validation/loss"]
    assert steps[-1]["val/validation/accuracy"] == 1.0, "every chosen response names a colour, every rejected one is No"


def test_a_student_learns_from_a_teacher_on_gsm8k(solver: World) -> None:
    words = (
        "max_steps=8",
        "eval_steps=8",
        "student.training_args.learning_rate=2e-3",
        "teacher.max_tokens_per_microbatch=4096",
    )
    steps = fine_tuned(solver, "gsm8k_distill", *words, "student.training_args.warmup_steps=0")
    assert steps[-1]["val/validation/divergence"] < steps[0]["val/validation/divergence"]


def test_the_notebook_of_sums_runs_on_the_cpu(tmp_path: Path, leaves_nothing: Callable[[], None]) -> None:
    write_stand_ins(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", RUN_CELLS],
        input=json.dumps(code_of(SMOLLM2)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=limits.RUN,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    accuracy = json.loads(done.stdout.splitlines()[-1])
    assert all(0 <= accuracy[when] <= 1 for when in ("before", "after"))
    assert (tmp_path / "output" / "notebook" / "sums" / "export" / "config.json").is_file()
    leaves_nothing()
