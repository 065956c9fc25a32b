"""Random weights for a model's configuration: `python -m roll.models.initialise FOLDER OUT [--seed N]`.

A run starts from weights on the disk, so that all of its roles have the same and a run that resumes has them again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from roll.errors import BadInput, ConfigError, Fault
from roll.models.load import DTYPES, load_tokenizer, unreadable


def initialise(source: str, out: Path, seed: int, dtype: str, trust_remote_code: bool = False) -> None:
    """Write a model with random weights, as its class draws them, and its tokenizer. The folder appears when it is whole.

    Args:
        source: Folder or Hub name with a config.json and a tokenizer; weights are not read.
        dtype: `fp32`, `bf16` or `fp16`: of the weights that are written.

    Raises:
        ConfigError: `out` exists, or the configuration cannot be read.
        DataError: the tokenizer cannot be read.
    """
    if out.exists():
        raise ConfigError([Fault("OUT", f"'{out}' exists", "give a folder that does not, or remove it")])
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError([unreadable(source, "configuration", error)]) from error
    tokenizer = load_tokenizer(source, trust_remote_code)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(DTYPES[dtype]).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    os.rename(partial, out)


def main() -> int:
    """Write the model that the command line names. Return 0, or 2 if its configuration cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m roll.models.initialise", description=__doc__)
    parser.add_argument("folder", help="folder or Hub name with config.json and a tokenizer")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--trust-remote-code", action="store_true")
    given = parser.parse_args()
    try:
        initialise(given.folder, given.out, given.seed, given.dtype, given.trust_remote_code)
    except BadInput as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
