"""Experiments, presets, rewards and environments, and how a name finds its file."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

from roll.errors import ConfigError, Fault

PACKAGE = Path(__file__).resolve().parent.parent
PRESETS = "config"
"""Folder of the presets among the examples."""
MODELS = "models"
"""Folder, among the examples, of the shapes of models that are too large to have at hand: `models/<name>/config.json`."""
NO_EXPERIMENTS = (PRESETS, "kubernetes")


def examples_folder() -> Path:
    """The shipped examples: inside an installed package, or beside the package in a checkout."""
    installed = PACKAGE / "_examples"
    return installed if installed.is_dir() else PACKAGE.parent / "examples"


def locks_folder() -> Path:
    """The lists of the versions that the tests run with: inside an installed package, or beside the package in a checkout."""
    installed = PACKAGE / "_requirements"
    return installed if installed.is_dir() else PACKAGE.parent / "requirements"


def preset_names(*folders: Path) -> set[str]:
    """Names of the presets in the shipped folder and in the folders given: each is one file and one root key."""
    return {file.stem for folder in (examples_folder() / PRESETS, *folders) for file in folder.glob("*.yaml")}


def experiments() -> dict[str, Path]:
    """Every shipped experiment by `folder/name`."""
    root = examples_folder()
    files = sorted(file for file in root.rglob("*.yaml") if file.relative_to(root).parts[0] not in NO_EXPERIMENTS)
    return {file.relative_to(root).with_suffix("").as_posix(): file for file in files}


def known_rewards() -> list[str]:
    """Names of the reward functions: the files of `roll/rewards/` that register one of their own name. Imports none."""
    files = sorted((PACKAGE / "rewards").glob("*.py"))
    return [file.stem for file in files if f'REWARDS.register("{file.stem}")' in file.read_text(encoding="utf-8")]


def known_environments() -> list[str]:
    """Names of the environments: the files of `roll/environments/` that register one of their own name. Imports none."""
    files = sorted((PACKAGE / "environments").glob("*.py"))
    return [file.stem for file in files if f'ENVIRONMENTS.register("{file.stem}")' in file.read_text(encoding="utf-8")]


def rewards_with_turns() -> list[str]:
    """Those of them that say what the turns of a response earned."""
    return [name for name in known_rewards() if "TurnReward(" in (PACKAGE / "rewards" / f"{name}.py").read_text(encoding="utf-8")]


def judge_templates() -> dict[str, Path]:
    """The texts that judges are asked with, by name."""
    return {file.stem: file for file in sorted((PACKAGE / "rewards" / "templates").glob("*.txt"))}


def find_experiment(name: str) -> Path:
    """The file of a name, or of `folder/name`.

    Raises:
        ConfigError: nothing has this name, or several files have.
    """
    known = experiments()
    wanted = name.removesuffix(".yaml")
    found = [path for path in known if path == wanted or path.endswith(f"/{wanted}")]
    if wanted in known:
        return known[wanted]
    if len(found) == 1:
        return known[found[0]]
    if found:
        choices = ", ".join(found)
        raise ConfigError([Fault("--config-name", f"'{name}' is the name of {len(found)} experiments", f"give one of: {choices}")])
    file = Path(f"{wanted}.yaml")
    remedy = (
        f"give its folder apart: --config-path {file.parent} --config-name {file.stem}"
        if _holds(file, Path.is_file)
        else _nearest(wanted, list(known))
    )
    raise ConfigError([Fault("--config-name", f"no experiment is named '{name}'", remedy)])


def find_in(folder: Path, name: str, option: str) -> Path:
    """The file of a name in a folder that the user gave.

    Raises:
        ConfigError: the folder or the file does not exist.
    """
    if not _holds(folder, Path.is_dir):
        raise ConfigError([Fault(option, f"'{folder}' is not a folder", "give the folder that holds the YAML file")])
    file = folder / f"{name.removesuffix('.yaml')}.yaml"
    if not _holds(file, Path.is_file):
        names = sorted(path.stem for path in folder.glob("*.yaml"))
        raise ConfigError([Fault("--config-name", f"there is no '{file.name}' in {folder}", _nearest(name, names))])
    return file


def _holds(path: Path, test: Callable[[Path], bool]) -> bool:
    """A name that is too long for the file system is none of its files."""
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
    return f"known: {', '.join(known) or 'none'}; another folder is given with --config-path"
