"""Run folders as training leaves them, written by the project's own writers, for `benchmarks/pages.py`."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import yaml

from roll.rollout.record import given, single_turn
from roll.tracking.history import STARTS_FILE, RunEnd, RunStart, write_end
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

GROUPS, RESPONSES, HELD_OUT = 16, 8, 6
WORDS = (
    "so",
    "the",
    "sum",
    "of",
    "both",
    "sides",
    "is",
    "then",
    "divided",
    "by",
    "two",
    "and",
    "we",
    "get",
    "what",
    "was",
    "asked",
)
PARTS = ("rollout", "reference", "log_probs", "train", "weight_sync")
START = RunStart(
    time="2026-11-23T09:14:02+00:00",
    command="python -m roll.pipeline --config-name rlvr_lora_zero3 actor_train.training_args.learning_rate=2.0e-5 "
    "output_dir=output/learning_rate_2e-5",
    folder="/home/someone/experiments/mathematics",
    host="node-17, Linux-6.8.0-x86_64-with-glibc2.39, 192 cores, 2016 GiB, 8 x NVIDIA H200",
    versions={
        "roll": "0.1.0",
        "python": "3.11.9",
        "torch": "2.13.0+cu130",
        "transformers": "5.19.0",
        "vllm": "0.32.0",
        "ray": "2.60.0",
    },
    commits={"working directory": "3f2a9c81b7d0-dirty", "roll": "9d7f72444a1e"},
)


def write_run(folder: Path, steps: int, rate: float, with_samples: bool) -> None:
    """Write the folder of a completed run with `steps` steps. The same arguments write the same run."""
    rng = random.Random(f"{steps} {rate}")
    every = max(1, steps // 20)
    tracker = JsonlTracker(folder)
    for step in range(steps + 1):
        learnt = 1 - math.exp(-4 * step / steps * rate / 1e-5)
        metrics = _validation(learnt, rng) if step % every == 0 else {}
        if with_samples and step % every == 0:
            tracker.held_out(step, "gsm8k", [_group(number, learnt, rng) for number in range(2 * HELD_OUT)])
        tracker.log(step, metrics | (_metrics(step, steps, learnt, rate, rng) if step else {}))
        if with_samples and step:
            tracker.samples(step, [_group(GROUPS * step + number, learnt, rng) for number in range(GROUPS // 2)])
    tracker.close()
    config = {
        "exp_name": folder.name,
        "pretrain": "Qwen/Qwen2.5-7B-Instruct",
        "max_steps": steps,
        "seed": 42,
        "rollout_batch_size": GROUPS,
    }
    config |= {
        "output_dir": str(folder),
        "actor_train": {"training_args": {"learning_rate": rate, "weight_decay": 0.0}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / STARTS_FILE).write_text(json.dumps(asdict(START)) + "\n")
    write_end(folder, RunEnd("done", "", f"the last checkpoint is of step {steps}", steps))


def _validation(learnt: float, rng: random.Random) -> Metrics:
    return {
        "val/gsm8k/pass@1": 0.31 + 0.4 * learnt + rng.gauss(0, 0.012),
        "val/gsm8k/pass@8": 0.52 + 0.3 * learnt + rng.gauss(0, 0.01),
        "val/competition_mathematics/pass@1": 0.06 + 0.2 * learnt + rng.gauss(0, 0.01),
        "val/gsm8k/length_mean": 210 + 160 * learnt,
        "time/evaluate": 6.5 + rng.random(),
    }


def _metrics(step: int, steps: int, learnt: float, rate: float, rng: random.Random) -> Metrics:
    mean = 0.28 + 0.5 * learnt + rng.gauss(0, 0.05)
    seconds = {f"time/{part}": 1.5 + abs(rng.gauss(0, 0.3)) for part in PARTS}
    total = sum(seconds.values()) + 0.4
    drawn: dict[str, float] = {
        "reward/mean": mean,
        "reward/std": 0.46 * math.sqrt(max(0.02, mean * (1 - mean)) / 0.25),
        "reward/math_rule/mean": mean - 0.06 + rng.gauss(0, 0.03),
        "reward/code_sandbox/mean": mean + 0.06 + rng.gauss(0, 0.04),
        "response/length_mean": 210 + 160 * learnt + rng.gauss(0, 20),
        "response/truncated_fraction": max(0.0, 0.14 * math.exp(-step / 25) + rng.gauss(0, 0.006)),
        "episode/turns_mean": 2.4 + rng.gauss(0, 0.2),
        "policy/loss": rng.gauss(0, 0.012),
        "policy/kl_ref": 0.02 * learnt + abs(rng.gauss(0, 0.002)),
        "policy/entropy": 0.72 - 0.4 * learnt + rng.gauss(0, 0.02),
        "policy/clip_fraction": abs(rng.gauss(0.004, 0.0015)),
        "policy/grad_norm": (8.0 if step % 97 == 0 else 0.35) + abs(rng.gauss(0, 0.08)),
        "policy/lr": rate * min(1.0, step / max(1, steps // 20)),
        "mismatch/logprob_abs_diff_mean": 0.011 * math.exp(rng.gauss(0, 0.15)),
        "mismatch/kl": 3e-4 * math.exp(rng.gauss(0, 0.4)),
        "staleness/mean": 0.6 + 0.2 * rng.random(),
        "staleness/min": 0.0,
        "staleness/max": 1.0,
        "engine/idle_fraction": 0.35 - 0.2 * learnt,
        "engine/running": 180 + 60 * learnt,
        "engine/waiting": 4.0 * (step % 3),
        "engine/kv_cache_use": 0.6 + 0.3 * learnt,
        "engine/prefilled_tokens": 64.0 * 24,
        "engine/generated_tokens": 64 * 8 * (210 + 160 * learnt),
        "throughput/tokens_per_second": 64 * 8 * (330 + 160 * learnt) / total,
        "throughput/mfu": 0.41 + 0.01 * (step % 3),
        "memory/actor_train/peak_bytes": 41.3 * 2**30,
        "memory/actor_infer/peak_bytes": 62.0 * 2**30,
    }
    return drawn | seconds | {"time/step": total}


def _group(number: int, learnt: float, rng: random.Random) -> RolloutGroup:
    one, other = 10 + number % 83, 7 + number % 71
    text = f"<|im_start|>user\nWhat is {one} · {other}? Put the answer into a box.<|im_end|>\n<|im_start|>assistant\n"
    domain = ("math_rule", "code_sandbox")[number % 2]
    prompt = Prompt(number, np.arange(24, dtype=np.int32), text, domain, {"ground_truth": str(one * other)})
    if number % 5 == 4:
        return RolloutGroup(prompt, [_played(prompt, one * other, rng) for _ in range(RESPONSES)])
    return RolloutGroup(prompt, list(_answers(prompt, one * other, learnt, rng)))


def _answers(prompt: Prompt, product: int, learnt: float, rng: random.Random) -> Iterator[Episode]:
    for _ in range(RESPONSES):
        length = rng.randint(30, 260)
        right, cut = rng.random() < 0.28 + 0.6 * learnt, rng.random() < 0.06
        text = " ".join(rng.choice(WORDS) for _ in range(length)) + (
            "" if cut else f"\n\n\\boxed{{{product if right else product + 10}}}"
        )
        ids = np.arange(length, dtype=np.int32)
        reward = (
            RewardResult(0.0, RewardOutcome.UNPARSABLE)
            if cut
            else RewardResult(float(right), parts={"correct": float(right)})
        )
        finish = FinishReason.LENGTH if cut else FinishReason.STOP
        yield single_turn(prompt, Completion(ids, ids.astype(np.float32), np.zeros_like(ids), finish, text), reward)


def _played(prompt: Prompt, product: int, rng: random.Random) -> Episode:
    """Return an episode that calls a calculator and then answers."""
    asked = given(prompt.token_ids, prompt.text)

    def say(text: str) -> Segment:
        return Segment(np.arange(12, dtype=np.int32), True, np.zeros(12, np.float32), [VersionRun(0, 12)], text)

    right = rng.random() < 0.7
    answer = given(np.arange(6, dtype=np.int32), f"<tool_response>{product}</tool_response>")
    turns = [
        asked,
        say("Let me compute that with the calculator."),
        answer,
        say(f"It is \\boxed{{{product if right else 0}}}."),
    ]
    return Episode([Trajectory(turns, StopReason.COMPLETED)], RewardResult(float(right)), [0.1, float(right)])
