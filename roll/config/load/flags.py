"""The flags of the command line: those of Hydra that work here, roll's own, and the refused ones of other programs."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import NoReturn

from rich.console import Console

from roll.config.load.accelerate_file import accelerate_fault, read_accelerates
from roll.config.schema.faults import LEARNERS, counterpart_of
from roll.config.schema.fields import paths_of_key
from roll.config.schema.foreign_names import HYDRA_FLAGS, ROLES
from roll.config.schema.pipelines import PIPELINES
from roll.config.schema.roles import ExperimentConfig
from roll.config.shipped import experiments, misplaced_file
from roll.errors import ConfigError, Fault

MODULE = "roll.pipeline"
PROGRAM = f"python -m {MODULE}"
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
"""Values of `--info`."""
ACCELERATES = ("--config_file", "--config-file")
"""The flag of `accelerate launch` for its configuration."""
FILES = ("--config", *ACCELERATES)
"""Flags of other programs for the file of their configuration."""
COMPLETION = ("--shell-completion", "-sc")
MOST_PLACES = 2
"""Largest number of places that a message names for one key."""
LAUNCHED = ("RANK", "LOCAL_RANK")
"""Variables that torchrun, `accelerate launch` and `deepspeed` set for each of their processes."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(Fault("command line", message, "see --help", "malformed"))


def flag_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _Parser(
        prog=PROGRAM, add_help=False, allow_abbrev=False, usage=f"{PROGRAM} --config-name NAME [key=value ...]"
    )
    add = parser.add_argument
    add("--config-name", "-cn", metavar="NAME", help="the experiment: a name from the list below, or of a file in DIR")
    add("--config-path", "-cp", metavar="DIR", help="look NAME up in this folder")
    add("--config-dir", "-cd", metavar="DIR", help="like --config-path; beside it, a second folder of groups")
    add("--resolve", action="store_true", help="with --cfg: print values in place of ${...}")
    add("--package", "-p", metavar="KEY", help="with --cfg: print only this block")
    add("--parallel", type=int, metavar="N", help="with --multirun: run N jobs at a time, each on GPUs of its own")
    add("overrides", nargs="*", metavar="key=value", help="set a key; dry_run=true prints the plan and exits")
    alone = parser.add_mutually_exclusive_group().add_argument
    alone("--run", "-r", action="store_true", help="run one job; this is the default")
    alone("--multirun", "-m", action="store_true", help="run one job for each combination of key=a,b")
    alone("--cfg", "-c", choices=("job", "hydra", "all"), help="print the composed configuration")
    alone("--info", "-i", choices=INFO, help="print how Hydra composes the configuration, and from which files")
    alone("--help", "-h", action="store_true", help="print this text; with a name, its groups and keys")
    alone("--hydra-help", action="store_true", help="print this text")
    alone(
        *COMPLETION,
        action="store_true",
        help="install=bash prints what `eval` needs to complete keys by Tab; also zsh and fish",
    )
    alone("--version", action="store_true", help="print the versions of roll and of Hydra")
    return parser


