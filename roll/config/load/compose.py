"""Composes configurations from a command line by Hydra's compose API, one for each job of a sweep. No job runs inside
Hydra.

`python -m roll.pipeline --config-name NAME key=value ...` looks NAME up among the shipped experiments, or in
`--config-path`/`--config-dir`. `key=value` sets a key or adds it, so that unknown keys are reported by roll's own
checks and not by Hydra. Hydra writes nothing: no run folder, no logs, no copy of the configuration.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import isdir  # unlike Path.is_dir, False for a name that is too long
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from roll.config.load.flags import flag_parser, parse_flags
from roll.config.load.included import check_included, search_path_of
from roll.config.load.loader import FLATTEN, resolution_fault
from roll.config.schema.foreign_names import CRITIC_START, HYDRA_IDLE, HYDRA_PLUGINS, VARIABLES
from roll.config.shipped import (
    GROUP,
    PRESETS,
    deepspeed_presets,
    examples_folder,
    experiments,
    find_experiment,
    find_in,
    misplaced_file,
    preset_names,
)
from roll.errors import ConfigError, Fault

MOST_JOBS = 1000
"""Largest number of jobs in a sweep."""
COMPOSERS = ("hydra", "omegaconf")
"""Packages that compose files."""
SEARCH_PATH = "hydra.searchpath"
FOLDERS = ("hydra:runtime.output_dir", "hydra:run.dir", "hydra.run.dir", "hydra:sweep.dir", "hydra.sweep.dir")
"""Parts of values that refer to Hydra's output folder."""

