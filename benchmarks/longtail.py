"""Measures rollouts with long-tailed lengths: the same work synchronously, partially, asynchronously, and in the engine
alone.

    python benchmarks/longtail.py [--model tiny|0.5b|1.5b] [--variants saturated,synchronous,partial] [--devices 0]
        [--infer-devices 1] [--ratio 1] [--window 64] [--ahead KEY=VALUE] [--steps 10] [--json FILE] [KEY=VALUE ...]

    variants: saturated     vLLM's own `LLM` alone, which always has waiting requests (saturated.py)
              synchronous   trainer, reference and engines on the same devices, everything resident
              partial       as synchronous, but `--ratio` batches ahead: unfinished responses continue after the sync
              turns         as partial, but the roles take turns on the devices
              asynchronous  trainer and reference on --devices, engines on --infer-devices, `--ratio` batches ahead

The work is 32 prompts of 128 tokens x 8 samples. A model with random weights assigns about the same probability to all
tokens, and one of 1,024 ids is an end token in its generation_config.json. A response therefore ends with probability 1
/ 1,024 at each token, and has at most 4,096 tokens. For the tiny model, which needs no GPU, the mean is 16 tokens and
the limit 64.

Each variant except `saturated` is a run of `python -m roll.pipeline`. KEY=VALUE is passed to each run; --ahead adds a
key to all runs except `synchronous`. The first three steps are not counted. The table is also printed after an error or
an interrupt, with the variants measured so far. JSON is written after each variant.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import launch, rlvr
from benchmarks.longtail_figures import SATURATED, WARM_UP, Comparison, Run, Saturated, show
from benchmarks.work import LongTailWork

VARIANTS = (SATURATED, "synchronous", "partial", "turns", "asynchronous")
LEARNING_RATE = 1e-7
"""Learning rate. It is so small that the probabilities of tokens and the lengths of responses hardly change."""


def main() -> int:
    """Measure, print the figures, and write JSON on request after each variant."""
    launch.heed_sigterm()
    options = parse()
    with tempfile.TemporaryDirectory(prefix="roll-benchmark-", dir=options.scratch) as folder:
        work = work_of(options, Path(folder))
        settings = {
            "ratio": options.ratio,
            "window": options.window,
            "ahead": options.ahead,
            "overrides": options.overrides,
        }
        result = Comparison(work, settings, launch.versions())
        # Enough prompts that none is repeated, including those in flight at the end.
        rlvr.write_model(work, options, 2 * work.prompts * options.steps, work.end_tokens)
        try:
            for variant in options.variants:
                result = measured(result, variant, options)
                launch.write(result.summary(), options.json)
        finally:
            if result.runs or result.saturated:
                show(result)
    return 0


def measured(result: Comparison, variant: str, options: argparse.Namespace) -> Comparison:
    """Measure a variant. Return `result` with its measurements added."""
    work, logs = result.work, options.logs / variant if options.logs else None
    if variant == SATURATED:
        return replace(result, saturated=Saturated(**launch.floor(work, "generate_saturated", logs)))
    placed = replace(work, scratch=f"{work.scratch}/{variant}", infer_devices=places(variant, work))
    ahead = 0 if variant == "synchronous" else round(options.ratio * work.prompts) * work.samples
    lines = rlvr.measure(placed, overrides(variant, placed, options), options, logs)
    return replace(result, runs={**result.runs, variant: Run(work.sequences, placed.engines, ahead, lines)})


def places(variant: str, work: LongTailWork) -> tuple[int, ...]:
    """Return the GPUs of a variant's engines."""
    return work.infer_devices if variant == "asynchronous" else work.devices


