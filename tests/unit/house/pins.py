"""Reads the requirements in `pyproject.toml` and the versions in the locks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(*extras: str) -> list[Requirement]:
    """Return the project's requirements, including those of the extras."""
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return [Requirement(line) for line in lines]


def locked(kind: str) -> dict[str, str]:
    """Return the packages of a lock and their versions. `kind` is `cpu` or `gpu`."""
    lines = (ROOT / "requirements" / f"{kind}.lock").read_text(encoding="utf-8").splitlines()
    return {
        canonicalize_name(match[1]): match[2]
        for line in lines
        if (match := re.match(r"([a-z][\w.-]*)==([^\s;]+)", line))
    }
