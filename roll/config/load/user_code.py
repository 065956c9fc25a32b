"""Checks the user's code that a configuration names, in a separate process, so that a dry run does not import it here.

user_code.py                                user_code_child.py
  ── parts: names, and values of their keys ─▶  imports each
  ◀── traits and faults of each part ─────────  one line of JSON for each part, written as soon as it is checked
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from roll.algorithms.methods.base import Method, is_path
from roll.algorithms.methods.kinds import KINDS
from roll.config.schema.base import variable_text
from roll.config.shipped import known_rewards
from roll.errors import Fault

IMPORT_SECONDS = 120.0
"""Deadline for importing all modules, in seconds. torch alone takes several seconds."""


@dataclass(frozen=True)
class UserPart:
    """A class or function of the user, or a built-in reward with arguments, as a configuration names it."""

    name: str
    """`package.module:Name`"""
    place: tuple[str, ...]
    """Path of the key that names it."""
    arguments_place: tuple[str, ...]
    """Path of the block with its arguments."""
    arguments: dict[str, Any]
    """Its arguments, by name."""
    kind: str | None = None
    """Key in `KINDS`, None for a reward."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables to set before its module is imported."""
    group: bool = False
    """Whether it is a reward that receives all responses to a prompt in one call."""
    concurrency: int = 1
    """Number of concurrent calls of a reward. 1 if it shares its process with other rewards."""


@dataclass(frozen=True)
class InspectedPart:
    """The result of checking a part."""

    faults: tuple[Fault, ...]
    traits: Mapping[str, Any]


def inspect_user_code(values: Mapping[str, Any]) -> tuple[dict[str, Method[Any]], list[Fault]]:
    """Import the user's code that the plain values name, and check its arguments.

    Returns:
        The user's methods that have no faults, by key, with the traits that they declare; and the faults of all parts.
    """
    parts = list(user_parts(values))
    looked = ask(parts, _texts(values.get("system_envs"))) if parts else []
    methods = {
        part.kind: Method(part.name, type(KINDS[part.kind].traits)(**said.traits))
        for part, said in zip(parts, looked, strict=True)
        if part.kind is not None and not said.faults
    }
    return methods, [fault for said in looked for fault in said.faults]


def user_parts(values: Mapping[str, Any]) -> Iterator[UserPart]:
    """Yield every `package.module:Name` in the unchecked plain values, and every built-in reward that has arguments."""
    for kind in KINDS.values():
        if is_path(name := values.get(kind.key)):
            yield UserPart(name, (kind.key,), (kind.arguments,), _block(values.get(kind.arguments)), kind.key)
    for domain, reward in _block(values.get("rewards")).items():
        block, place = _block(reward), ("rewards", str(domain))
        parts = _block(block.get("parts"))
        count = block.get("concurrency")
        alone = _reward(
            str(domain),
            block,
            place,
            _texts(block.get("system_envs")),
            count if isinstance(count, int) and not parts else 1,
        )
        several = (
            _reward(str(name), _block(part), (*place, "parts", str(name)), alone.environment, 1)
            for name, part in parts.items()
        )
        yield from (part for part in (alone, *several) if is_path(part.name))


def _reward(
    name: str, block: Mapping[str, Any], place: tuple[str, ...], environment: dict[str, str], concurrency: int
) -> UserPart:
    """Return a reward as a part. Its name is a path if it is the user's, or if it is built-in and has arguments to
    check.
    """
    named, arguments = block.get("reward") or name, _block(block.get("reward_args"))
    if arguments and named in known_rewards():
        named = f"roll.rewards.functions.{named}:{named}"
    key = (*place, "reward") if block.get("reward") else place
    return UserPart(
        named, key, (*place, "reward_args"), arguments, None, environment, block.get("group") is True, concurrency
    )


def _block(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _texts(value: Any) -> dict[str, str]:
    return {name: text for name, given in _block(value).items() if isinstance(text := variable_text(given), str)}


def ask(parts: Sequence[UserPart], environment: Mapping[str, str]) -> list[InspectedPart]:
    """Check the parts in a child process, and return the result of each.

    If the child ends early or hangs, the part that it was importing has a fault, and a new child checks the remaining
    parts.
    """
    # -P: a folder `roll` in the working directory, as in a clone of ROLL, must not hide this package, so that folder is
    # searched last.
    paths = os.pathsep.join([*(path or os.getcwd() for path in sys.path), os.getcwd()])
    command = [sys.executable, "-P", "-m", "roll.config.load.user_code_child", str(os.getpid())]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": paths} | dict(environment),
    )
    try:
        answers, errors = process.communicate(json.dumps([asdict(part) for part in parts]), IMPORT_SECONDS)
        cause = (
            f"ended the process that imported it, with status {process.returncode}: "
            f"{errors.strip()[-300:] or 'no message'}"
        )
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        answers, _ = process.communicate(timeout=IMPORT_SECONDS)
        cause = f"was not imported within {IMPORT_SECONDS:g} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(IMPORT_SECONDS)
    looked = [_decoded(json.loads(line)) for line in answers.splitlines()]
    if len(looked) == len(parts):
        return looked
    guilty, *others = parts[len(looked) :]
    remedy = "fix the module, and move slow code from the module level into its functions"
    fault = Fault(".".join(guilty.place), f"'{guilty.name}' {cause}", remedy)
    return [*looked, InspectedPart((fault,), {}), *(ask(others, environment) if others else [])]


def _decoded(said: dict[str, Any]) -> InspectedPart:
    return InspectedPart(tuple(Fault(**fault) for fault in said["faults"]), said["traits"])