def overrides(variant: str, work: LongTailWork, options: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration keys that a variant's run sets, with their values."""
    keys = rlvr.overrides(work, options.steps)
    keys |= {
        "actor_infer.generating_args.ignore_eos": "false",
        "actor_train.training_args.learning_rate": LEARNING_RATE,
    }
    if variant != "synchronous":
        keys |= {"async_generation_ratio": options.ratio, "rollout_window": options.window}
        keys |= dict(word.split("=", 1) for word in options.ahead)
    return keys | {"time_sharing": str(variant == "turns").lower()}


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    out = rlvr.parser(__doc__)
    out.add_argument(
        "--variants", default="saturated,synchronous,partial", help=f"variants to measure, out of {','.join(VARIANTS)}"
    )
    out.add_argument("--prompts", type=int, default=32, help="prompts per step")
    out.add_argument("--samples", type=int, default=8, help="responses per prompt")
    out.add_argument("--prompt-tokens", type=int, help="tokens per prompt (default: 128, for tiny 16)")
    out.add_argument("--mean", type=int, help="mean tokens per response without the limit (default: 1024, for tiny 16)")
    out.add_argument("--longest", type=int, help="largest number of tokens per response (default: 4096, for tiny 64)")
    out.add_argument("--ratio", type=float, default=1.0, help="async_generation_ratio of all runs except synchronous")
    out.add_argument("--window", type=int, help="rollout_window of these runs, in groups (default: --prompts)")
    out.add_argument(
        "--ahead", action="append", default=[], metavar="KEY=VALUE", help="a key for these runs only; may be repeated"
    )
    out.add_argument("--steps", type=int, default=10, help=f"steps of each run; the first {WARM_UP} are not counted")
    out.add_argument(
        "--max-num-seqs", type=int, default=rlvr.MAX_NUM_SEQS, help="sequences that an engine runs at once"
    )
    out.add_argument(
        "--kv-cache-gib",
        type=float,
        help="KV cache per engine (default: the mean need of --max-num-seqs sequences, plus a quarter)",
    )
    out.add_argument(
        "--repetitions",
        type=int,
        default=4,
        help="measured intervals of `saturated`, a quarter of the mean length each",
    )
    return out


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line (`sys.argv` if None) and fill in defaults that depend on the model.

    Raises:
        SystemExit: an option is invalid or contradicts another one.
    """
    command = parser()
    options = command.parse_args(arguments)
    tiny = options.model == "tiny"
    rlvr.fill(options)
    usual = {"prompt_tokens": 16 if tiny else 128, "mean": 16 if tiny else 1024, "longest": 64 if tiny else 4096}
    launch.fill(options, usual | {"window": options.prompts})
    options.variants = options.variants.split(",")
    if unknown := [variant for variant in options.variants if variant not in VARIANTS]:
        command.error(f"--variants {','.join(unknown)}: choose from {','.join(VARIANTS)}")
    if options.steps <= WARM_UP:
        command.error(f"--steps {options.steps}: the first {WARM_UP} are not counted; give at least {WARM_UP + 1}")
    if "asynchronous" in options.variants and options.devices and not options.infer_devices:
        command.error("--variants asynchronous: give --infer-devices, the GPUs of the engines")
    if unset := [word for word in options.ahead if "=" not in word]:
        command.error(f"--ahead {unset[0]}: give KEY=VALUE")
    if work_of(options, Path()).end_tokens < 1:
        command.error(f"--mean {options.mean}: even with a single end token the mean is shorter; give a smaller value")
    return options


def work_of(options: argparse.Namespace, scratch: Path) -> LongTailWork:
    """Return the work that the options describe. If the options give separate devices to the engines, it has these
    (`asynchronous`).
    """
    work = rlvr.work_of(
        options,
        scratch,
        prompts=options.prompts,
        samples=options.samples,
        prompt_tokens=options.prompt_tokens,
        response_tokens=options.longest,
        max_num_seqs=options.max_num_seqs,
    )
    return LongTailWork(**vars(work), mean=options.mean, kv_cache_gib=options.kv_cache_gib)


if __name__ == "__main__":
    sys.exit(main())
