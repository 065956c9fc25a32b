"""The configuration of an experiment that Python gives: by name, file or blocks, with objects in place of names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roll.algorithms.methods import KINDS
from roll.config.load.compose import compose, overridden, without_hydra
from roll.config.load.loader import ROLES, resolution_fault
from roll.config.schema.pipelines import Config
from roll.errors import ConfigError, Fault
from roll.given.functions import file_name, importable_name, name_of
from roll.given.rows import are_rows, file_of
from roll.given.words import word_of
from roll.pipeline import job_of, jobs_of

FOLDER = "given"
"""Subfolder of the run folder with the files of the objects."""
STAND_IN = "given:object"
"""Name of every object while the run folder is not known yet."""
DOMAINS = "rewards"


@dataclass(frozen=True)
class NamedExperiment:
    """An experiment in a file."""

    choice: tuple[str, ...]
    """The flags of the command line that choose it."""

    def composed(self, words: Sequence[str]) -> DictConfig:
        """Return the configuration with overrides, not yet checked. Raises ConfigError if it cannot be composed."""
        found: list[DictConfig] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are said when the configuration is checked
            compose([*self.choice, *words], lambda one, presets: found.append(one))
        return found[0]

    def config(self, words: Sequence[str]) -> Config:
        """Return the checked configuration with overrides. Raises ConfigError if it has faults, or is a sweep."""
        jobs = jobs_of([*self.choice, *words])
        if len(jobs) != 1:
            problem, remedy = f"they define a sweep of {len(jobs)} jobs", "give one value for each key"
            raise ConfigError(Fault("overrides", problem, remedy, "not_supported"))
        return jobs[0][0]


@dataclass(frozen=True)
class GivenExperiment:
    """An experiment whose blocks are given."""

    blocks: DictConfig

    def composed(self, words: Sequence[str]) -> DictConfig:
        """See `NamedExperiment`."""
        return overridden(without_hydra(self.blocks), words)

    def config(self, words: Sequence[str]) -> Config:
        """See `NamedExperiment`."""
        return job_of(self.composed(words))[0]


@dataclass(frozen=True)
class Objects:
    """Turns objects into names and files."""

    folder: Path | None
    """Folder to write into. None writes nothing and returns stand-ins."""

    def name(self, given: Callable[..., Any], place: str) -> str:
        """Return the name of a function or class. Raises ConfigError if it cannot be sent to the processes."""
        kind = next((kind for kind in KINDS.values() if place == kind.key), None)
        if kind and importable_name(given) is None:
            problem = f"'{file_name(given)}' is of the program itself, but {kind.noun} is imported by the trainer"
            raise ConfigError(Fault(place, problem, "put it into a module of its own", "unfit"))
        return STAND_IN if self.folder is None else name_of(given, self.folder, place)

    def file(self, rows: object, place: str, name: str = "rows") -> str:
        """Return a file with rows; a text is the name of one already. Raises ConfigError if these are no rows."""
        if isinstance(rows, str | Path):
            return str(rows)
        return STAND_IN if self.folder is None else file_of(rows, self.folder, place, name)

    def replaced(self, value: Any, place: str = "") -> Any:
        """Return a tree of blocks and lists with a name or a file in place of every object."""
        if place.endswith("file_name") and are_rows(value):
            return self.file(value, place)
        if isinstance(value, Mapping):
            return {key: self.replaced(one, f"{place}.{key}".lstrip(".")) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.replaced(one, f"{place}[{number}]") for number, one in enumerate(value)]
        return self.name(value, place) if callable(value) else value


def holds_object(value: Any, place: str = "") -> bool:
    """Whether `Objects.replaced` would replace something."""
    if place.endswith("file_name") and are_rows(value):
        return True
    if isinstance(value, Mapping):
        return any(holds_object(one, f"{place}.{key}") for key, one in value.items())
    return any(map(holds_object, value)) if isinstance(value, list | tuple) else callable(value)


def find_experiment(experiment: object, config_path: str | Path | None, objects: Objects) -> Experiment:
    """Return the experiment of a name, a YAML file or blocks of keys. Raises ConfigError if it is none of these."""
    if isinstance(experiment, DictConfig | Mapping):
        if config_path is not None:
            remedy = "give it for a name, or leave it out"
            raise ConfigError(Fault("config_path", "it is given for blocks of keys", remedy, "misplaced"))
        return GivenExperiment(_blocks(experiment, objects))
    if not isinstance(experiment, str | Path):
        problem = f"it is a {type(experiment).__name__}: {experiment!r:.80}"
        remedy = "give the name of an experiment, the path of a YAML file, a dict or a Config"
        raise ConfigError(Fault("experiment", problem, remedy, "wrong_type"))
    file = Path(experiment).expanduser()
    if isinstance(experiment, Path) or (file.suffix in (".yaml", ".yml") and file.is_file()):
        return NamedExperiment(_choice_of_file(file, config_path))
    folder = () if config_path is None else ("--config-path", str(config_path))
    return NamedExperiment((*folder, "--config-name", experiment))


def _choice_of_file(file: Path, config_path: object) -> tuple[str, ...]:
    if config_path is not None:
        problem, remedy = f"'{file}' is a file, and config_path is given, too", "give one of them"
        raise ConfigError(Fault("config_path", problem, remedy, "exclusive"))
    if not file.is_file():
        remedy = "give the path of a YAML file, or the name of an experiment as text"
        raise ConfigError(Fault("experiment", f"there is no file '{file}'", remedy, "not_found"))
    if file.suffix != ".yaml":
        raise ConfigError(Fault("experiment", f"'{file}' does not end with .yaml", "rename it", "not_supported"))
    return ("--config-path", str(file.parent), "--config-name", file.stem)


def _blocks(experiment: Mapping[Any, Any] | DictConfig, objects: Objects) -> DictConfig:
    if isinstance(experiment, DictConfig):
        return experiment
    try:
        blocks = OmegaConf.create(objects.replaced(dict(experiment)))
    except OmegaConfBaseException as error:
        problem, remedy = " ".join(str(error).split()), "give numbers, texts, lists and blocks"
        raise ConfigError(Fault("experiment", problem, remedy, "wrong_type")) from None
    assert isinstance(blocks, DictConfig), "a dict becomes a DictConfig"
    return blocks


Experiment = NamedExperiment | GivenExperiment


def object_words(
    composed: DictConfig, objects: Objects, reward: object, rows: object, validation_rows: object
) -> list[str]:
    """Return the overrides that stand for the objects of a composed configuration; None stands for no object.

    Raises:
        ConfigError: an object is of a wrong type, or cannot be written.
    """
    try:
        words = [] if reward is None else list(_of_rewards(composed, objects, reward))
        if rows is not None:
            words.append(word_of(f"{_learner(composed)}.data_args.file_name", objects.file(rows, "rows")))
        if validation_rows is not None:
            words += _of_validation(composed, objects, validation_rows)
    except OmegaConfBaseException as error:
        raise ConfigError(resolution_fault(error)) from None
    return words


def _of_rewards(composed: DictConfig, objects: Objects, reward: object) -> Iterator[str]:
    domains = list(OmegaConf.select(composed, DOMAINS, default=None) or {})
    if isinstance(reward, Mapping):
        by_domain = dict(reward)
    elif len(domains) > 1:
        remedy = f"give a dict with the function of each domain: {{'{domains[0]}': function}}"
        raise ConfigError(
            Fault("reward", f"the experiment has the domains {', '.join(map(str, domains))}", remedy, "missing")
        )
    else:
        by_domain = {domains[0] if domains else file_name(reward) if callable(reward) else reward: reward}
    for domain, one in by_domain.items():
        if not callable(one) and not isinstance(one, str):
            problem = f"it is a {type(one).__name__}, {one!r:.80}"
            remedy = "give a function, its name, or a dict of these by domain; rewards={...} takes whole blocks"
            raise ConfigError(Fault("reward", problem, remedy, "wrong_type"))
        name = objects.name(one, "reward") if callable(one) else one
        yield word_of(f"{DOMAINS}.{domain}.reward", name)


def _learner(composed: DictConfig) -> str:
    """Return the name of the role that learns."""
    pipeline = OmegaConf.select(composed, "pipeline", default=None)
    return next(
        (role for role, of in ROLES.items() if of == pipeline or pipeline is None and role in composed), "actor_train"
    )


def _of_validation(composed: DictConfig, objects: Objects, rows: object) -> Iterator[str]:
    """Yield the overrides that replace the held-out rows: of a single set, or of several instead of a single one."""
    if isinstance(rows, Mapping):
        single = OmegaConf.select(composed, "validation", default=None) or {}
        yield from (f"~validation.{key}" for key in ("data_args", "name") if key in single)
        places = {f"validation.sets.{name}": (name, one) for name, one in rows.items()}
    else:
        places = {"validation": ("rows", rows)}
    trained = OmegaConf.select(composed, f"{_learner(composed)}.data_args", default=None)
    for place, (name, one) in places.items():
        if OmegaConf.select(composed, f"{place}.data_args", default=None) is None and trained is not None:
            columns = OmegaConf.to_container(trained, resolve=True)
            assert isinstance(columns, dict), "data_args is a block"
            yield word_of(f"{place}.data_args", {key: value for key, value in columns.items() if key != "file_name"})
        yield word_of(f"{place}.data_args.file_name", objects.file(one, "validation_rows", str(name)))