CHOICES = "runtime.choices."
"""Start of the places where Hydra keeps the options of its own groups."""
OVERRIDES = "job.override_dirname"
"""Part of values that refer to the text of a job's overrides."""
OF_THE_RUN = ("output_dir", "exp_name", "dry_run")
"""Keys that are not part of that text."""


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line."""

    file: Path
    """File of the experiment."""
    flags: argparse.Namespace
    overrides: list[Override]
    folders: list[Path]
    """Folders with groups."""


def compose(argv: Sequence[str], check: Callable[[DictConfig, set[str]], None]) -> None:
    """Compose the configuration of the command line, or one for each job of a sweep, and call `check` with each.

    With `--cfg`, `--info` or `--help`, the answer is printed instead.

    Args:
        argv: The words after the program's name.
        check: Called with the composed configuration and the root keys that only `${...}` uses: the names of presets,
            and the names of ROLL's variables that the command line does not set. It must not run the job.

    Raises:
        ConfigError: the name, a flag or an override is wrong, or Hydra cannot compose the configuration.
        RollError: any error of `check`.
        SystemExit: 0 after `--version`, and after `--help` without a name.
    """
    line = parse(argv)
    keys = {override.key_or_group for override in line.overrides}
    passing = preset_names(line.file.parent.parent / PRESETS) | (set(VARIABLES) - keys - {CRITIC_START})
    with _initialised(line.file):
        experiment = _Experiment(line, GlobalHydra.instance().config_loader())
        if line.flags.cfg or line.flags.info or line.flags.help:
            experiment.show()
            return
        for job in experiment.jobs():
            HydraConfig.instance().set_config(job)
            for text in _idle_keys(job):
                warnings.warn(text, stacklevel=2)
            check(without_hydra(job), passing)


def parse(argv: Sequence[str]) -> CommandLine:
    """Find the experiment, and separate flags from overrides.

    Raises:
        ConfigError: the name is missing, unknown or ambiguous, or the folder, a flag or an override is wrong.
        SystemExit: 0 after `--version`, and after `--help` without a name.
    """
    flags = parse_flags(argv)
    if flags.config_name is None:
        missing = Fault("--config-name", "missing", f"use one of: {', '.join(experiments())}", "missing")
        instead = "and words without a flag are KEY=VALUE"
        found = (misplaced_file("command line", word, instead) for word in flags.overrides)
        raise ConfigError(next(filter(None, found), missing))
    option = "--config-path" if flags.config_path else "--config-dir"
    folder = flags.config_path or flags.config_dir
    name = flags.config_name
    file = find_in(Path(folder).resolve(), name, option) if folder else find_experiment(name)
    check_included(file)
    overrides = [parsed_override(word) for word in [*flags.overrides, *["hydra.mode=MULTIRUN"] * flags.multirun]]
    for word in (_word(one) for one in overrides if one.key_or_group == GROUP and one.package is None):
        problem, remedy = f"{word} names no role", f"write +{GROUP}@ROLE.strategy_args.strategy_config=OPTION"
        raise ConfigError(Fault("command line", problem, remedy, "malformed"))
    searched = _search_path(file, flags, overrides)
    folders = [file.parent, *(Path(path.removeprefix("file://")) for path in searched if "pkg://" not in path)]
    overrides = [_adding(one, folders) for one in overrides if one.key_or_group != SEARCH_PATH]
    return CommandLine(
        file, flags, [*overrides, *[parsed_override(f"{SEARCH_PATH}={searched}")] * bool(searched)], folders
    )


def _search_path(file: Path, flags: argparse.Namespace, overrides: Sequence[Override]) -> list[str]:
    """Return Hydra's search path: that of the command line, else of the file; the shipped presets, with the group
    `presets`; and the folder of `--config-dir` beside `--config-path`.
    """
    given: list[Any] = [override.value() for override in overrides if override.key_or_group == SEARCH_PATH]
    presets = [f"file://{examples_folder() / PRESETS}"]
    more = [f"file://{Path(flags.config_dir).resolve()}"] if flags.config_path and flags.config_dir else []
    return [*map(str, given[-1] if given else search_path_of(file)), *presets, *more]


def parsed_override(word: str) -> Override:
    """Parse one override.

    Raises:
        ConfigError: the word does not follow Hydra's grammar.
    """
    try:
        return OverridesParser.create().parse_override(word)
    except (HydraException, RecursionError) as error:
        reason = str(error).split("\n")[0]
        key, _, value = word.partition("=")
        remedy = "write key=value, and quote a value with special characters: key='\\'a,b\\''"
        if value == "~":
            remedy = f"write {key}=null; ~ means null only in files"
        elif "(" in value:
            remedy = f"quote it twice: '{key}=\"{value}\"'"
        problem = f"'{word}' is not an override: {reason}".encode(errors="replace").decode()  # bytes beside UTF-8
        raise ConfigError(Fault("command line", problem, remedy, "malformed")) from None


def _adding(override: Override, folders: Sequence[Path]) -> Override:
    """Return `key=value` as `++key=value`. An override that sets a key of Hydra, chooses an option of a group, or
    already deletes or adds a key is returned unchanged.
    """
    if override.type is not OverrideType.CHANGE or _chooses(override, folders):
        return override
    return replace(override, type=OverrideType.FORCE_ADD, input_line=f"++{override.input_line}")


def _chooses(override: Override, folders: Sequence[Path]) -> bool:
    """Return whether an override decides which files Hydra composes, or sets a key of Hydra."""
    key = override.key_or_group
    is_group = "/" in key or override.package is not None or any(isdir(folder / key) for folder in folders)
    return is_group or key.split(".")[0] == "hydra"


def _dirname(words: Sequence[str], typed: Sequence[str], settings: DictConfig) -> str:
    """Return Hydra's `job.override_dirname` of a job: its overrides as they were typed, without those that say where
    and whether it runs, and those that refer to this text.

    Args:
        words: Overrides of the job.
        typed: The words of the command line.
        settings: Hydra's block `job`.
    """
    chosen, own = settings.config.override_dirname, {word.partition("=")[0] for word in typed}
    left_out, named = {*OF_THE_RUN, *chosen.exclude_keys}, []
    for word, override in zip(words, map(parsed_override, words), strict=True):
        if override.is_hydra_override() or override.key_or_group in left_out or OVERRIDES in word:
            continue
        named.append(word if word.partition("=")[0] in own else word.removeprefix("++"))
    return str(chosen.item_sep).join(sorted(named)).replace("=", str(chosen.kv_sep))


@contextlib.contextmanager
def _initialised(file: Path) -> Iterator[None]:
    """Initialise Hydra with the folder of an experiment, and restore its state afterwards, as of a program that uses
    Hydra itself.

    ROLL's files have no `_self_` in their defaults. Hydra appends it, as they expect, and its warning is silenced.
    """
    before, ambient, base = HydraConfig.instance().cfg, GlobalHydra.instance().hydra, VersionBase.instance().getbase()
    GlobalHydra.instance().clear()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Defaults list is missing `_self_`", category=UserWarning)
            with initialize_config_dir(str(file.parent), job_name="roll.pipeline", version_base="1.3"):
                yield
    finally:
        HydraConfig.instance().cfg, GlobalHydra.instance().hydra = before, ambient
        VersionBase.instance().version_base = base


def plugin_faults(hydra: Mapping[str, Mapping[str, object]]) -> Iterator[Fault]:
    """Yield faults of launchers and sweepers other than Hydra's basic ones, by Hydra's node of the configuration."""
    for kind, (works, why, remedy) in HYDRA_PLUGINS.items():
        chosen = hydra[kind].get("_target_")
        if chosen != works:
            yield Fault(f"hydra/{kind}", f"{chosen}, but {why}", remedy, "not_supported")


def missing_plugin(problem: str) -> Fault | None:
    """Return the fault of a plugin that Hydra does not find, or of its key; None if its message is about others."""
    for kind, (_, why, remedy) in HYDRA_PLUGINS.items():
        if f"hydra/{kind}/" in problem or f"'hydra.{kind}." in problem:
            return Fault(f"hydra/{kind}", f"{problem}; and {why}", remedy, "not_supported")
    return None


@contextlib.contextmanager
def composed_files(argv: Sequence[str]) -> Iterator[tuple[CommandLine, ConfigLoader, DictConfig]]:
    """A context with the files that a command line chooses, composed before any override of a value, and the loader
    that looks up groups in them. Raises ConfigError as `compose`.
    """
    line = parse(argv)
    with _initialised(line.file):
        experiment = _Experiment(line, GlobalHydra.instance().config_loader())
        with _errors_as_faults(line.file):
            files = experiment._files([_word(override) for override in line.overrides])
        yield line, experiment.loader, files


@dataclass(frozen=True)
class _Experiment:
    """The jobs of a command line. Hydra must be initialised."""

    line: CommandLine
    loader: ConfigLoader
    _composed: dict[tuple[str, ...], DictConfig] = field(default_factory=dict)
    """Composed files, by the overrides that choose them."""

    def jobs(self) -> Iterator[DictConfig]:
        """Yield each job's composed configuration, with Hydra's node. Raises ConfigError if one cannot be composed."""
        with _errors_as_faults(self.line.file):
            overrides = self.line.overrides
            files = self._files([_word(override) for override in overrides])
            is_sweep = files.hydra.mode == RunMode.MULTIRUN
            if is_sweep:
                own = [parsed_override(f"{key}={value}") for key, value in (files.hydra.sweeper.params or {}).items()]
                overrides = [*(_adding(one, self.line.folders) for one in own), *overrides]
                jobs = self._sweep(overrides)
            else:
                jobs = [tuple(map(_word, overrides))]
        for number, words in enumerate(jobs):
            with _errors_as_faults(self.line.file):
                job = self._job(files, words)
                with read_write(job.hydra), open_dict(job.hydra):
                    job.hydra.job.override_dirname = _dirname(words, self.line.flags.overrides, job.hydra.job)
                    job.hydra.runtime.output_dir = "${hydra.run.dir}"
                    if is_sweep:
                        job.hydra.job.num, job.hydra.job.id = number, str(number)
                        job.hydra.runtime.output_dir = "${hydra.sweep.dir}/${hydra.sweep.subdir}"
            yield job

    def _sweep(self, overrides: Sequence[Override]) -> list[tuple[str, ...]]:
        """Return the overrides of each job: all combinations of their values. Of several for one key, the last counts.

        Raises:
            ConfigError: there is no job, or there are more than `MOST_JOBS`, or an override is an interval.
        """
        values: dict[str, list[str]] = {}
        for override in overrides:
            override.config_loader = self.loader
            key = override.get_key_element()
            if override.is_discrete_sweep():
                some = itertools.islice(override.sweep_string_iterator(), MOST_JOBS + 1)
                values[key] = [f"{key}={value}" for value in some]
            elif override.is_interval_sweep():
                raise ConfigError(
                    Fault(key, f"{_word(override)} has no first value", f"list the values: {key}=A,B", "not_supported")
                )
            else:
                values[key] = [_word(override)]
        number = math.prod(map(len, values.values()))
        if not 0 < number <= MOST_JOBS:
            problem = f"the sweep has more than {MOST_JOBS:,} jobs" if number else "the sweep has no jobs"
            raise ConfigError(
                Fault("command line", problem, f"list 1 to {MOST_JOBS:,} combinations of values", "out_of_range")
            )
        return list(itertools.product(*values.values()))

    def _job(self, files: DictConfig, words: Sequence[str]) -> DictConfig:
        """Compose one job. `files` has the overrides of Hydra's own keys."""
        overrides = [parsed_override(word) for word in words]
        for override in overrides:
            self._check_preset(override, words)
        faults = _value_faults([one for one in overrides if not _chooses(one, self.line.folders)], self._files(words))
        if faults := list(faults):
            raise ConfigError(*faults)
        return self.loader.load_sweep_config(files, [_word(one) for one in overrides if not one.is_hydra_override()])

    def _check_preset(self, override: Override, words: Sequence[str]) -> None:
        """Refuse an option of the group `presets` for a block that is `${...}`, with whose keys Hydra would mix those
        of the option.
        """
        if override.key_or_group != GROUP:
            return
        word, block = _word(override), override.package
        if block is None or not override.is_add():
            return
        node: Any = OmegaConf.to_container(self._files([one for one in words if one != word]), resolve=False)
        for step in block.split("."):
            node = node.get(step) if isinstance(node, dict) else None
        if isinstance(node, str) and node.startswith("${"):
            problem = f"{word}, but {block} is {node} in the file, and Hydra would mix the two presets"
            remedy = f"write {block}={override.value()}"
            raise ConfigError(Fault(block, problem, remedy, "exclusive"))

    def _files(self, words: Sequence[str]) -> DictConfig:
        """Return the composed files that the overrides choose, before any override of a value."""
        chosen = tuple(word for word in words if _chooses(parsed_override(word), self.line.folders))
        if chosen not in self._composed:
            name = self.line.file.stem
            composed = self.loader.load_configuration(
                name, list(chosen), RunMode.MULTIRUN, validate_sweep_overrides=False
            )
            if faults := list(plugin_faults(composed.hydra)):
                raise ConfigError(*faults)
            self._composed[chosen] = composed
        return self._composed[chosen]

    def show(self) -> None:
        """Print what `--cfg`, `--info` or `--help` asks for. Raises ConfigError as `jobs`, or without such a block."""
        flags, words = self.line.flags, [_word(override) for override in self.line.overrides]
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None, "Hydra must be initialised"
        with _errors_as_faults(self.line.file):
            job = self._job(self._files(words), words)
            if flags.info:
                hydra.show_info(flags.info, self.line.file.stem, words, RunMode.RUN)
            elif flags.help:
                given = argparse.Namespace(overrides=[*words, "hydra/hydra_logging=none"], resolve=flags.resolve)
                hydra.app_help(self.line.file.stem, flag_parser(), given)
            else:
                HydraConfig.instance().set_config(job)
                OmegaConf.set_readonly(job.hydra, None)
                _print_block(hydra.get_sanitized_cfg(job, flags.cfg), flags.package, flags.resolve)


