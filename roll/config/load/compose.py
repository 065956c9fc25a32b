"""Composes configurations from a command line. Hydra only composes, once for each job of a sweep; no job runs inside
Hydra.

`python -m roll.pipeline --config-name NAME key=value ...` looks NAME up among the shipped experiments, or in
`--config-path`/`--config-dir`. `key=value` sets a key or adds it, so that unknown keys are reported by roll's own
checks and not by Hydra. Hydra writes nothing: no run folder, no logs, no copy of the configuration.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType, RangeSweep
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from yaml import MarkedYAMLError, YAMLError

from roll.config.load.flags import PROGRAM, checked_flags, missing_plugin, plugin_faults, version_line
from roll.config.load.limits import FLATTEN, check_file, word_faults
from roll.config.load.loader import resolution_fault
from roll.config.roll_v2.keys import CRITIC_START, VARIABLES
from roll.config.shipped import PRESETS, examples_folder, experiments, find_experiment, find_in, preset_names
from roll.errors import ConfigError, Fault, RollError

QUIET = (
    "hydra.job.name=roll.pipeline",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)
MOST_JOBS = 1000
"""Largest number of jobs in a sweep."""
USAGE = f"""{PROGRAM} --config-name NAME [key=value ...]

  dry_run=true       print the plan and exit
  --config-path DIR  look NAME up in this folder (also --config-dir)
  --cfg job          print the composed configuration; with --resolve, after interpolation
  --multirun         one run for each combination of key=a,b
  --info             print how Hydra composed the configuration, and from which files
  --version          print the versions of roll and of Hydra
  --hydra-help       print Hydra's other flags

Experiments:
"""


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line."""

    file: Path | None
    """File of the experiment, None if Hydra only prints information."""
    flags: tuple[str, ...]
    """Flags for Hydra, unchanged."""
    overrides: tuple[str, ...]
    """Overrides for Hydra, unchanged."""


def parse(argv: Sequence[str]) -> CommandLine:
    """Find the experiment, and separate flags from overrides.

    Raises:
        ConfigError: the name is missing, unknown or ambiguous, or the folder or a flag is unknown.
        SystemExit: 0 after `--version` and after `--help` without a name, 2 for a flag without its value.
    """
    ours = argparse.ArgumentParser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    ours.add_argument("--config-name", "-cn")
    ours.add_argument("--config-path", "-cp")
    ours.add_argument("--config-dir", "-cd")
    if faults := list(word_faults(argv)):
        raise ConfigError(faults)
    given, rest = ours.parse_known_args(argv)
    overrides = tuple(word for word in rest if not word.startswith("-") and ("=" in word or word.startswith("~")))
    flags = tuple(checked_flags([word for word in rest if word not in overrides]))
    if "--version" in flags:
        print(version_line())
        raise SystemExit(0)
    if given.config_name is None:
        if {"--help", "-h"} & set(flags):
            Console().out(
                USAGE + "\n".join(f"  {name}" for name in experiments()), highlight=False
            )  # rich exits quietly under `| head`
            raise SystemExit(0)
        if "--hydra-help" not in flags:
            raise ConfigError([Fault("--config-name", "missing", f"use one of: {', '.join(experiments())}")])
        return CommandLine(None, flags, overrides)
    option = "--config-path" if given.config_path else "--config-dir"
    folder = given.config_path or given.config_dir
    file = find_in(Path(folder).resolve(), given.config_name, option) if folder else find_experiment(given.config_name)
    if given.config_path and given.config_dir:
        flags += (f"--config-dir={given.config_dir}",)
    return CommandLine(file, flags, overrides)


def compose(argv: Sequence[str], check: Callable[[DictConfig, set[str]], None]) -> None:
    """Compose the configuration of the command line, or one for each job of a sweep, and call `check` with each.

    With flags such as `--cfg` and `--info`, Hydra prints and `check` is not called.

    Args:
        argv: The words after the program's name.
        check: Called with the composed configuration and the root keys that only `${...}` uses: the names of presets,
            and the names of ROLL's variables that the command line does not set. It must not run the job.

    Raises:
        ConfigError: the name or an override is wrong, or Hydra cannot compose the configuration.
        RollError: any error of `check`.
        SystemExit: 0 after help, 2 for a wrong flag.
    """
    line = parse(argv)
    overrides = list(line.overrides)
    passing: set[str] = set()
    if line.file:
        _refuse_long_sweeps([_parsed(word) for word in overrides])
        on_the_line = {_parsed(word).key_or_group for word in overrides}
        passing = preset_names(line.file.parent.parent / PRESETS) | (set(VARIABLES) - on_the_line - {CRITIC_START})
        overrides = [_add_or_override(word, line.file.parent) for word in overrides]
    with tempfile.TemporaryDirectory(prefix="roll-sweep-") as scratch:
        quiet = [*QUIET, "hydra.run.dir=.", f"hydra.sweep.dir={scratch}", "hydra.sweep.subdir=."] if line.file else []
        quiet += _search_path(line)
        _run_hydra(line.file, [*line.flags, *quiet, *overrides], lambda composed: check(composed, passing))


