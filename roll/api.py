"""The Python interface of roll: the commands as functions that return results and raise errors.

docs/running.md has examples. The functions may be called inside a running event loop, as in a notebook. They must be
called from the main thread, because they install signal handlers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from roll.config.load.loader import resolution_fault
from roll.config.plan.plan import make_plan
from roll.config.schema.pipelines import Config
from roll.config.schema.roles import ExperimentConfig
from roll.errors import BadInput, ConfigError, Fault
from roll.errors import RollError as RollError
from roll.evaluation.request import Request
from roll.evaluation.results import EvaluationResult
from roll.evaluation.run import run_evaluation
from roll.evaluation.settings import find_subject, output_folder, plan_evaluation
from roll.given.experiment import FOLDER, Objects, find_experiment, holds_object, object_words
from roll.given.words import word_of
from roll.registry import nearest
from roll.runs.assemble import run_experiment
from roll.runs.checkpointer import EXPORT
from roll.stores.address import is_address, local_folder
from roll.tracking.jsonl import METRICS_FILE, read_ends
from roll.tracking.life import ActivityDisplay
from roll.types import Metrics

Experiment = str | Path | Mapping[str, Any] | DictConfig | ExperimentConfig
"""Name of an experiment, path of a YAML file, blocks of keys, or a checked configuration."""
Reward = Callable[..., Any] | str
"""A reward function, or the name of one."""
IN_PYTHON = {"--config-name": "experiment", "--config-path": "config_path", "command line": "overrides"}
"""Arguments in place of parts of the command line, for messages."""
FLAG = re.compile(r"--([a-z-]+)")
REWARD_ARGUMENT = re.compile(r"(rewards\.[^.]+\.reward_args)\.")
"""Beginning of the place of an argument of a reward."""
CHOICE = re.compile(r"--config-path (\S+) --config-name (\S+)")


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run."""

    folder: Path
    """The run folder."""
    step: int
    """Number of the last completed step."""
    metrics: Metrics
    """Metrics of the last completed step."""
    export: Path | None
    """Folder of the trained model in the format of Hugging Face. None if the model was not exported."""


def load_config(
    experiment: Experiment,
    overrides: str | Sequence[str] = (),
    config_path: str | Path | None = None,
    *,
    reward: Reward | Mapping[str, Reward] | None = None,
    rows: Any = None,
    validation_rows: Any = None,
    **keys: Any,
) -> Config:
    """Compose and check the configuration of an experiment, like `python -m roll.pipeline --config-name NAME KEY=VALUE
    ...`, without starting anything.

    Objects are written into the folder `given` of the run folder, where the configuration names them, so that
    `config.yaml` of the run also works on the command line. A function that other processes can import is named by its
    module instead. The name of the others depends on their bytecode and on the values that they refer to, so that a
    resumed run finds a change. Limits: a written function carries all that it refers to, at most 16 MiB, and it is
    read only by the same minor version of Python; its own imports must be installed; a loss, an estimator or a
    correction of your own must be in a module.

    Args:
        experiment: Name of a shipped experiment, or of one in `config_path`; the path of a YAML file; or the blocks of
            keys themselves, as a dict or as the `DictConfig` of a Hydra application, whose node `hydra` is ignored. A
            checked configuration is returned as it is.
        overrides: One or several overrides of the form `key=value`.
        config_path: Folder with the YAML file of the experiment. None searches the shipped experiments.
        reward: The reward function, or a dict of reward functions by domain. Called as `reward(prompt, response, row)`
            in processes of its own; see docs/rewards.md. Without a domain, it becomes that of the only domain.
        rows: Training rows: a `datasets.Dataset` or a list of dicts. `data_args` names their columns.
        validation_rows: Held-out rows, or a dict of held-out rows by the name of their set. Their columns are those of
            the training rows unless the experiment names them.
        keys: Root keys with Python values, such as `max_steps=5` or `actor_train={"training_args": {...}}`, which
            change only the keys that they name; and, in `**{...}`, keys such as `"actor_train.world_size"`. Functions
            and classes may stand wherever a key takes `package.module:Name`, and rows in place of `file_name`.

    Raises:
        ConfigError: The configuration has faults, or an object cannot be used. The error lists all faults.
    """
    given = {"reward": reward, "rows": rows, "validation_rows": validation_rows}
    words = [overrides] if isinstance(overrides, str) else list(overrides)
    if isinstance(experiment, ExperimentConfig):
        changes = [*words, *(name for name, value in given.items() if value is not None), *keys]
        if changes or config_path is not None:
            problem = f"a checked configuration cannot be changed: {', '.join(changes) or 'config_path'}"
            remedy = "give it to the call of load_config that made the configuration"
            raise ConfigError(Fault("experiment", problem, remedy, "misplaced"))
        return experiment  # type: ignore[return-value]
    if flags := [word for word in words if word.startswith("-")]:
        problem, remedy = f"'{flags[0]}' is a flag of the command", "give only key=value"
        raise ConfigError(Fault("overrides", problem, remedy, "misplaced"))
    try:
        return _composed(experiment, words, config_path, given, keys)
    except ConfigError as error:
        raise ConfigError(*(_in_python(fault, reward is not None) for fault in error.faults)) from None