def _print_block(composed: DictConfig, package: str | None, resolve: bool) -> None:
    """Print a configuration, or its block at the path `package`."""
    whole = package in (None, "_global_")
    block: Any = composed if whole else OmegaConf.select(composed, str(package))
    if block is None:
        raise ConfigError(
            Fault("--package", f"there is no '{package}' in the configuration", "see --cfg job", "not_found")
        )
    if not OmegaConf.is_config(block):
        print(block)
        return
    if resolve:
        OmegaConf.resolve(block)
    print("" if whole else f"# @package {package}\n", OmegaConf.to_yaml(block), sep="", end="")


def _idle_keys(job: DictConfig) -> Iterator[str]:
    """Yield a warning for each of Hydra's keys that asks for something that does not happen here."""
    files: Any = OmegaConf.to_container(job, resolve=False)
    hydra = files.pop("hydra")
    refers = any(name in str(files) for name in FOLDERS)
    for key, (silent, instead) in HYDRA_IDLE.items():
        value: Any = hydra
        for name in key.split("."):
            value = value.get(name, silent[0]) if isinstance(value, dict) else silent[0]
        if value not in silent and not (key.endswith((".dir", ".subdir")) and refers):
            name = key.removeprefix(CHOICES) if key.startswith(CHOICES) else f"hydra.{key}"
            yield f"{name}: has no effect; {instead}"


