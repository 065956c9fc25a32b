"""Command-line flags: the flags of Hydra that work here, and replacements for all others."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import zip_longest

from pydantic import BaseModel

from roll.config.schema.fields import paths_of_key
from roll.config.schema.other_names import counterpart_of
from roll.config.schema.pipelines import PIPELINES
from roll.config.schema.roles import ExperimentConfig
from roll.errors import ConfigError, Fault

PROGRAM = "python -m roll.pipeline"
NAMES = ("--config-name", "--config-path", "--config-dir")
"""Flags that `roll.config.load.compose` reads itself."""
FLAGS = (
    *("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--resolve", "--package", "-p"),
    *("--run", "-r", "--multirun", "-m", "--info", "-i"),
)
"""Hydra's flags that work here."""
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
"""Values of `--info`."""
COMPLETION = "Hydra can only complete the keys of a program's default configuration, and ignores --config-name"
REFUSED: Mapping[str, tuple[str, str]] = {
    "--shell-completion": (COMPLETION, "--help lists the experiments, and `--cfg job` prints the keys of one"),
    "-sc": (COMPLETION, "--help lists the experiments, and `--cfg job` prints the keys of one"),
    "--experimental-rerun": (
        "Hydra writes no files here from which a run could be repeated",
        "start the same command again; with the same output_dir it continues from the last checkpoint",
    ),
}
"""Flags of Hydra that are refused, with reason and remedy."""
LAUNCHED = ("RANK", "LOCAL_RANK")
"""Variables that torchrun, `accelerate launch` and `deepspeed` set for each of their processes."""
PLUGINS = {
    "launcher": (
        "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
        "the jobs of a sweep run one after the other on the same devices, once all of them are checked",
        "remove it; to run jobs in parallel, start one command for each, with its own output_dir "
        "(examples/slurm/rlvr.sbatch is an example for Slurm)",
    ),
    "sweeper": (
        "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
        "all jobs of a sweep are checked before the first one starts, so a sweeper cannot choose a job by the result "
        "of another",
        "remove it, and list the values: --multirun KEY=A,B; for a search, start one command for each trial and read "
        "metrics.jsonl in its output_dir",
    ),
}
"""By kind of Hydra plugin: the only one that works, the reason why others do not, and the remedy."""


def checked_flags(flags: Sequence[str]) -> list[str]:
    """Return the flags for Hydra. `all` is added after a bare `--info`, because Hydra would otherwise read the next
    word as its value.

    Raises:
        ConfigError: a flag is unknown, or does not work here.
    """
    if faults := list(_flag_faults(flags)):
        raise ConfigError(faults)
    words: list[str] = []
    for flag, after in zip_longest(flags, flags[1:]):
        words += [flag, "all"] if flag in ("--info", "-i") and after not in INFO else [flag]
    return words


def version_line() -> str:
    """Return the line that `--version` prints."""
    return f"roll {version('roll')}, Hydra {version('hydra-core')}"


def launcher_fault(environment: Mapping[str, str], argv: Sequence[str]) -> Fault | None:
    """Return the fault of a driver that a launcher started once for each rank, or None for a single driver."""
    if not all(name in environment for name in LAUNCHED):
        return None
    said = ", ".join(f"{name}={environment[name]}" for name in (*LAUNCHED, "WORLD_SIZE") if name in environment)
    problem = f"{said} are set: torchrun, accelerate launch or deepspeed started this process, one for each GPU"
    remedy = (
        f"start a single process, which starts the workers of all GPUs itself: {PROGRAM} {shlex.join(argv)}".rstrip()
    )
    unset = f"if no launcher started this process, first run: unset {' '.join((*LAUNCHED, 'WORLD_SIZE'))}"
    return Fault("command line", problem, f"{remedy}\n    {unset}")


def plugin_faults(hydra: Mapping[str, Mapping[str, object]]) -> Iterator[Fault]:
    """Yield faults of launchers and sweepers other than Hydra's basic ones. `hydra` is Hydra's node of the composed
    configuration.
    """
    for kind, (works, why, remedy) in PLUGINS.items():
        chosen = hydra[kind].get("_target_")
        if chosen != works:
            yield Fault(f"hydra/{kind}", f"{chosen}, but {why}", remedy)


def missing_plugin(problem: str) -> Fault | None:
    """Return the fault of a plugin that Hydra does not find, or None if Hydra's message `problem` is about something
    else.
    """
    for kind, (_, why, remedy) in PLUGINS.items():
        if f"hydra/{kind}/" in problem:
            return Fault(f"hydra/{kind}", f"{problem}; and {why}", remedy)
    return None


def _flag_faults(flags: Sequence[str]) -> Iterator[Fault]:
    for word in flags:
        flag = word.partition("=")[0]
        if flag in REFUSED:
            why, remedy = REFUSED[flag]
            yield Fault(flag, why, remedy)
        elif flag.startswith("--") and flag not in FLAGS:
            yield _unknown_flag(flag)


def _unknown_flag(flag: str) -> Fault:
    hyphens, name = flag.replace("_", "-"), flag.removeprefix("--").replace("-", "_")
    if hyphens in (*NAMES, *FLAGS):
        return Fault(flag, "is written with hyphens", f"write {hyphens}")
    problem = "is not a flag of this command; configuration keys are written without --, as KEY=VALUE"
    found = counterpart_of(name, ExperimentConfig) or _key_remedy(name)
    return Fault(flag, problem, found or "see --help for the flags, and docs/configuration.md for the keys")


def _key_remedy(name: str) -> str | None:
    """Return the remedy for a key that was written as a flag, or None if no pipeline has a key of this name."""
    schemas: Sequence[type[BaseModel]] = tuple(PIPELINES.values())
    found = list(dict.fromkeys(place for schema in schemas for place in paths_of_key(schema, name)))
    return f"write {' or '.join(f'{place}=VALUE' for place in found[:4])}" if found else None
