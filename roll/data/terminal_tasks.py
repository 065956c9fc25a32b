"""`python -m roll.data.terminal_tasks FOLDER... --output FILE [--images FOLDER]`: writes the rows of task folders of
Harbor and Terminal-Bench, for the environment `shell`.

A folder of Harbor has `task.toml`, `instruction.md` and `tests/test.sh`, which writes `/logs/verifier/reward.txt`
(harborframework.com/docs/tasks); one of Terminal-Bench has `task.yaml`, `run-tests.sh` and `tests/`, whose exit status
judges. Their images are not built: they are in `--images`, or named by `docker_image` in `task.toml`.

Exit status: 0 done, 2 a folder or the output cannot be used, 3 failed otherwise, 130 interrupted.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from roll.data.terminal_needs import largest, limits_of, unmet
from roll.errors import DataError, Fault
from roll.system.command import run_command

COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "environment/docker-compose.yaml")
REWARD = "/logs/verifier/reward.txt"
HARBOR = "rm -rf /logs/verifier; mkdir -p /logs/verifier; bash /tests/test.sh"
TERMINAL_BENCH = "TEST_DIR=/tests bash /tests/run-tests.sh"
ENDINGS = ("", ".tar")
"""Endings of a task's image in `--images`: a folder, or a tar file."""


def terminal_task(folder: Path, images: Path | None) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the row of a task folder, and the limits of the task by the keys of `environments.<domain>`.

    Args:
        images: folder with the image of each task, an OCI layout with the name of the task's folder.

    Raises:
        DataError: the folder is no task, or the task needs what roll does not do. The error names file and remedy.
    """
    if composed := [name for name in COMPOSE if (folder / name).is_file()]:
        problem = "the task needs several containers, or settings of one that only docker compose knows"
        raise DataError(Fault(str(folder / composed[0]), problem, "leave the task out", "not_supported"))
    if (file := folder / "task.toml").is_file():
        found = _read(file, tomllib.loads)
        row = {"verify": HARBOR, "reward_file": REWARD, "tests": _files(folder / "tests", "/tests")}
        instruction, script = _text(folder / "instruction.md"), "/tests/test.sh"
        named = (found.get("environment") or {}).get("docker_image")
        if faults := [*unmet(found, str(file))]:
            raise DataError(*faults)
    else:
        found = _read(file := folder / "task.yaml", yaml.safe_load)
        own = _files(folder / "run-tests.sh", "/tests/run-tests.sh")
        row = {"verify": TERMINAL_BENCH, "tests": {**_files(folder / "tests", "/tests"), **own}}
        instruction, script, named = found.get("instruction"), "/tests/run-tests.sh", None
        if (parser := found.get("parser_name", "pytest")) != "pytest":
            problem = f"parser_name is '{parser}', but only the exit status of the tests judges"
            raise DataError(Fault(str(file), problem, "leave the task out", "not_supported"))
    if not isinstance(instruction, str) or not instruction.strip():
        raise DataError(Fault(str(folder), "the task has no instruction", "add it", "missing"))
    if script not in row["tests"]:
        raise DataError(Fault(str(folder), f"the task has no {script.removeprefix('/')}", "add it", "missing"))
    try:
        limits = limits_of(found)
    except ValueError as error:
        raise DataError(Fault(str(file), str(error), "correct the file", "malformed")) from error
    said = [{"role": "user", "content": instruction.strip()}]
    image = _image(folder, images, named)
    return {"messages": said, "tag": "terminal", "image": image, "judged_in": "same", **row}, limits


def _image(folder: Path, images: Path | None, named: Any) -> str:
    """Return the task's image: in `images`, or else the one that it names. Raises DataError if there is none."""
    for path in (images / f"{folder.name}{ending}" for ending in ENDINGS if images):
        if path.exists():
            return str(path.absolute())
    if isinstance(named, str) and named:
        return named
    where = next((one for one in ("environment", ".") if (folder / one / "Dockerfile").is_file()), "environment")
    problem = f"the image is not built, and there is no '{folder.name}' in {images or '--images'}"
    remedy = (
        f"on a machine with docker: `docker build -t task {folder / where} && docker save -o {folder.name}.tar task`, "
        f"and give the folder of the tar files as --images"
    )
    raise DataError(Fault(str(folder / where / "Dockerfile"), problem, remedy, "not_supported"))


def _files(path: Path, place: str) -> dict[str, Any]:
    """Return a file or the files below a folder as the column `tests` holds them; none if there is no such path."""
    if path.is_file():
        content, mode = path.read_bytes(), path.stat().st_mode & 0o777
        return {place: {"base64": base64.b64encode(content).decode("ascii"), "mode": mode}}
    found: dict[str, Any] = {}
    for inner in sorted(path.iterdir()) if path.is_dir() else ():
        found |= _files(inner, f"{place}/{inner.name}")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        remedy = "give folders with task.toml, instruction.md and tests/test.sh, or with task.yaml and run-tests.sh"
        raise DataError(Fault(str(path), f"cannot be read: {error}", remedy, "unreadable")) from error


def _read(path: Path, parse: Any) -> Mapping[str, Any]:
    text = _text(path)
    try:
        found = parse(text)
    except (ValueError, yaml.YAMLError) as error:
        raise DataError(Fault(str(path), f"cannot be parsed: {error}", "correct the file", "malformed")) from error
    if not isinstance(found, Mapping):
        raise DataError(Fault(str(path), "is not a mapping", "correct the file", "malformed"))
    return found


def write_rows(folders: Sequence[Path], output: Path, images: Path | None) -> dict[str, float]:
    """Write the rows of task folders as JSON Lines. Return the largest limits of the tasks.

    Raises:
        DataError: folders are no tasks, or `output` cannot be written. The error has the faults of all.
    """
    tasks, faults = list[tuple[dict[str, Any], dict[str, float]]](), list[Fault]()
    for folder in folders:
        try:
            tasks.append(terminal_task(folder, images))
        except DataError as error:
            faults += error.faults
    if faults:
        raise DataError(*faults)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text("".join(json.dumps(row) + "\n" for row, _ in tasks), encoding="utf-8")
    except OSError as error:
        raise DataError(
            Fault(str(output), f"cannot be written: {error}", "give another path", "not_writable")
        ) from error
    return largest(limits for _, limits in tasks)


def terminal_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m roll.data.terminal_tasks", description="Write the rows of task folders of terminal benchmarks."
    )
    parser.add_argument("folders", nargs="+", type=Path, help="task folders")
    parser.add_argument("--output", type=Path, required=True, help="the file to write, in JSON Lines")
    parser.add_argument("--images", type=Path, help="folder with an OCI layout of each task's image")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Write the rows, and return the exit status."""
    given = terminal_parser().parse_args(words)

    def write() -> None:
        limits = write_rows(given.folders, given.output, given.images)
        print(f"{given.output}: {len(given.folders)} tasks")
        if limits:
            print("largest limits of the tasks, for environments.<domain> (nothing sets them by itself):")
        for key, value in limits.items():
            print(f"  {key}: {value:g}")

    return run_command(write)


if __name__ == "__main__":
    sys.exit(main())
