"""What a configuration names as `package.module:Name`: looked at in a process of its own, so that a dry run imports none of it here.

user_code.py                                user_code_child.py
  ── parts: names, and values of their keys ─▶  imports each
  ◀── traits, or faults ── traits ── ...... ──  one line of JSON for each part as soon as it is known
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
from roll.errors import Fault

IMPORT_SECONDS = 120.0
"""In which all modules must be imported; torch alone takes some seconds."""


@dataclass(frozen=True)
class UserPart:
    """Something of the user's, as a configuration names it."""

    name: str
    """`package.module:Name`"""
    place: tuple[str, ...]
    """The key that names it."""
    arguments_place: tuple[str, ...]
    arguments: dict[str, Any]
    """Values of the keys of its own."""
    kind: str | None = None
    """The key of `KINDS`; None for a reward."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that its module is imported with."""


@dataclass(frozen=True)
class Looked:
    """What the process says of a part."""

    faults: tuple[Fault, ...]
    traits: Mapping[str, Any]


def look_into(values: Mapping[str, Any]) -> tuple[dict[str, Method[Any]], list[Fault]]:
    """Import what the plain values name, and check the values of its keys.

    Returns:
        By key, the methods of the user's with the traits that they declare, and all faults. A part with a fault has the usual traits.
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
    """What the plain values, of which the schema has checked nothing, name as `package.module:Name`."""
    for kind in KINDS.values():
        if is_path(name := values.get(kind.key)):
            yield UserPart(name, (kind.key,), (kind.arguments,), _block(values.get(kind.arguments)), kind.key)
    for domain, reward in _block(values.get("rewards")).items():
        block, place = _block(reward), ("rewards", str(domain))
        if is_path(name := block.get("reward")):
            arguments, variables = _block(block.get("reward_args")), _texts(block.get("system_envs"))
            yield UserPart(name, (*place, "reward"), (*place, "reward_args"), arguments, environment=variables)


def _block(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _texts(value: Any) -> dict[str, str]:
    return {name: text for name, text in _block(value).items() if isinstance(text, str)}


def ask(parts: Sequence[UserPart], environment: Mapping[str, str]) -> list[Looked]:
    """What the process says of each part. The part that it ends or hangs with is told so, and those after it are looked at anew."""
    command = [sys.executable, "-m", "roll.config.load.user_code_child", str(os.getpid())]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env=os.environ | dict(environment),
    )
    try:
        answers, errors = process.communicate(json.dumps([asdict(part) for part in parts]), IMPORT_SECONDS)
        cause = f"ended the process that imported it, with status {process.returncode}: {errors.strip()[-300:] or 'no message'}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        answers, _ = process.communicate(timeout=IMPORT_SECONDS)
        cause = f"was not imported within {IMPORT_SECONDS:g} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(IMPORT_SECONDS)
    looked = [_looked(json.loads(line)) for line in answers.splitlines()]
    if len(looked) == len(parts):
        return looked
    guilty, *others = parts[len(looked) :]
    fault = Fault(".".join(guilty.place), f"'{guilty.name}' {cause}", "mend the module; what takes long belongs into its functions")
    return [*looked, Looked((fault,), {}), *(ask(others, environment) if others else [])]


def _looked(said: dict[str, Any]) -> Looked:
    return Looked(tuple(Fault(**fault) for fault in said["faults"]), said["traits"])
