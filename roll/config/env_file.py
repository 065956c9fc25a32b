"""`.deepspeed_env`: variables for every worker, in the files where DeepSpeed's own launcher looks for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from roll.errors import Fault

NAME = ".deepspeed_env"


def env_files() -> list[Path]:
    """Where they may lie, the home folder first: what the working directory says of the same variable holds."""
    return [Path.home() / NAME, Path.cwd() / NAME]


def read_env_files(files: Sequence[Path]) -> tuple[dict[str, str], list[Fault]]:
    """The variables of those files that exist, and the lines that cannot be read."""
    variables: dict[str, str] = {}
    faults: list[Fault] = []
    for file in dict.fromkeys(files):
        if not file.is_file():
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            name, equals, value = line.removeprefix("export ").partition("=")
            if not equals or not name.isidentifier():
                faults.append(Fault(f"{file}:{number}", f"'{line}' sets no variable", "write a line as NCCL_IB_DISABLE=1"))
            else:
                variables[name] = value
    return variables, faults