def without_hydra(composed: DictConfig) -> DictConfig:
    """Return a copy of a composed configuration without Hydra's node."""
    job = copy.deepcopy(composed)
    with read_write(job), open_dict(job):
        job.pop("hydra", None)
    return job


def overridden(composed: DictConfig, words: Sequence[str]) -> DictConfig:
    """Return a copy of a composed configuration in which overrides set or delete (`~key`) values.

    Raises:
        ConfigError: an override is malformed or one of a sweep, or cannot be applied.
    """
    overrides = [parsed_override(word) for word in words]
    for override in overrides:
        if override.is_sweep_override() or "/" in override.key_or_group:
            problem, remedy = f"'{_word(override)}' does not set one key to one value", "give only key=value"
            raise ConfigError(Fault("command line", problem, remedy, "not_supported"))
    if faults := list(_value_faults(overrides, composed)):
        raise ConfigError(*faults)
    changed = copy.deepcopy(composed)
    with read_write(changed), open_dict(changed):
        for override in overrides:
            try:
                _apply(override, changed)
            except OmegaConfBaseException as error:
                raise ConfigError(resolution_fault(error)) from None
    return changed


def _apply(override: Override, changed: DictConfig) -> None:
    key = override.key_or_group
    if not override.is_delete():
        OmegaConf.update(changed, key, override.value(), merge=True, force_add=True)
        return
    above, _, last = key.rpartition(".")
    block = OmegaConf.select(changed, above) if above else changed
    if not isinstance(block, DictConfig) or last not in block:
        raise ConfigError(Fault(f"~{key}", "there is no such key", "leave it out", "not_found"))
    del block[last]


