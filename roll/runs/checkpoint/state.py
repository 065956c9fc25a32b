"""The training loop's part of a checkpoint. Strategies write models and optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from roll.errors import CheckpointError

LOOP_FILE = "loop.json"
"""Name of the file in the checkpoint's folder."""


@dataclass(frozen=True)
class LoopState:
    """State of the loop at the end of a step."""

    step: int
    """Number of completed steps."""
    policy_version: int
    """Number of optimizer updates behind the policy's weights."""
    sampler: Mapping[str, Any]
    """The sampler's state, JSON-serialisable."""
    basis: Mapping[str, str]
    """The resume fingerprint: the values, by configuration key, that determine which rows come next and how large a
    step is. A run that resumes from this checkpoint must have the same values.
    """
    seconds: float
    """Wall-clock seconds so far, over all processes that ran this experiment."""
    credit: Mapping[str, Any] = field(default_factory=dict)
    """State that credit assignment passes from step to step, JSON-serialisable. Empty if there is none."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The configuration without secrets. Empty in checkpoints of earlier versions."""

    def write(self, folder: Path) -> None:
        (folder / LOOP_FILE).write_bytes(_LOOP_STATE.dump_json(self, indent=1))

    @staticmethod
    def read(folder: Path) -> LoopState:
        """Read the file that `write` wrote. Raises CheckpointError if it is missing or invalid."""
        path = folder / LOOP_FILE
        try:
            return _LOOP_STATE.validate_json(path.read_bytes(), strict=True)
        except (FileNotFoundError, ValidationError) as error:
            raise CheckpointError(
                f"{path}: cannot read the state of the training loop: {error}; use another checkpoint"
            ) from error


_LOOP_STATE = TypeAdapter(LoopState)
