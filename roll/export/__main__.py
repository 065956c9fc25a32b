"""`python -m roll.export CHECKPOINT_OR_RUN_FOLDER OUT [--format hf|peft|merged|fp32|universal]`.

Exit status: 0 success, 2 the arguments or the run's configuration cannot be used, 3 the checkpoint is damaged or the
export failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from roll.errors import ConfigError, Fault
from roll.export.quiet import quiet_libraries
from roll.stores.address import run_folder
from roll.system.command import run_command
from roll.system.own_folder import new_folder
from roll.tracking.life import ActivityDisplay

FORMATS = ("hf", "peft", "merged", "fp32", "universal")
HELP = (
    "hf: all weights of a fully trained policy, in their training precision. peft: the adapter. merged: the base model "
    "with the "
    "adapter merged in. fp32: all weights in fp32, with the adapter, if any, merged in. universal: a checkpoint that "
    "any number of ranks can resume from. Default: peft for LoRA, else hf."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the export that the command line describes. Return the exit status."""
    arguments = export_parser().parse_args(argv)

    def work() -> None:
        with ActivityDisplay(Console(stderr=True)) as life:
            life.driver(f"exporting {arguments.checkpoint}")
            form = export(arguments.checkpoint, arguments.out, arguments.format)
        print(f"{form}: {arguments.out}")

    return run_command(work)


def export_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    found = argparse.ArgumentParser("python -m roll.export", description="Convert a run's checkpoint for other tools.")
    found.add_argument(
        "checkpoint", type=run_folder, help="a run folder (uses its newest complete checkpoint), or a checkpoint folder"
    )
    found.add_argument("out", type=Path, help="folder to write, which must not exist yet")
    found.add_argument("--format", choices=FORMATS, help=HELP)
    return found


def export(path: Path, out: Path, wish: str | None) -> str:
    """Export a checkpoint to the folder `out`, which is written completely or not at all. Return the format.

    Args:
        path: a run folder or a checkpoint folder.
        wish: one of FORMATS. None means `peft` for LoRA, else `hf`.

    Raises:
        ConfigError: `out` exists or cannot be created, or the format does not fit the trained model.
        DataError: the model from which the training started cannot be read.
        CheckpointError: the checkpoint is incomplete or damaged.
    """
    from roll.export.source import find_source  # Imported here, so that `--help` does not need torch.

    if out.exists():
        raise ConfigError(
            Fault("out", f"'{out}' already exists", "give a folder that does not exist, or remove it", "already_exists")
        )
    source = find_source(path)
    is_lora = source.model_args.lora_target is not None
    form = wish or ("peft" if is_lora else "hf")
    fitting = ("peft", "merged", "fp32", "universal") if is_lora else ("hf", "fp32", "universal")
    if form not in fitting:
        trained = "the run trained an adapter" if is_lora else "the run trained all weights"
        raise ConfigError(
            Fault("--format", f"'{form}', but {trained}", f"set it to one of: {', '.join(fitting)}", "contradiction")
        )
    if source.pipeline == "reward_model" and form != "universal":
        problem = f"'{form}', but the run did not train a language model"
        raise ConfigError(
            Fault(
                "--format",
                problem,
                "set it to universal; the reward model itself is in export/ of the run folder",
                "not_supported",
            )
        )
    with quiet_libraries(), _atomic_folder(out) as folder:
        from roll.export import convert  # Imported here, so that the report of a wrong path does not need DeepSpeed.

        if form == "universal":
            convert.write_universal(source, folder)
        elif form == "peft":
            convert.write_peft(source, folder)
        elif is_lora:
            convert.write_merged(source, folder, exact=form == "fp32")
        else:
            convert.write_hf(source, folder, exact=form == "fp32")
        if form != "universal":
            convert.write_card(source, folder)
    return form


@contextmanager
def _atomic_folder(out: Path) -> Iterator[Path]:
    """Yield a folder that becomes `out` at the end, or is removed after an error. Raises ConfigError if it cannot."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(new_folder(out))
            folder.mkdir()
        except OSError as error:
            problem = f"'{out}' cannot be created: {error}"
            raise ConfigError(
                Fault("out", problem, "give a folder in a place that you can write to", "not_writable")
            ) from error
        yield folder


if __name__ == "__main__":
    sys.exit(main())
