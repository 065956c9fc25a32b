"""`python -m roll.export CHECKPOINT_OR_RUN_FOLDER OUT [--format hf|peft|merged|fp32|universal]`.

Exit status: 0 done, 2 the arguments or the checkpoint's configuration cannot be used, 3 the checkpoint is not whole, or it failed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from roll.errors import ConfigError, Fault, run_command

FORMATS = ("hf", "peft", "merged", "fp32", "universal")
HELP = (
    "hf: all weights of a policy that trained whole, in its precision. peft: the adapter. merged: the base model with the adapter "
    "merged in. fp32: all weights, an adapter merged in, in fp32. universal: a checkpoint that any number of ranks can resume from. "
    "Without it: peft with LoRA, else hf."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the export of the command line. Return the exit status."""
    arguments = parser().parse_args(argv)
    return run_command(lambda: print(f"{export(arguments.checkpoint, arguments.out, arguments.format)}: {arguments.out}"))


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    found = argparse.ArgumentParser("python -m roll.export", description="Turn a run's checkpoint into what other tools load.")
    found.add_argument("checkpoint", type=Path, help="a run folder, whose newest whole checkpoint is taken, or a checkpoint's folder")
    found.add_argument("out", type=Path, help="a folder that does not exist yet")
    found.add_argument("--format", choices=FORMATS, help=HELP)
    return found


def export(path: Path, out: Path, wish: str | None) -> str:
    """Write `out` completely or not at all. Return the written format.

    Raises:
        ConfigError: `out` exists or cannot be made, or the format does not suit what was trained.
        DataError: the model that the training began with is not where it was.
        CheckpointError: the checkpoint is not whole.
    """
    from roll.export import convert  # Here, so that `--help` and a wrong path need no torch.
    from roll.export.source import find_source

    if out.exists():
        raise ConfigError([Fault("out", f"'{out}' exists", "give a folder that does not exist, or remove it")])
    source = find_source(path)
    is_lora = source.model_args.lora_target is not None
    form = wish or ("peft" if is_lora else "hf")
    fitting = ("peft", "merged", "fp32", "universal") if is_lora else ("hf", "fp32", "universal")
    if form not in fitting:
        trained = "the run trained an adapter" if is_lora else "the run trained all weights"
        raise ConfigError([Fault("--format", f"'{form}', but {trained}", f"give one of: {', '.join(fitting)}")])
    if source.pipeline == "reward_model" and form != "universal":
        problem = f"'{form}', but the run did not train a language model"
        raise ConfigError([Fault("--format", problem, "give universal; the reward model itself is in export/ of the run folder")])
    with _whole(out) as folder:
        if form == "universal":
            convert.write_universal(source, folder)
        elif form == "peft":
            convert.write_peft(source, folder)
        elif is_lora:
            convert.write_merged(source, folder, exact=form == "fp32")
        else:
            convert.write_hf(source, folder, exact=form == "fp32")
    return form


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out`, which is renamed to `out` at the end, or removed after an error.

    Raises:
        ConfigError: there can be no folder.
    """
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
    except OSError as error:
        raise ConfigError([Fault("out", f"'{out}' cannot be made: {error}", "give a folder in a place that you can write to")]) from error
    try:
        yield aside
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
