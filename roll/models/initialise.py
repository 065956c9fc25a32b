"""Creates random weights for a model's configuration: `python -m roll.models.initialise FOLDER OUT [--seed N]`.

A run always starts from weights on disk, so that all of its roles, and a resumed run, load the same weights.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from roll.errors import BadInput, ConfigError, Fault
from roll.models.load import DTYPES, load_tokenizer
from roll.models.weight_files import unreadable
from roll.system.own_folder import new_folder


def initialise(source: str, out: Path, seed: int, dtype: str, trust_remote_code: bool = False) -> None:
    """Write a model with random weights, initialised by its class, and its tokenizer. The folder appears only when it
    is complete.

    Args:
        source: Folder or Hub name with a config.json and a tokenizer. Its weights are not read.
        out: The folder to write.
        dtype: Precision of the written weights: `fp32`, `bf16` or `fp16`.

    Raises:
        ConfigError: `out` exists, or the configuration cannot be read.
        DataError: the tokenizer cannot be read.
    """
    if out.exists():
        raise ConfigError(
            Fault(
                "OUT",
                f"'{out}' already exists",
                "give a folder that does not exist, or remove this one",
                "already_exists",
            )
        )
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(unreadable(source, "configuration", error)) from error
    tokenizer = load_tokenizer(source, trust_remote_code)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    with new_folder(out) as folder:
        model.to(DTYPES[dtype]).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def main() -> int:
    """Run the command line. Return 0, or 2 if the configuration or the tokenizer cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m roll.models.initialise", description=__doc__)
    parser.add_argument("folder", help="folder or Hub name with a config.json and a tokenizer")
    parser.add_argument("out", type=Path, help="folder to write, which must not exist")
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
