"""Plans an SFT run with every DeepSpeed configuration for training in checkouts of other projects, as it is.

    python benchmarks/deepspeed_files.py CHECKOUT... [--warnings]

A configuration is a JSON file with `zero_optimization` or a batch size at its top level. The number of GPUs is the one
with which its batch sizes agree, otherwise 2. Prints a line for each file: `planned`, or the first fault. Files with
the same contents are planned once. The status is 1 if one ends with something else than a plan or faults.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hjson

from roll.api import load_config
from roll.errors import ConfigError

TRAINED = "sft_train"
KEYS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}
MOST_RANKS = 1024
WORDS = (
    "dry_run=true", f"~{TRAINED}.training_args", f"~{TRAINED}.model_args.dtype", f"~{TRAINED}.world_size",
    f"{TRAINED}.model_args.gradient_checkpointing=auto", f"~{TRAINED}.max_tokens_per_microbatch",
)  # fmt: skip
"""Overrides that leave to the file what it may say."""


def main(argv: Sequence[str] | None = None) -> int:
    """Plan all files and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="+", metavar="CHECKOUT")
    parser.add_argument("--warnings", action="store_true", help="print the warnings as well")
    options = parser.parse_args(argv)
    results: Counter[str] = Counter()
    for checkout in options.checkouts:
        for file, block in configurations(checkout):
            result, warned = planned(file, block)
            results[result.partition(":")[0]] += 1
            print(f"{file.relative_to(checkout.parent)}: {result}")
            for line in warned.splitlines() if options.warnings else ():
                print(f"    {line}")
    print(dict(results))
    return 1 if results["failed"] else 0


def configurations(checkout: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the configurations below a folder that are JSON, by their path."""
    seen: set[str] = set()
    for file in sorted(checkout.rglob("*.json")):
        try:
            text = file.read_text(encoding="utf-8")
            block = hjson.loads(text)
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(block, dict) and KEYS & block.keys() and text not in seen:
            seen.add(text)
            yield file, block


def planned(file: Path, block: Mapping[str, Any]) -> tuple[str, str]:
    """Return how planning with a file ended, and the warnings."""
    devices = ",".join(map(str, range(ranks(block))))
    words = [*WORDS, f"{TRAINED}.strategy_args.strategy_config='{file}'", f"{TRAINED}.device_mapping=[{devices}]"]
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        try:
            load_config("tiny/tiny_sft", words)
            result = "planned"
        except ConfigError as error:
            fault = error.faults[0]
            place = fault.place.removeprefix(f"{TRAINED}.strategy_args.strategy_config.")
            result = f"refused: {place}: {fault.problem} ({len(error.faults)} fault(s))"
        except Exception as error:
            result = f"failed: {type(error).__name__}: {error}"
    return result, said.getvalue()


def ranks(block: Mapping[str, Any]) -> int:
    """Return the number of ranks with which the batch sizes of a configuration agree, 2 if any number does."""
    whole, micro, steps = (
        block.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    tensor = block.get("tensor_parallel")
    split = tensor.get("autotp_size", 1) if isinstance(tensor, dict) else 1
    shared = math.prod(size for size in (split, block.get("sequence_parallel_size", 1)) if isinstance(size, int))
    if not isinstance(whole, int):
        return 2 * shared
    each = math.prod(size for size in (micro, steps) if isinstance(size, int))
    replicas = whole // each if isinstance(micro, int) else math.gcd(whole, 2)
    return max(1, min(replicas * shared, MOST_RANKS))


if __name__ == "__main__":
    sys.exit(main())