def _composed(
    experiment: Any, words: list[str], config_path: str | Path | None, given: dict[str, Any], keys: dict[str, Any]
) -> Config:
    objects = Objects(None)
    if any(value is not None for value in given.values()) or holds_object(keys) or holds_object(experiment):
        source = find_experiment(experiment, config_path, objects)
        standing = [word_of(key, objects.replaced(value, key)) for key, value in keys.items()]
        composed = source.composed([*words, *standing])
        objects = Objects(_folder(composed))
        words = [*words, *object_words(composed, objects, **given)]
    own = [word_of(key, objects.replaced(value, key)) for key, value in keys.items()]
    return find_experiment(experiment, config_path, objects).config([*words, *own])


def _folder(composed: DictConfig) -> Path:
    """Return the folder for objects. It is absolute, because worker processes may have another working directory."""
    try:
        folder = OmegaConf.select(composed, "output_dir", default=None)
    except OmegaConfBaseException as error:
        raise ConfigError(resolution_fault(error)) from None
    if not isinstance(folder, str) or not folder:
        raise ConfigError(Fault("output_dir", "missing", "give the folder of the run", "missing"))
    return (local_folder(folder) if is_address(folder) else Path(folder)).absolute() / FOLDER


def _in_python(fault: Fault, has_reward: bool) -> Fault:
    """Return a fault of the command line with the arguments of `load_config` in place of flags. If a reward was given,
    the fault of an argument that it lacks says how to remove the experiment's.
    """
    remedy = CHOICE.sub(r"experiment='\1/\2.yaml'", fault.remedy).replace("--config-path", "config_path")
    if has_reward and fault.code == "unknown_key" and (found := REWARD_ARGUMENT.match(fault.place)):
        remedy += f"; the override '~{found[1]}' removes the arguments that the experiment gives to its own reward"
    return replace(fault, place=IN_PYTHON.get(fault.place, fault.place), remedy=remedy)


def train(
    experiment: Experiment,
    overrides: str | Sequence[str] = (),
    config_path: str | Path | None = None,
    *,
    reward: Reward | Mapping[str, Reward] | None = None,
    rows: Any = None,
    validation_rows: Any = None,
    **keys: Any,
) -> TrainResult:
    """Run an experiment to its end. If its run folder has a checkpoint, continue from it.

    Args: those of `load_config`, which also says what becomes of functions and rows. To continue a run, give the same
        again: another reward function is refused like any changed key, and other training rows are refused.

    Raises:
        BadInput: The configuration has faults, `dry_run` is set, or the models or the data cannot be used. Nothing has
            started.
        RollError: A part of the run failed.
        KeyboardInterrupt: A signal ended the run. After a single signal during training, it has completed its step and
            written a checkpoint, unless `save_at_end` is false.
    """
    config = load_config(
        experiment, overrides, config_path, reward=reward, rows=rows, validation_rows=validation_rows, **keys
    )
    if config.dry_run:
        remedy = "remove it; load_config checks the keys, and the command with dry_run=true also tries the first rows"
        raise ConfigError(Fault("dry_run", "true", remedy, "not_supported"))
    plan = make_plan(config, [])
    with ActivityDisplay(Console()) as life:
        life.driver("loading models and data")
        run_experiment(config, plan, life)
    folder = Path(config.output_dir)
    records, _ = read_ends(folder / METRICS_FILE)
    last = dict(records[-1])
    export = folder / EXPORT
    return TrainResult(folder, int(last.pop("step")), last, export if export.is_dir() else None)


