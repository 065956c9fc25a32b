"""Flags of the command line: Hydra's that work here, and replacements of all others."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import zip_longest

from pydantic import BaseModel

from roll.config.schema.fields import homes
from roll.config.schema.other_names import counterpart_of
from roll.config.schema.pipelines import PIPELINES
from roll.config.schema.roles import ExperimentConfig
from roll.errors import ConfigError, Fault

PROGRAM = "python -m roll.pipeline"
NAMES = ("--config-name", "--config-path", "--config-dir")
"""Flags that `compose` itself reads."""
FLAGS = (
    *("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--resolve", "--package", "-p"),
    *("--run", "-r", "--multirun", "-m", "--info", "-i"),
)
"""Hydra's flags that work here."""
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
"""Values of `--info`."""
COMPLETION = "Hydra completes the keys of one configuration that a program has fixed, and ignores --config-name"
REFUSED: Mapping[str, tuple[str, str]] = {
    "--shell-completion": (COMPLETION, "--help lists the experiments, and `--cfg job` prints the keys of one"),
    "-sc": (COMPLETION, "--help lists the experiments, and `--cfg job` prints the keys of one"),
    "--experimental-rerun": (
        "Hydra writes nothing here that could be run again",
        "give the command of that run again; with the same output_dir it goes on from the last checkpoint",
    ),
}
"""Hydra's flags that are refused, with reason and remedy."""
LAUNCHED = ("RANK", "LOCAL_RANK")
"""Variables that torchrun, `accelerate launch` and `deepspeed` set for each of their processes."""
PLUGINS = {
    "launcher": (
        "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
        "the jobs of a sweep run one after the other on the same devices, as soon as all are checked",
        "remove it; to run them side by side start one command for each, with an output_dir of its own; examples/slurm/rlvr.sbatch is "
        "one for Slurm",
    ),
    "sweeper": (
        "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
        "all jobs of a sweep are known and checked before the first, so nothing can choose the next by the last one's result",
        "remove it; list the values: --multirun KEY=A,B; a search of your own starts one command for each trial and reads "
        "metrics.jsonl in its output_dir",
    ),
}
"""By kind of Hydra's plugins: the one that works, the reason against others, and the remedy."""


def checked_flags(flags: Sequence[str]) -> list[str]:
    """Return the flags for Hydra, which reads the word after a bare `--info` as its value.

    Raises:
        ConfigError: one of them is not a flag of Hydra, or does not work here.
    """
    if faults := list(_flag_faults(flags)):
        raise ConfigError(faults)
    words: list[str] = []
    for flag, after in zip_longest(flags, flags[1:]):
        words += [flag, "all"] if flag in ("--info", "-i") and after not in INFO else [flag]
    return words


def version_line() -> str:
    """For `--version`."""
    return f"roll {version('roll')}, Hydra {version('hydra-core')}"


def launcher_fault(environment: Mapping[str, str], argv: Sequence[str]) -> Fault | None:
    """Return the fault of a driver that a launcher started once for each rank, None for a single driver."""
    if not all(name in environment for name in LAUNCHED):
        return None
    said = ", ".join(f"{name}={environment[name]}" for name in (*LAUNCHED, "WORLD_SIZE") if name in environment)
    problem = f"{said} are set: torchrun, accelerate launch or deepspeed started this process, one for each GPU"
    remedy = f"start one process, which starts those of all GPUs itself: {PROGRAM} {shlex.join(argv)}".rstrip()
    return Fault("command line", problem, f"{remedy}\n    if no launcher did, first: unset {' '.join((*LAUNCHED, 'WORLD_SIZE'))}")


def plugin_faults(hydra: Mapping[str, Mapping[str, object]]) -> Iterator[Fault]:
    """Return faults of launchers and sweepers other than Hydra's own. `hydra` is Hydra's node of the composed configuration."""
    for kind, (works, why, remedy) in PLUGINS.items():
        chosen = hydra[kind].get("_target_")
        if chosen != works:
            yield Fault(f"hydra/{kind}", f"{chosen}, but {why}", remedy)


def missing_plugin(problem: str) -> Fault | None:
    """Return the fault of a plugin that Hydra does not find, from its message."""
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
    problem = "is not a flag of this command; keys of the configuration are given without --, as KEY=VALUE"
    found = counterpart_of(name, ExperimentConfig) or _homes(name)
    return Fault(flag, problem, found or "see --help for the flags, docs/configuration.md for the keys")


def _homes(name: str) -> str | None:
    """Return the places of a key with this name in the pipelines."""
    schemas: Sequence[type[BaseModel]] = tuple(PIPELINES.values())
    found = list(dict.fromkeys(place for schema in schemas for place in homes(schema, name)))
    return f"write {' or '.join(f'{place}=VALUE' for place in found[:4])}" if found else None
