"""Compares the tiny task's accuracy with generation ahead of training and with synchronous training, over several
seeds.

The table has the standard deviation over the seeds and 95% intervals: Student's for a mean, Welch's for a difference to
synchronous runs. A variant with one seed has no interval, and its difference carries no evidence.

    python benchmarks/staleness.py [--variants synchronous ratio_1 ...] [--seeds 3] [--steps 30] [--device 0] [--folder
        FOLDER]

    variants: synchronous
              ratio_1, ratio_2                     ratios are taken against the log-probs of the engine
              ratio_1_corrected, ratio_2_corrected ratios are taken against those of the trainer, with truncated
                  importance sampling
              partial, partial_turns               ratio 1 with engine and trainer on the same GPU, resident or taking
                  turns

All runs start from the same warmed-up policy and train on 512 responses per step. The figure of a run is the mean of
its last three validations. Without `--device` everything runs on the CPU, where there are no partial rollouts. Runs are
kept in `--folder`, and completed ones are not repeated, so the variants can be run in several calls.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.algorithms import ACCURACY, QUIET, pipeline, preparation, tiny_keys, whole_run
from benchmarks.intervals import Sample, difference_with_interval, mean_with_interval

SYNCHRONOUS = "synchronous"
CORRECTED = {"behaviour_log_probs": "trainer", "mismatch_correction": "tis"}
UNCORRECTED = {"behaviour_log_probs": "engine"}
VARIANTS: Mapping[str, Mapping[str, object]] = {
    SYNCHRONOUS: {},
    "ratio_1": {"async_generation_ratio": 1} | UNCORRECTED,
    "ratio_1_corrected": {"async_generation_ratio": 1} | CORRECTED,
    "ratio_2": {"async_generation_ratio": 2} | UNCORRECTED,
    "ratio_2_corrected": {"async_generation_ratio": 2} | CORRECTED,
    "partial": {"async_generation_ratio": 1, "time_sharing": "false"} | UNCORRECTED,
    "partial_turns": {"async_generation_ratio": 1} | UNCORRECTED,
}
ON_GPU = ("partial", "partial_turns")
EVERY, LAST = 5, 3
"""Steps between two validations, and the number of last validations that a run's figure averages."""


def main() -> int:
    """Run the remaining variants, and print the table. Return 0, or the exit status of the failed command."""
    options = parse()
    for command in preparation(options.folder):
        if status := subprocess.run([sys.executable, *command], env=QUIET, check=False).returncode:
            return status
    for name in options.variants:
        for seed in range(options.seeds):
            folder = run_folder(options.folder, name, seed, options.device)
            if figure(folder, options.steps) is None:
                print(f"== {name}, seed {seed}", flush=True)
                command = [
                    sys.executable,
                    *arguments(name, seed, options.steps, folder, options.folder, options.device),
                ]
                done = subprocess.run(
                    command, env=QUIET, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
                if done.returncode:
                    print(done.stdout, file=sys.stderr)
                    return done.returncode
    found = figures(options.folder, options.steps, options.device)
    print(table_of({name: Sample.of(values) for name, values in found.items()}))
    return 0


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        metavar="NAME",
        help="variants to run (default: all that the device supports)",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", type=int, help="GPU of all roles (default: the CPU)")
    parser.add_argument("--folder", type=Path, default=Path("output/benchmark-staleness"))
    options = parser.parse_args()
    options.variants = options.variants or [
        name for name in VARIANTS if options.device is not None or name not in ON_GPU
    ]
    if options.device is None and (refused := [name for name in options.variants if name in ON_GPU]):
        parser.error(f"--variants {' '.join(refused)}: give --device, a GPU")
    if options.steps < EVERY * LAST:
        parser.error(f"--steps {options.steps}: give at least {EVERY * LAST}, for {LAST} validations")
    return options


def run_folder(folder: Path, name: str, seed: int, device: int | None) -> Path:
    """Return the folder of a run, separate for GPU and CPU."""
    return folder / ("cpu" if device is None else "gpu") / f"{name}-{seed}"


def arguments(name: str, seed: int, steps: int, folder: Path, world: Path, device: int | None) -> list[str]:
    """Return the arguments of the interpreter that run a variant."""
    keys = tiny_keys(seed, steps, EVERY, folder, world)
    return pipeline(
        "tiny/tiny_rlvr_lora_zero3", {**keys, **VARIANTS[name], **({} if device is None else placed(device))}
    )


def placed(device: int) -> dict[str, object]:
    """Return the keys that place all roles on one GPU, with as many sequences per update as on the CPU."""
    roles = ("actor_train", "actor_infer", "reference")
    mappings = {f"{role}.device_mapping": f"[{device}]" for role in roles}
    sizes = {f"{role}.world_size": "null" for role in roles}
    engine = {
        "gpu_memory_utilization": 0.3,
        "enforce_eager": "true",
        "engine_args": "{kv_cache_memory_bytes: 1073741824}",
    }
    # Compilation takes longer than these few steps.
    compiled = {f"{role}.model_args.compile_layers": "false" for role in ("actor_train", "reference")}
    merged = {"weight_sync.lora": "merged"}  # vLLM has no fp32 adapters on a GPU
    settings = {f"actor_infer.strategy_args.strategy_config.{key}": value for key, value in engine.items()}
    return {**mappings, **sizes, **settings, **compiled, **merged}


def figure(folder: Path, steps: int) -> float | None:
    """Return the mean accuracy of the last validations, in percent. None if the run is incomplete."""
    lines = whole_run(folder, steps)
    return (
        None if lines is None else 100 * statistics.mean([line[ACCURACY] for line in lines if ACCURACY in line][-LAST:])
    )


def figures(folder: Path, steps: int, device: int | None) -> dict[str, list[float]]:
    """Return the figure of every completed run by variant, in the order of seeds."""
    found: dict[str, list[float]] = {}
    for name in VARIANTS:
        runs = run_folder(folder, name, 0, device).parent.glob(f"{name}-*")
        seeds = {int(seed): one for one in runs if (seed := one.name.removeprefix(f"{name}-")).isdigit()}
        folders = [seeds[seed] for seed in sorted(seeds)]
        if values := [value for one in folders if (value := figure(one, steps)) is not None]:
            found[name] = values
    return found


def table_of(found: Mapping[str, Sample]) -> str:
    """Return a Markdown table with a row for each variant, and its difference to the synchronous runs."""
    lines = [
        "| variant | mean [95% interval] | sd | seeds | minus synchronous [95% interval] |",
        "|---|---|---|---|---|",
    ]
    base = found.get(SYNCHRONOUS)
    for name, sample in found.items():
        against = "" if base is None or name == SYNCHRONOUS else difference_with_interval(sample, base)
        sd = "" if sample.sd is None else f"{sample.sd:.1f}"
        lines.append(f"| `{name}` | {mean_with_interval(sample)} | {sd} | {sample.count} | {against} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
