"""Reads the files of a checkpoint without executing code from them, even if DeepSpeed reads them.

`torch.load` uses pickle, which can execute code from a file, unless it accepts only tensors and plain values. DeepSpeed
calls it with unrestricted unpickling in two dozen places. An environment variable of torch overrides all of them.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch.serialization import safe_globals

from roll.errors import CheckpointError

FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
RECONSTRUCT: Any = np.zeros(0).__reduce__()[0]
"""Function that reconstructs pickled numpy arrays."""


def member(kind: type[Enum], name: str) -> Enum:
    """Return the member of `ZeroStageEnum` with the given name. Python 3.11.0 to 3.11.3 pickle enumeration members as
    `getattr` calls.

    In checkpoint files, this function replaces `getattr`.

    Raises:
        pickle.UnpicklingError: `kind` is another type, or it has no such member.
    """
    if kind is not ZeroStageEnum or name not in kind.__members__:
        raise pickle.UnpicklingError(f"Unsupported global: GLOBAL getattr of {name}")
    return kind[name]


PLAIN: list[Any] = [
    *((member, f"{module}.getattr") for module in ("builtins", "__builtin__")),
    LossScaler,
    DynamicLossScaler,
    ZeroStageEnum,
    fragment_address,
    RECONSTRUCT,
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
]
"""Types and functions that a checkpoint file may refer to, in addition to tensors and plain values: those that
DeepSpeed's files contain, and those of numpy's random state.
"""


@contextmanager
def nothing_runs(folder: Path) -> Iterator[None]:
    """Let every `torch.load` of this process accept only tensors, plain values and what `PLAIN` lists while the block
    lasts.

    Raises:
        CheckpointError: a file in `folder` contains other objects.
    """
    earlier = os.environ.get(FORCE)
    os.environ[FORCE] = "1"
    try:
        with safe_globals(PLAIN):
            yield
    except pickle.UnpicklingError as error:
        file, why = _refused(folder) or (folder, str(error))
        raise CheckpointError(
            f"{file} contains an object that roll does not write, and that could execute code when loaded: {why}. "
            f"Nothing was executed; resume from a checkpoint whose origin you trust"
        ) from error
    finally:
        if earlier is None:
            del os.environ[FORCE]
        else:
            os.environ[FORCE] = earlier


def load(file: Path, mapped: bool = False) -> Any:
    """Load a file of a checkpoint into host memory. With `mapped`, tensors stay on disk until they are used.

    Raises:
        CheckpointError: see `nothing_runs`.
    """
    with nothing_runs(file):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)


def _refused(folder: Path) -> tuple[Path, str] | None:
    """Return the first file that torch refuses to load, and the name of the refused object or the reason; None if torch
    loads all files.
    """
    for file in [folder] if folder.is_file() else sorted(folder.rglob("*.pt")):
        try:
            with safe_globals(PLAIN):
                torch.load(file, map_location="meta", weights_only=True)
        except pickle.UnpicklingError as error:
            reason = str(error)
            _, found, name = reason.partition("GLOBAL ")
            return file, name.split()[0] if found else reason.strip().splitlines()[-1]
    return None
