"""A synthetic run with realistic curves, like those of a small GRPO run."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from roll.rollout.record import given, single_turn
from roll.tracking.jsonl import JsonlTracker
from roll.types import (
    Completion,
    Episode,
    FinishReason,
    Metrics,
    Prompt,
    RewardOutcome,
    RewardResult,
    RolloutGroup,
    Segment,
    StopReason,
    Trajectory,
    VersionRun,
)

STEPS = 120
PROMPT = "<|im_start|>user\nWhat is 17 · 23?<|im_end|>\n<|im_start|>assistant\n"
CONFIG = "exp_name: qwen2.5-7B-rlvr\npretrain: Qwen/Qwen2.5-7B-Instruct\nmax_steps: 120\nrollout_batch_size: 64\n"


def metrics_of(step: int, rng: random.Random) -> Metrics:
    learnt = 1 - math.exp(-step / 40)
    metrics: Metrics = {}
    if step % 20 == 0:
        metrics["val/gsm8k/pass@1"] = 0.31 + 0.36 * learnt + rng.gauss(0, 0.012)
        metrics["val/gsm8k/pass@k"] = 0.52 + 0.3 * learnt + rng.gauss(0, 0.01)
        metrics["time/evaluate"] = 6.5 + rng.random()
    if step == 0:
        return metrics
    mean = 0.28 + 0.5 * learnt + rng.gauss(0, 0.035)
    parts = {
        "rollout": 7.5 + 2.5 * learnt + rng.gauss(0, 0.5),
        "reference": 0.8 + rng.gauss(0, 0.03),
        "train": 5.2 + rng.gauss(0, 0.2),
        "weight_sync": 0.35 + abs(rng.gauss(0, 0.03)),
        "checkpoint": 2.4 if step % 50 == 0 else 0.0,
    }
    seconds = sum(parts.values()) + metrics.get("time/evaluate", 0.0) + 0.4
    metrics |= {f"time/{part}": value for part, value in parts.items()} | {"time/step": seconds}
    metrics |= {
        "reward/mean": mean,
        "reward/std": 0.46 * math.sqrt(max(0.02, mean * (1 - mean)) / 0.25),
        "reward/math/mean": mean - 0.06 + rng.gauss(0, 0.02),
        "reward/code/mean": mean + 0.06 + rng.gauss(0, 0.03),
        "response/length_mean": 210 + 160 * learnt + rng.gauss(0, 12),
        "response/truncated_fraction": max(0.0, 0.14 * math.exp(-step / 25) + rng.gauss(0, 0.006)),
        "policy/loss": rng.gauss(0, 0.012),
        "policy/kl_ref": 0.02 * learnt + abs(rng.gauss(0, 0.001)),
        "policy/entropy": 0.72 - 0.4 * learnt + rng.gauss(0, 0.012),
        "policy/clip_fraction": abs(rng.gauss(0.004, 0.0015)),
        "policy/grad_norm": 0.35 + abs(rng.gauss(0, 0.08)),
        "policy/lr": 1e-6 * min(1.0, step / 10),
        "mismatch/logprob_abs_diff_mean": 0.011 * math.exp(rng.gauss(0, 0.15)),
        "mismatch/kl": 3e-4 * math.exp(rng.gauss(0, 0.4)),
        "staleness/mean": 0.6 + 0.2 * rng.random(),
        "staleness/min": 0.0,
        "staleness/max": 1.0,
        "engine/idle_fraction": 0.35 - 0.2 * learnt + 0.02 * (step % 3),
        "engine/running": 180 + 60 * learnt,
        "engine/waiting": 4.0 * (step % 3),
        "engine/kv_cache_use": 0.6 + 0.3 * learnt,
        "engine/preemptions": 0.0,
        "engine/prefilled_tokens": 64.0 * 24,
        "engine/generated_tokens": 64 * 8 * (210 + 160 * learnt),
        "engine/tokens_in_flight": 40_000.0 + 3_000 * (step % 3),
        "throughput/tokens_per_second": 64 * 8 * (330 + 160 * learnt) / seconds,
        "throughput/mfu": 0.41 + 0.01 * (step % 3),
        "memory/actor_train/peak_bytes": 41.3 * 2**30,
        "memory/actor_infer/peak_bytes": 62.0 * 2**30,
    }
    return metrics


@pytest.fixture
def group() -> Callable[..., RolloutGroup]:
    def make(prompt_id: int = 0, prompt: str = PROMPT) -> RolloutGroup:
        question = Prompt(prompt_id, np.arange(24, dtype=np.int32), prompt, "math", {"answer": "by hand #### 391"})

        def answer(text: str, length: int, reward: RewardResult, finish: FinishReason = FinishReason.STOP) -> Episode:
            ids = np.arange(length, dtype=np.int32)
            return single_turn(
                question, Completion(ids, ids.astype(np.float32), np.zeros_like(ids), finish, text), reward
            )

        right = RewardResult(1.0, parts={"format": 1.0})
        wrong = RewardResult(0.0, parts={"format": 1.0}, note="read 381")
        late = RewardResult(0.35, RewardOutcome.TIMED_OUT, {"format": float("nan")}, "10 s passed")
        unparsable = RewardResult(0.0, RewardOutcome.UNPARSABLE)
        answers = [
            answer("17 · 23 = 17 · 20 + 17 · 3 = 340 + 51 = 391.\n\nThe answer is \\boxed{391}.", 41, right),
            answer("17 · 23 is 381, so \\boxed{381}.", 18, wrong),
            answer("Let me think step by step. " * 12, 256, unparsable, FinishReason.LENGTH),
            answer("It is \\boxed{391", 9, late),
        ]
        return RolloutGroup(question, answers)

    return make


@pytest.fixture
def of_several_turns(group: Callable[..., RolloutGroup]) -> RolloutGroup:
    """Return a group of two episodes: one with a tool call between two turns, and one whose context was compacted in
    between.
    """
    question = group(7).prompt
    asked, zero = given(question.token_ids, question.text), np.zeros(3, np.float32)

    def say(text: str) -> Segment:
        return Segment(np.arange(3, dtype=np.int32), True, zero, [VersionRun(0, 3)], text)

    answer = given(np.arange(2, dtype=np.int32), "<tool>391</tool>")
    tool = Trajectory([asked, say("Let me ask."), answer, say("It is 391.")], StopReason.MAX_TURNS)
    first = Trajectory([asked, say("A long thought.")], StopReason.CONTEXT_FULL)
    second = Trajectory([given(np.arange(5, dtype=np.int32), "In short: 17 · 23"), say("391")], StopReason.COMPLETED)
    return RolloutGroup(
        question, [Episode([tool], RewardResult(1.0), [0.25, 0.5]), Episode([first, second], RewardResult(0.5))]
    )


@pytest.fixture
def run_dir(tmp_path: Path, group: Callable[..., RolloutGroup]) -> Path:
    """Return the folder of a finished run of 120 steps."""
    folder = tmp_path / "run"
    tracker, rng = JsonlTracker(folder), random.Random(0)
    for step in range(STEPS + 1):
        tracker.log(step, metrics_of(step, rng))
        if step:
            tracker.samples(step, [group(2 * step), group(2 * step + 1)])
    tracker.close()
    (folder / "config.yaml").write_text(CONFIG)
    return folder
