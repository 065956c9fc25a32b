"""Common code of the RLVR benchmarks: options, work, and keys of the experiment."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks import launch, models
from benchmarks.work import Work

MAX_NUM_SEQS = 512


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command line, with the options of all RLVR benchmarks."""
    out = launch.parser(description)
    out.add_argument("--infer-devices", help="GPUs that generate, one engine each (default: those that train)")
    out.add_argument("--lora-rank", type=int, help="0 trains all parameters (default: 0, for tiny 16)")
    out.add_argument(
        "--sync", choices=("adapter", "merged"), default="adapter", help="part of a LoRA policy that a sync sends"
    )
    out.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage (default: 1, for tiny 3)")
    out.add_argument(
        "--behaviour",
        choices=("engine", "trainer"),
        default="engine",
        help="source of the behaviour policy's log-probs",
    )
    out.add_argument(
        "--token-budget", type=int, help="largest number of tokens per micro-batch (default: 20480, for tiny 8192)"
    )
    return out


def fill(options: argparse.Namespace) -> None:
    """Fill in defaults that depend on the model and the devices."""
    tiny = options.model == "tiny"
    launch.fill(
        options, {"lora_rank": 16 if tiny else 0, "stage": 3 if tiny else 1, "token_budget": 8192 if tiny else 20480}
    )
    options.dtype = "bfloat16" if options.devices else "float32"


def work_of(
    options: argparse.Namespace,
    scratch: Path,
    *,
    prompts: int,
    samples: int,
    prompt_tokens: int,
    response_tokens: int,
    max_num_seqs: int,
) -> Work:
    """Return the work that the options and these sizes describe."""
    devices = launch.device_list(options.devices)
    return Work(
        model=str(scratch / "model"),
        shape=models.SHAPES[options.model],
        dtype="bf16" if devices else "fp32",
        devices=devices,
        infer_devices=launch.device_list(options.infer_devices or options.devices),
        train_ranks=len(devices) or 2,
        score_ranks=len(devices) or 1,
        prompts=prompts,
        samples=samples,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        token_budget=options.token_budget,
        lora_rank=options.lora_rank,
        sync=options.sync,
        behaviour=options.behaviour,
        max_num_seqs=max_num_seqs,
        stage=options.stage,
        repetitions=options.repetitions,
        scratch=str(scratch),
    )


def write_model(work: Work, options: argparse.Namespace, rows: int, end_tokens: int = 1) -> None:
    """Write the model's folder with `rows` prompts. A separate process does this, because this one must hold no GPU
    memory.
    """
    sizes = {
        "--prompts": rows,
        "--prompt-tokens": work.prompt_tokens,
        "--end-tokens": end_tokens,
        "--dtype": options.dtype,
    }
    words = [str(word) for pair in sizes.items() for word in pair]
    launch.run(["-m", "benchmarks.models", options.model, work.model, *words], work.scratch, options.logs, "models")


def overrides(work: Work, steps: int) -> dict[str, Any]:
    """Return the experiment's keys for the work."""
    engine = "actor_infer.strategy_args.strategy_config"
    keys: dict[str, Any] = {
        "output_dir": f"{work.scratch}/run",
        "pretrain": work.model,
        "max_steps": steps,
        "behaviour_log_probs": work.behaviour,
        "rollout_batch_size": work.prompts,
        "num_return_sequences_in_group": work.samples,
        "prompt_length": work.prompt_tokens,
        "response_length": work.response_tokens,
        "actor_train.strategy_args.strategy_config.zero_optimization.stage": work.stage,
        f"{engine}.max_num_seqs": work.max_num_seqs,
    }
    roles = ["actor_train", "actor_infer"] + ([] if work.lora_rank else ["reference"])
    for role in roles:
        devices = work.infer_devices if role == "actor_infer" else work.devices
        keys[f"{role}.model_args.dtype"] = work.dtype
        keys[f"{role}.device_mapping"] = f"[{','.join(map(str, devices))}]" if devices else "null"
        if role != "actor_infer":
            keys[f"{role}.max_tokens_per_microbatch"] = work.token_budget
    if work.lora_rank:
        keys |= {"lora_rank": work.lora_rank, "weight_sync.lora": work.sync}
    if work.devices:
        keys[f"{engine}.engine_args"] = f"{{kv_cache_memory_bytes: {work.kv_cache_bytes}}}"
    else:
        keys |= {"actor_train.world_size": work.train_ranks, f"{engine}.enforce_eager": "true"}
        keys |= {
            f"{engine}.kv_cache_gib": work.kv_cache_bytes / (1 << 30),
            "actor_train.system_envs.OMP_NUM_THREADS": '"1"',
        }
    return keys


def measure(work: Work, keys: dict[str, Any], options: argparse.Namespace, logs: Path | None) -> list[dict[str, Any]]:
    """Run the experiment and return the metrics of every step. Keys of the command line override `keys`."""
    name = "step_lora" if work.lora_rank else "step_full"
    return launch.pipeline(name, keys, options.overrides, work, logs, "step")