def _word(override: Override) -> str:
    return override.input_line or ""


def _value_faults(overrides: Sequence[Override], composed: DictConfig) -> Iterator[Fault]:
    """Yield a fault for each override that sets one key of a block that refers to a preset, such as `strategy_config:
    ${deepspeed_zero3}`, because it would replace the whole block; and for each that deletes an item of a list.

    Args:
        overrides: Overrides of values, in the order in which Hydra will apply them.
        composed: The composed files, before any override.
    """
    files = OmegaConf.to_container(composed, resolve=False)
    for override in overrides:
        node: object = files
        steps = override.key_or_group.split(".")
        for depth, step in enumerate(steps[:-1], start=1):
            node = node.get(step) if isinstance(node, dict) else None
            where = ".".join(steps[:depth])
            if isinstance(node, str) and node.startswith("${"):
                target = ".".join([node.removeprefix("${").removesuffix("}"), *steps[depth:]])
                problem = f"{where} is {node}; setting one key inside would drop all the others"
                yield Fault(override.key_or_group, problem, f"set {target} instead", "misplaced")
            elif isinstance(node, list) and override.is_delete() and depth == len(steps) - 1:
                problem = f"{where} is a list, and items of lists cannot be deleted"
                yield Fault(f"~{override.key_or_group}", problem, f"set the whole list: {where}=[...]", "not_supported")