def evaluate(request: Request | str | Path, **options: Any) -> EvaluationResult:
    """Generate responses to held-out prompts and score them, like `python -m roll.evaluate`.

    Args:
        request: What to evaluate and how. A run folder, a checkpoint folder or a model is evaluated with all defaults.
        options: Fields of `Request` to set. `data` may also be a `datasets.Dataset`, a list of dicts, or a dict of
            these by the name of the set; `reward` may be a function. They are written into the folder of the results.

    Raises:
        BadInput: The request, the model or the data cannot be used. Nothing has started.
        RollError: A part of the evaluation failed.
        KeyboardInterrupt: The evaluation was interrupted. The samples so far are written.
    """
    try:
        asked = _request(request, options)
        if asked.dry_run:
            raise ConfigError(Fault("dry_run", "true", "use python -m roll.evaluate --dry-run", "not_supported"))
        with ActivityDisplay(Console(stderr=True)) as life:
            life.driver("loading models and data")
            return run_evaluation(plan_evaluation(asked, find_subject(asked.subject)), life)
    except BadInput as error:
        raise type(error)(*map(_as_option, error.faults)) from None


def _as_option(fault: Fault) -> Fault:
    """Return a fault of `roll.evaluate` with the names of options in place of flags."""
    texts = (fault.place.replace("SUBJECT", "request"), fault.problem, fault.remedy)
    place, problem, remedy = (FLAG.sub(lambda flag: flag[1].replace("-", "_"), text) for text in texts)
    return replace(fault, place=place, problem=problem, remedy=remedy)


def _request(request: Request | str | Path, options: dict[str, Any]) -> Request:
    """Return a request with options, and files in place of objects. Raises ConfigError for an unknown option."""
    known = [field.name for field in fields(Request)]
    if unknown := [name for name in options if name not in known]:
        problem = f"evaluate has no option '{unknown[0]}'{nearest(unknown[0], known)}"
        raise ConfigError(Fault(unknown[0], problem, f"use one of: {', '.join(known)}", "unknown_key"))
    asked = request if isinstance(request, Request) else Request(str(request))
    asked = replace(asked, **{name: _field(name, value) for name, value in options.items()})
    if not isinstance(asked.data, tuple) or callable(asked.reward):
        folder = output_folder(asked, find_subject(asked.subject)).absolute() / FOLDER
        objects = Objects(folder)
        reward = objects.name(asked.reward, "reward") if callable(asked.reward) else asked.reward
        return replace(asked, data=_files(asked.data, objects), reward=reward)
    return asked


def _field(name: str, value: Any) -> Any:
    """Return the value of an option in the type of the field."""
    if name == "output":
        return value if value is None else Path(value)
    if name in ("data", "overrides") and isinstance(value, str | Path):
        return (str(value),)
    if name in ("data", "overrides", "devices") and isinstance(value, list | tuple | range):
        is_files = all(isinstance(one, str | int | Path) for one in value)
        return tuple(str(one) if isinstance(one, Path) else one for one in value) if is_files else value
    return value


def _files(data: Any, objects: Objects) -> tuple[str, ...]:
    if isinstance(data, tuple) and all(isinstance(one, str) for one in data):
        return data
    named = data if isinstance(data, Mapping) else {"rows": data}
    return tuple(objects.file(rows, "data", str(name)) for name, rows in named.items())
