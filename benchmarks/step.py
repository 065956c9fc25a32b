"""A whole step of the tiny world against the sum of its floors, all measured in this run on this machine.

    python benchmarks/step.py [--steps 12] [--sync adapter|merged] [--json FILE]

The work is 64 prompts x 8 samples x exactly 32 tokens (`ignore_eos`), the reference on, one update. The floors are
vLLM's own generate, a forward pass of the transformers model over packed rows (the reference), and DeepSpeed by hand
(forward, backward, optimizer step): see floors.py. Each runs alone. Prints one table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
TINY = HERE.parent / "examples" / "tiny"
RESPONSE_TOKENS, SAMPLES, PROMPTS, TOKEN_BUDGET, LORA_RANK = 32, 8, 64, 8192, 16
PARTS = {"rollout": "generate", "reference": "forward", "train": "train", "weight_sync": None, "checkpoint": None}
QUIET = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}


def main() -> int:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--sync", choices=("adapter", "merged"), default="adapter")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for script, name in (("make_model.py", "model"), ("make_problems.py", "problems")):
            subprocess.run([sys.executable, str(TINY / script), str(scratch / name)], check=True, env=QUIET, stderr=subprocess.DEVNULL)
        step = measure_step(scratch, options.steps, options.sync)
        floors = measure_floors(scratch, options.sync)
    result = {"step": step, "floors": floors, "ratio": step["step"] / sum(floors.values())}
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measure_step(scratch: Path, steps: int, sync: str) -> dict[str, float]:
    """Medians of the times of a step, the first two left out."""
    overrides = {
        "output_dir": scratch / "run",
        "pretrain": scratch / "model",
        "max_steps": steps,
        "eval_steps": 0,
        "save_steps": 0,
        "response_length": RESPONSE_TOKENS,
        "weight_sync.lora": sync,
        "actor_infer.generating_args.ignore_eos": "true",
        "actor_train.data_args.file_name": scratch / "problems" / "train.jsonl",
        "actor_train.training_args.per_device_train_batch_size": PROMPTS * SAMPLES // 2,
        "actor_train.max_tokens_per_microbatch": TOKEN_BUDGET,
        "reference.max_tokens_per_microbatch": TOKEN_BUDGET,
        "lora_rank": LORA_RANK,
        "~validation": None,
    }
    arguments = [key if value is None else f"{key}={value}" for key, value in overrides.items()]
    command = [sys.executable, "-m", "roll.pipeline", "--config-name", "tiny/tiny_rlvr_lora_zero3", *arguments]
    subprocess.run(command, check=True, env=QUIET, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (scratch / "run" / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["step"] > 2]
    return {part: statistics.median(line.get(f"time/{part}", 0.0) for line in kept) for part in ("step", *PARTS)}


def measure_floors(scratch: Path, sync: str) -> dict[str, float]:
    """Medians of each floor, in a process of its own."""
    problems = [json.loads(line) for line in (scratch / "problems" / "train.jsonl").read_text().splitlines()[:PROMPTS]]
    prompts = [list(problem["prompt"].encode()) for problem in problems]
    work: dict[str, Any] = {
        "model": str(scratch / "model"),
        "adapter": str(scratch / "run" / "export") if sync == "adapter" else None,
        "lora_rank": LORA_RANK,
        "prompts": prompts,
        "prompt_tokens": max(map(len, prompts)),
        "response_tokens": RESPONSE_TOKENS,
        "samples": SAMPLES,
        "token_budget": TOKEN_BUDGET,
        "vocabulary": 256,
        "kv_cache_gib": 0.5,
        "ranks": 2,
        "stage": 3,
        "updates": 1,
        "rendezvous": str(scratch / "rendezvous"),
    }
    path = scratch / "work.json"
    path.write_text(json.dumps(work))
    floors = {}
    for kind in ("generate", "forward", "train"):
        command = [sys.executable, str(HERE / "floors.py"), str(path), kind]
        environment = QUIET | {"TMPDIR": str(scratch)}  # vLLM leaves its sockets among the temporary files
        output = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
        floors[kind] = statistics.median(json.loads(output.strip().splitlines()[-1])["seconds"])
    return floors


def show(result: dict[str, Any]) -> None:
    """One table: each part beside its floor."""
    table = Table(title=f"{PROMPTS} prompts x {SAMPLES} samples x {RESPONSE_TOKENS} tokens, seconds")
    for column in ("part", "in the step", "floor", "ratio"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part, kind in PARTS.items():
        seconds, floor = result["step"][part], result["floors"].get(kind)
        table.add_row(part, f"{seconds:.3f}", f"{floor:.3f}" if floor else "-", f"{seconds / floor:.2f}" if floor else "-")
    table.add_section()
    table.add_row("step", f"{result['step']['step']:.3f}", f"{sum(result['floors'].values()):.3f}", f"{result['ratio']:.2f}")
    Console(width=80).print(table)


if __name__ == "__main__":
    sys.exit(main())
