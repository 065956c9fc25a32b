"""Finds shipped experiments, presets, rewards and environments by name."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from roll.errors import ConfigError, Fault

PACKAGE = Path(__file__).resolve().parent.parent
REWARDS: Mapping[str, bool] = {
    "anls": False,
    "code_sandbox": False,
    "counting": False,
    "crossthinkqa": False,
    "detection": False,
    "exact_match": False,
    "grounding": False,
    "ifeval": False,
    "last_number": False,
    "length_penalty": False,
    "math_rule": False,
    "math_steps": True,
    "multiple_choice": False,
    "no_reward": False,
    "reasoning_gym": False,
    "relaxed_accuracy": False,
    "repetition_penalty": False,
    "right_prefix": True,
}
"""The built-in rewards, and whether they assign rewards to the turns of a response. `roll/rewards/functions/NAME.py`
registers the reward NAME.
"""
ENVIRONMENTS = (
    "calculator",
    "code_repl",
    "critique",
    "frozen_lake",
    "gymnasium",
    "openenv",
    "shell",
    "sokoban",
    "tool_use",
)
"""The built-in environments. `roll/agents/environments/NAME.py` registers the environment NAME."""
PRESETS = "config"
"""Subfolder of the examples with the presets."""
GROUP = "presets"
"""Hydra's group of DeepSpeed's presets, a subfolder of `PRESETS`."""
FETCHED = ("smollm2-135m",)
"""The models that `python -m roll.models.fetch` writes, each into `models/NAME`."""
MODELS = "models"
"""Subfolder of the examples with `<name>/config.json`, the shapes of well-known models."""
NO_EXPERIMENTS = (PRESETS, "kubernetes")
YAML_ENDINGS = (".yaml", ".yml")
"""Endings of files of configurations; an experiment's is the first."""


def examples_folder() -> Path:
    """Return the folder of the shipped examples: inside an installed package, or next to the package in a checkout."""
    installed = PACKAGE / "_examples"
    return installed if installed.is_dir() else PACKAGE.parent / "examples"


def locks_folder() -> Path:
    """Return the folder of the version locks: inside an installed package, or next to the package in a checkout."""
    installed = PACKAGE / "_requirements"
    return installed if installed.is_dir() else PACKAGE.parent / "requirements"


def preset_names(*folders: Path) -> set[str]:
    """Return the presets in the shipped folder and the given ones. A preset is a file with a single root key."""
    return {file.stem for folder in (examples_folder() / PRESETS, *folders) for file in folder.glob("*.yaml")}


def deepspeed_presets() -> dict[str, Path]:
    """Return the files with the blocks of DeepSpeed's presets, by the names of the presets."""
    return {file.stem: file for file in (examples_folder() / PRESETS / GROUP).glob("*.yaml")}


def experiments() -> dict[str, Path]:
    """Return the files of the shipped experiments, by `folder/name`."""
    root = examples_folder()
    files = sorted(file for file in root.rglob("*.yaml") if file.relative_to(root).parts[0] not in NO_EXPERIMENTS)
    return {file.relative_to(root).with_suffix("").as_posix(): file for file in files}


def known_rewards() -> list[str]:
    """Return the names of the built-in rewards. Imports none of them."""
    return list(REWARDS)


def known_environments() -> list[str]:
    """Return the names of the built-in environments. Imports none of them."""
    return list(ENVIRONMENTS)


def rewards_with_turns() -> list[str]:
    """Return the names of the built-in rewards that assign rewards to the turns of a response."""
    return [name for name, has_turns in REWARDS.items() if has_turns]


def judge_templates() -> dict[str, Path]:
    """Return the files of the shipped prompt templates for judges, by name."""
    return {file.stem: file for file in sorted((PACKAGE / "rewards" / "templates").glob("*.txt"))}


def find_experiment(name: str) -> Path:
    """Return the file of an experiment (`name` or `folder/name`). Raises ConfigError unless exactly one has it."""
    known = experiments()
    wanted = name.removesuffix(".yaml")
    found = [path for path in known if path == wanted or path.endswith(f"/{wanted}")]
    if wanted in known:
        return known[wanted]
    if len(found) == 1:
        return known[found[0]]
    if found:
        choices = ", ".join(found)
        raise ConfigError(
            Fault(
                "--config-name", f"{len(found)} experiments are named '{name}'", f"use one of: {choices}", "duplicate"
            )
        )
    file = Path(f"{wanted}.yaml")
    remedy = (
        f"give the folder separately: {flags_of(file)}" if _holds(file, Path.is_file) else _nearest(wanted, list(known))
    )
    raise ConfigError(Fault("--config-name", f"no experiment is named '{name}'", remedy, "unknown_name"))


def flags_of(file: Path) -> str:
    """Return the flags that choose an experiment's file, for a message."""
    return shlex.join(("--config-path", str(file.parent), "--config-name", file.stem))


def misplaced_file(place: str, given: str, instead: str) -> Fault | None:
    """Return the fault of an experiment that is given without the flags that choose it; None if `given` is none.

    Args:
        place: where it was given.
        given: the path of a file, with or without its ending, or the name of a shipped experiment.
        instead: what belongs at the place, or what is wrong with it.
    """
    path = Path(given)
    file = path if path.suffix in YAML_ENDINGS else Path(f"{given}.yaml")
    if _holds(file, Path.is_file):
        rename = "" if file.suffix == ".yaml" else f"rename it to {file.stem}.yaml, and "
        return Fault(place, f"'{given}' is a file, {instead}", f"{rename}use {flags_of(file)}", "misplaced")
    if any(name == given or name.endswith(f"/{given}") for name in experiments()):
        problem = f"'{given}' is the name of an experiment, {instead}"
        return Fault(place, problem, f"use --config-name {given}", "misplaced")
    if path.suffix in YAML_ENDINGS and "=" not in given:
        remedy = "correct the path, and use --config-path FOLDER --config-name NAME"
        return Fault(place, f"there is no file '{given}', {instead}", remedy, "not_found")
    return None


def find_in(folder: Path, name: str, option: str) -> Path:
    """Return an experiment's file in the folder of the flag `option`. Raises ConfigError if either does not exist."""
    if not _holds(folder, Path.is_dir):
        raise ConfigError(
            Fault(option, f"'{folder}' is not a folder", "give the folder with the YAML file", "not_found")
        )
    file = folder / f"{name.removesuffix('.yaml')}.yaml"
    if not _holds(file, Path.is_file):
        names = sorted(path.stem for path in folder.glob("*.yaml"))
        raise ConfigError(
            Fault("--config-name", f"there is no '{file.name}' in {folder}", _nearest(name, names), "not_found")
        )
    return file


def _holds(path: Path, test: Callable[[Path], bool]) -> bool:
    """Return the result of `test` for the path, or False if the file system rejects it, as too long."""
    try:
        return test(path)
    except OSError:
        return False


def _nearest(name: str, known: list[str]) -> str:
    by_stem = {path.rpartition("/")[2]: path for path in known}
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    close += [by_stem[stem] for stem in difflib.get_close_matches(name, list(by_stem), n=3, cutoff=0.5)]
    if close:
        return f"did you mean {' or '.join(dict.fromkeys(close))}?"
    return f"known: {', '.join(known) or 'none'}; use --config-path for another folder"
