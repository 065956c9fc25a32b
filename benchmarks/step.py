"""Compares a whole step with the floors of its parts, all measured in this call on this machine.

    python benchmarks/step.py [--model tiny|0.5b|1.5b|7b] [--devices 0] [--lora-rank 32] [--json FILE] [KEY=VALUE ...]

A step has 64 prompts of 128 tokens, and for each prompt 8 samples of exactly 512 tokens (`ignore_eos`). It has a
reference model and one optimizer update. For the tiny model, which needs no GPU, prompts have 16 tokens and samples 32.
The step runs through `python -m roll.pipeline`, which receives KEY=VALUE. Then each floor runs alone (floors.py).
Prints tables, and writes JSON if requested.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import launch, rlvr
from benchmarks.figures import Result, medians, show
from benchmarks.work import Work

WARM_UP = 2
"""Number of initial steps that are not counted, because kernels compile and caches fill."""
FLOORS = ("generate", "forward", "train", "copy")


def main() -> int:
    """Measure and print. If requested, write JSON twice: after the step, and again after the floors, with their
    figures.
    """
    launch.heed_sigterm()
    options = parse()
    with tempfile.TemporaryDirectory(prefix="roll-benchmark-", dir=options.scratch) as folder:
        work = work_of(options, Path(folder))
        rlvr.write_model(work, options, work.prompts)
        lines = rlvr.measure(work, rlvr.overrides(work, options.steps), options, options.logs)
        result = Result(asdict(work), launch.versions(), lines, {}, WARM_UP)
        launch.write(result.summary(), options.json)
        for kind in options.floors.split(",") if options.floors else ():
            result = replace(result, floors=result.floors | medians(launch.floor(work, kind, options.logs)))
    show(result)
    launch.write(result.summary(), options.json)
    return 0


def parse() -> argparse.Namespace:
    """Parse the command line and fill in defaults that depend on the model."""
    parser = rlvr.parser(__doc__)
    parser.add_argument("--steps", type=int, default=5, help=f"steps of the run; the first {WARM_UP} are not counted")
    parser.add_argument("--repetitions", type=int, default=2, help="repetitions of each floor, after one warm-up")
    parser.add_argument("--scale-work", action="store_true", help="use 64 prompts for each GPU that trains")
    usual = ",".join(FLOORS)
    parser.add_argument(
        "--floors",
        default=usual,
        help=f"floors to measure, out of {usual} (the default) and generate_in_process; '' for none",
    )
    options = parser.parse_args()
    rlvr.fill(options)
    return options


def work_of(options: argparse.Namespace, scratch: Path) -> Work:
    """Return the work that the options describe."""
    tiny, devices = options.model == "tiny", launch.device_list(options.devices)
    return rlvr.work_of(
        options,
        scratch,
        prompts=64 * (len(devices) if options.scale_work and devices else 1),
        samples=8,
        prompt_tokens=16 if tiny else 128,
        response_tokens=32 if tiny else 512,
        max_num_seqs=rlvr.MAX_NUM_SEQS,
    )


if __name__ == "__main__":
    sys.exit(main())