@contextlib.contextmanager
def _errors_as_faults(file: Path) -> Iterator[None]:
    """Within this context, raise errors of composition as `ConfigError`."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        fault = _fault(error, file)
        if fault is None:
            raise
        raise ConfigError(fault) from None


def _fault(error: Exception, file: Path) -> Fault | None:
    """Return an error of composing `file` as a fault, or None for an unrelated error."""
    if isinstance(error, MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        place = f"{mark.name}:{mark.line + 1}" if mark else str(file)
        return Fault(
            place, f"this is not YAML: {error.problem or error.context}", "fix this line of the file", "malformed"
        )
    if isinstance(error, YAMLError):
        return Fault(str(file), f"it or a file of its defaults cannot be read: {error}", "fix the file", "unreadable")
    if isinstance(error, RecursionError):
        return Fault(
            str(file), "blocks, lists or references are nested too deeply, or contain themselves", FLATTEN, "too_large"
        )
    if isinstance(error, UnicodeDecodeError):
        problem = f"it or a file of its defaults is not UTF-8: byte 0x{error.object[error.start]:02x}"
        return Fault(str(file), problem, "save the file as UTF-8", "unreadable")
    if isinstance(error, OmegaConfBaseException):
        return resolution_fault(error)
    if isinstance(error, MissingConfigException):
        problem = " ".join(str(error).split("Config search path")[0].split("Available options")[0].split())
        presets = f"presets are {', '.join(sorted(preset_names()))}, each as ../config/NAME@_here_"
        if f"'{GROUP}/" in problem:
            return Fault("defaults", problem, f"use one of: {', '.join(sorted(deepspeed_presets()))}", "not_found")
        remedy = f"correct the entry of `defaults`; {presets}; shipped experiments are ../FOLDER/NAME@_here_, and files"
        return missing_plugin(problem) or Fault(
            "defaults", problem, f"{remedy} in the same folder are NAME", "not_found"
        )
    if isinstance(error, OSError):
        problem = f"it cannot be read: {error.strerror}"
        return Fault(str(error.filename or file), problem, "use another file, or change its permissions", "unreadable")
    if isinstance(error, HydraException):
        inner = f": {error.__cause__}" if error.__cause__ else ""
        problem = " ".join(f"{error}{inner}".split("\n    full_key")[0].split())
        remedy = "correct the override or the entry of `defaults`; see --info defaults"
        return missing_plugin(problem) or Fault("command line or defaults", problem, remedy, "malformed")
    if "integer string conversion" in str(error):
        return Fault(
            str(file), f"a whole number is too long: {str(error).split(';')[0]}", "write a shorter one", "too_large"
        )
    # Hydra asserts, indexes and calls methods of what a file holds, so a malformed file raises errors of any type.
    frames = traceback.walk_tb(error.__traceback__)
    if not any(frame.f_globals.get("__name__", "").partition(".")[0] in COMPOSERS for frame, _ in frames):
        return None
    reason = (
        " ".join(f"{error}".split())[:300] or f"an item is of a type that Hydra does not read ({type(error).__name__})"
    )
    problem = f"it or a file of its defaults cannot be composed: {reason}"
    remedy = "write `defaults` as a list of NAME, GROUP: NAME and _self_, with text as names, and see --info defaults"
    return Fault(str(file), problem, remedy, "malformed")
