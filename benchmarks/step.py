"""A whole step against the floors of its parts, all measured in this run on this machine.

    python benchmarks/step.py [--model tiny|0.5b|1.5b|7b] [--devices 0] [--lora-rank 32] [--json FILE] [KEY=VALUE ...]

The work is 64 prompts of 128 tokens x 8 samples x exactly 512 tokens (`ignore_eos`), the reference on, one update; for
the tiny model, which needs no GPU, 16 and 32 tokens. The step runs through `python -m roll.pipeline`, to which KEY=VALUE
goes as it is; then each floor runs alone (floors.py). Prints tables, and writes JSON where asked.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import launch, models
from benchmarks.figures import Result, medians, show
from benchmarks.work import Work

WARM_UP = 2
"""Steps that are not counted: kernels are compiled, caches filled."""
FLOORS = ("generate", "forward", "train", "copy")


def main() -> int:
    """Measure, print, and write JSON where asked: once the step is measured, and again with the floors."""
    launch.heed_sigterm()
    options = parse()
    with tempfile.TemporaryDirectory(prefix="roll-benchmark-", dir=options.scratch) as folder:
        work = work_of(options, Path(folder))
        sizes = ["--prompts", str(work.prompts), "--prompt-tokens", str(work.prompt_tokens), "--dtype", options.dtype]
        # In a process of its own: this one must hold no memory of a GPU.
        launch.run(["-m", "benchmarks.models", options.model, work.model, *sizes], work.scratch, options.logs, "models")
        result = Result(asdict(work), launch.versions(), measure_step(work, options), {}, WARM_UP)
        launch.write(result.summary(), options.json)
        for kind in options.floors.split(",") if options.floors else ():
            result = replace(result, floors=result.floors | medians(launch.floor(work, kind, options.logs)))
    show(result)
    launch.write(result.summary(), options.json)
    return 0


def parse() -> argparse.Namespace:
    """The command line; what depends on the model is filled in."""
    parser = launch.parser(__doc__)
    parser.add_argument("--infer-devices", help="GPUs that generate, one engine each (default: those that train)")
    parser.add_argument("--lora-rank", type=int, help="0 trains all parameters (default: 0, for tiny 16)")
    parser.add_argument("--sync", choices=("adapter", "merged"), default="adapter", help="what engines take of a LoRA policy")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="of ZeRO (default: 1, for tiny 3)")
    parser.add_argument(
        "--behaviour", choices=("engine", "trainer"), default="engine", help="where the behaviour policy's log-probs come from"
    )
    parser.add_argument("--steps", type=int, default=5, help=f"of which the first {WARM_UP} are not counted")
    parser.add_argument("--repetitions", type=int, default=2, help="of each floor, after one to warm up")
    parser.add_argument("--scale-work", action="store_true", help="64 prompts for each GPU that trains")
    parser.add_argument("--token-budget", type=int, help="tokens of a micro-batch (default: 20480, for tiny 8192)")
    parser.add_argument("--floors", default=",".join(FLOORS), help="which to measure, of these and generate_in_process; '' for none")
    options = parser.parse_args()
    tiny = options.model == "tiny"
    launch.fill(options, {"lora_rank": 16 if tiny else 0, "stage": 3 if tiny else 1, "token_budget": 8192 if tiny else 20480})
    options.dtype = "bfloat16" if options.devices else "float32"
    return options


def work_of(options: argparse.Namespace, scratch: Path) -> Work:
    """What the options ask for."""
    devices = launch.device_list(options.devices)
    tiny = options.model == "tiny"
    return Work(
        model=str(scratch / "model"),
        shape=models.SHAPES[options.model],
        dtype="bf16" if devices else "fp32",
        devices=devices,
        infer_devices=launch.device_list(options.infer_devices or options.devices),
        train_ranks=len(devices) or 2,
        score_ranks=len(devices) or 1,
        prompts=64 * (len(devices) if options.scale_work and devices else 1),
        samples=8,
        prompt_tokens=16 if tiny else 128,
        response_tokens=32 if tiny else 512,
        token_budget=options.token_budget,
        lora_rank=options.lora_rank,
        sync=options.sync,
        behaviour=options.behaviour,
        stage=options.stage,
        repetitions=options.repetitions,
        scratch=str(scratch),
    )


def overrides(work: Work, steps: int) -> dict[str, Any]:
    """The keys of the experiment that the work decides."""
    engine = "actor_infer.strategy_args.strategy_config"
    keys: dict[str, Any] = {
        "output_dir": f"{work.scratch}/run",
        "pretrain": work.model,
        "max_steps": steps,
        "behaviour_log_probs": work.behaviour,
        "rollout_batch_size": work.prompts,
        "prompt_length": work.prompt_tokens,
        "response_length": work.response_tokens,
        "actor_train.training_args.per_device_train_batch_size": work.sequences // work.train_ranks,
        "actor_train.strategy_args.strategy_config.zero_optimization.stage": work.stage,
        f"{engine}.max_num_seqs": 512,
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
        keys |= {f"{engine}.kv_cache_gib": work.kv_cache_bytes / (1 << 30), "actor_train.system_envs.OMP_NUM_THREADS": '"1"'}
    return keys


def measure_step(work: Work, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The metrics of every step."""
    name = "step_lora" if work.lora_rank else "step_full"
    return launch.pipeline(name, overrides(work, options.steps), options.overrides, work, options.logs, "step")


if __name__ == "__main__":
    sys.exit(main())