def _run_hydra(file: Path | None, words: Sequence[str], task: Callable[[DictConfig], None]) -> None:
    """Call `hydra.main` with `words`. Raise the errors that Hydra would only print before it exits with status 1."""
    argv, errors = sys.argv, io.StringIO()
    path, name = (str(file.parent), file.stem) if file else (None, None)
    sys.argv = ["roll.pipeline", *words]
    try:
        with contextlib.redirect_stderr(errors), _hydra_warnings(), _files_checked(), _overrides_checked():
            hydra.main(version_base="1.3", config_path=path, config_name=name)(task)()
    except SystemExit as stop:
        if stop.code != 1:
            sys.stderr.write(errors.getvalue())
            raise
        cause = stop.__context__
        if not isinstance(cause, Exception):
            raise ConfigError(
                [Fault("command line", errors.getvalue().strip() or "Hydra stopped", "see --hydra-help")]
            ) from None
        raise (_translated(cause) or cause) from None
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, RecursionError) as cause:
        raise (_translated(cause) or ConfigError([Fault("command line", str(cause), "see --hydra-help")])) from None
    else:
        sys.stderr.write(errors.getvalue())
    finally:
        sys.argv = argv


@contextlib.contextmanager
def _hydra_warnings() -> Iterator[None]:
    """Silence Hydra's warning about ROLL's files, whose defaults have no `_self_`. Hydra then appends `_self_`, as they
    expect.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Defaults list is missing `_self_`", category=UserWarning)
        yield


def _search_path(line: CommandLine) -> list[str]:
    """Return the override that lets a file outside the examples include the shipped presets as `../config/NAME@_here_`.

    The list is empty for a file inside the examples, if no file is given, and if the command line sets the search path.
    """
    if line.file is None or line.file.is_relative_to(examples_folder()):
        return []
    if any(word.lstrip("+").startswith("hydra.searchpath") for word in line.overrides):
        return []
    return [f"hydra.searchpath=['file://{examples_folder() / PRESETS}']"]


def _parsed(word: str) -> Override:
    """Parse one override.

    Raises:
        ConfigError: the word does not follow Hydra's grammar.
    """
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException as error:
        reason = str(error).split("\n")[0]
        key, _, value = word.partition("=")
        remedy = "write key=value, and quote a value with special characters: key='\\'a,b\\''"
        if value == "~":
            remedy = f"write {key}=null; ~ means null only in files"
        elif "(" in value:
            remedy = f"quote it twice: '{key}=\"{value}\"'"
        raise ConfigError([Fault("command line", f"'{word}' is not an override: {reason}", remedy)]) from None


def _refuse_long_sweeps(overrides: Sequence[Override]) -> None:
    """Refuse a sweep with too many jobs, because Hydra lists all of them before the first one.

    Raises:
        ConfigError: the sweep has more than `MOST_JOBS` jobs.
    """
    jobs = 1
    for override in overrides:
        swept = override.value()
        if isinstance(swept, RangeSweep) and swept.start is not None and swept.stop is not None:
            jobs *= max(1, math.ceil((swept.stop - swept.start) / (swept.step or 1)))
        elif isinstance(swept, ChoiceSweep):
            jobs *= len(swept.list)
    if jobs > MOST_JOBS:
        raise ConfigError([Fault("command line", f"the sweep has {jobs:,} jobs", f"use at most {MOST_JOBS:,}")])


def _add_or_override(word: str, folder: Path) -> str:
    """Return `key=value` as `++key=value`.

    Overrides that set a key of Hydra, choose an option of a group, or already delete or add a key are returned
    unchanged.
    """
    override = _parsed(word)
    key = override.key_or_group
    plain = override.type is OverrideType.CHANGE and override.package is None
    if not plain or key.split(".")[0] == "hydra" or "/" in key or (folder / key).is_dir():
        return word
    return f"++{word}"


@contextlib.contextmanager
def _files_checked() -> Iterator[None]:
    """Within this context, check every file before Hydra loads it, because some files would crash Hydra. Hydra has no
    hook for this.
    """
    load = ConfigRepository.load_config

    def check_and_load(self: ConfigRepository, config_path: str) -> ConfigResult | None:
        source = self._find_object_source(config_path=config_path, object_type=ObjectType.CONFIG)
        if source is not None and source.scheme() == "file":
            check_file(
                Path(source.path) / (config_path if config_path.endswith((".yaml", ".yml")) else f"{config_path}.yaml")
            )
        return load(self, config_path)

    ConfigRepository.load_config = check_and_load
    try:
        yield
    finally:
        ConfigRepository.load_config = load


@contextlib.contextmanager
def _overrides_checked() -> Iterator[None]:
    """Within this context, check overrides after Hydra has composed the files and before it applies the overrides.

    Earlier, the interpolations are not known yet; later, the overrides have replaced some of them. Hydra has no hook
    for this.
    """
    apply = ConfigLoaderImpl._apply_overrides_to_config

    def check_and_apply(overrides: list[Override], cfg: DictConfig) -> None:
        if foreign := list(plugin_faults(cfg.hydra)):
            raise ConfigError(foreign)
        _refuse_partial_blocks([override.key_or_group for override in overrides], cfg)
        _refuse_deleted_items([override.key_or_group for override in overrides if override.is_delete()], cfg)
        apply(overrides, cfg)

    ConfigLoaderImpl._apply_overrides_to_config = staticmethod(check_and_apply)
    try:
        yield
    finally:
        ConfigLoaderImpl._apply_overrides_to_config = staticmethod(apply)


def _refuse_partial_blocks(keys: Sequence[str], composed: DictConfig) -> None:
    """Refuse an override of one key of a block that refers to a preset, such as `strategy_config: ${deepspeed_zero3}`.

    The override would replace the whole block with that one key.

    Args:
        keys: The keys of the overrides, in the order in which Hydra will apply them.
        composed: The composed files, before any override.

    Raises:
        ConfigError: an override sets such a key.
    """
    files, faults = OmegaConf.to_container(composed, resolve=False), []
    for key in keys:
        node: object = files
        steps = key.split(".")
        for depth, step in enumerate(steps[:-1], start=1):
            node = node.get(step) if isinstance(node, dict) else None
            if isinstance(node, str) and node.startswith("${") and steps[0] != "hydra":
                target = ".".join([node.removeprefix("${").removesuffix("}"), *steps[depth:]])
                problem = f"{'.'.join(steps[:depth])} is {node}; setting one key inside would drop all the others"
                faults.append(Fault(key, problem, f"set {target} instead"))
    if faults:
        raise ConfigError(faults)


def _refuse_deleted_items(keys: Sequence[str], composed: DictConfig) -> None:
    """Refuse to delete items of lists. Hydra only deletes keys of blocks.

    Raises:
        ConfigError: an override deletes an item of a list.
    """
    files, faults = OmegaConf.to_container(composed, resolve=False), []
    for key in keys:
        node: object = files
        *steps, _ = key.split(".")
        for step in steps:
            node = node.get(step) if isinstance(node, dict) else None
        if isinstance(node, list):
            where = ".".join(steps)
            faults.append(
                Fault(
                    f"~{key}",
                    f"{where} is a list, and items of lists cannot be deleted",
                    f"set the whole list: {where}=[...]",
                )
            )
    if faults:
        raise ConfigError(faults)


def _translated(cause: Exception) -> RollError | None:
    """Return an error of composition as a `RollError`, or None for an unrelated error."""
    if isinstance(cause, RollError):
        return cause
    if isinstance(cause, MarkedYAMLError):
        mark = cause.problem_mark or cause.context_mark
        place = f"{mark.name}:{mark.line + 1}" if mark else "YAML"
        return ConfigError(
            [Fault(place, f"this is not YAML: {cause.problem or cause.context}", "fix this line of the file")]
        )
    if isinstance(cause, RecursionError):
        problem = "blocks, lists or references are nested too deeply, or refer to themselves"
        return ConfigError([Fault("configuration", problem, FLATTEN)])
    if isinstance(cause, ValueError) and "integer string conversion" in str(cause):
        return ConfigError(
            [Fault("configuration", f"a whole number is too long: {str(cause).split(';')[0]}", "write a shorter one")]
        )
    if isinstance(cause, YAMLError):
        return ConfigError([Fault("YAML", f"the file cannot be read: {cause}", "fix the file")])
    if isinstance(cause, OmegaConfBaseException):
        return ConfigError([resolution_fault(cause)])
    if isinstance(cause, MissingConfigException):
        problem = " ".join(str(cause).split("Config search path")[0].split("Available options")[0].split())
        if foreign := missing_plugin(problem):
            return ConfigError([foreign])
        remedy = (
            f"correct the entry of `defaults`; presets are {', '.join(sorted(preset_names()))}, each as "
            f"../config/NAME@_here_; "
        )
        remedy += "shipped experiments are ../FOLDER/NAME@_here_, and files in the same folder are NAME"
        return ConfigError([Fault("defaults", problem, remedy)])
    if isinstance(cause, HydraException):
        inner = f": {cause.__cause__}" if cause.__cause__ else ""
        problem = " ".join(f"{cause}{inner}".split("\n    full_key")[0].split())
        return ConfigError(
            [
                Fault(
                    "command line or defaults",
                    problem,
                    "correct the override or the entry of `defaults`; see --info defaults",
                )
            ]
        )
    return None