def parse_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Return the flags, and as `overrides` the other words.

    Raises:
        ConfigError: a flag is unknown or does not work here, or has no value or a wrong one.
        SystemExit: 0 after `--version`, `--hydra-help`, and `--help` without a name.
    """
    parser = flag_parser()
    words = list(argv)
    for place, word in enumerate(words):
        if word in ("--info", "-i") and not {*words[place + 1 : place + 2]} & {*INFO}:
            words[place] = "--info=all"  # the next word is not its value
    given, unknown = parser.parse_known_intermixed_args(words)
    if faults := list(_flag_faults(unknown, words)):
        raise ConfigError(*faults)
    if given.parallel is not None and given.parallel < 1:
        raise ConfigError(
            Fault("--parallel", f"{given.parallel} is below 1", "give the number of jobs", "out_of_range")
        )
    if given.version:
        print(f"roll {version('roll')}, Hydra {version('hydra-core')}")
        raise SystemExit(0)
    if given.hydra_help or given.help and given.config_name is None:
        names = "\n".join(f"  {name}" for name in experiments())
        Console().out(f"{parser.format_help()}\nexperiments:\n{names}", highlight=False)  # quiet under `| head`
        raise SystemExit(0)
    return given


def launcher_fault(environment: Mapping[str, str], argv: Sequence[str]) -> Fault | None:
    """Return the fault of a driver that a launcher started once for each rank, or None for a single driver."""
    if not all(name in environment for name in LAUNCHED):
        return None
    variables = ", ".join(f"{name}={environment[name]}" for name in (*LAUNCHED, "WORLD_SIZE") if name in environment)
    problem = f"{variables} are set: torchrun, accelerate launch or deepspeed started this process, one for each GPU"
    remedy = (
        f"start a single process, which starts the workers of all GPUs itself: {PROGRAM} {shlex.join(argv)}".rstrip()
    )
    unset = f"if no launcher started this process, first run: unset {' '.join((*LAUNCHED, 'WORLD_SIZE'))}"
    return Fault("command line", problem, f"{remedy}\n    {unset}", "not_supported")


def _flag_faults(unknown: Sequence[str], words: Sequence[str]) -> Iterator[Fault]:
    """Yield a fault for each flag among the words that the parser does not know. `words` are all of them."""
    for word in unknown:
        flag, _, value = word.partition("=")
        file = value or next(iter(words[words.index(word) + 1 :]), "")
        if flag in HYDRA_FLAGS:
            yield Fault(flag, *HYDRA_FLAGS[flag], "not_supported")
        elif flag in ACCELERATES and (others := read_accelerates(file)) is not None:
            yield accelerate_fault(f"{flag} {file}", others)
        elif flag in FILES and (fault := _file_fault(flag, file)):
            yield fault
        elif flag.startswith("-"):
            yield _unknown_flag(flag, value)


def _file_fault(flag: str, file: str) -> Fault | None:
    fault = misplaced_file(flag, file, "and this is not a flag of this command")
    is_missing = fault is not None and fault.code == "not_found"
    return None if is_missing and flag in ACCELERATES else fault


def _unknown_flag(flag: str, value: str) -> Fault:
    hyphens, name = flag.replace("_", "-"), flag.lstrip("-").replace("-", "_")
    if f"{hyphens} " in flag_parser().format_help():
        return Fault(flag, "is written with hyphens", f"write {hyphens}", "unknown_key")
    problem = "is not a flag of this command; configuration keys are written without --, as KEY=VALUE"
    remedy = counterpart_of(name, ExperimentConfig) or _key_remedy(name, value)
    return Fault(
        flag, problem, remedy or "see --help for the flags, and docs/configuration.md for the keys", "unknown_key"
    )


def _key_remedy(name: str, value: str) -> str | None:
    """Return the remedy for a key that was written as a flag, or None if no pipeline has a key of this name.

    `value` is what was written behind the flag's `=`; a switch without one is set to true. The places in roles that
    differ only in the role are one, and those nearest to the root come first.
    """
    roles: dict[str, list[str]] = {}
    for place in dict.fromkeys(place for schema in PIPELINES.values() for place in paths_of_key(schema, name)):
        head, _, tail = place.partition(".")
        is_of_role = head in ROLES and tail
        roles.setdefault(f"ROLE.{tail}" if is_of_role else place, []).extend([head] * bool(is_of_role))
    nearest = sorted(roles, key=lambda place: place.count("."))[:MOST_PLACES]
    own = ExperimentConfig.model_fields.get(name)
    shown = value or ("true" if own is not None and own.annotation is bool else "VALUE")
    return f"write {' or '.join(_written(place, roles[place], shown) for place in nearest)}" if nearest else None


def _written(place: str, roles: Sequence[str], value: str) -> str:
    """Return how to set a key: of the only role that has it, or with the names of those that do."""
    if len(roles) == 1:
        return f"{place.replace('ROLE', roles[0], 1)}={value}"
    named = sorted(roles, key=lambda role: role not in LEARNERS)  # trained ones first
    return f"{place}={value}" + (f" (ROLE is {', '.join(named)})" if named else "")
