"""The training loop's own state in a checkpoint. Strategies write models and optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from roll.errors import CheckpointError

LOOP_FILE = "loop.json"


@dataclass(frozen=True)
class LoopState:
    """State of the loop at the end of a step."""

    step: int
    """Steps completed."""
    policy_version: int
    """Number of optimizer updates behind the policy's weights."""
    sampler: Mapping[str, Any]
    """The sampler's state in JSON's types."""
    basis: Mapping[str, str]
    """The resume fingerprint, by key of the configuration: what decides which rows come next and what a step is. A run that goes on
    from here has the same."""
    seconds: float
    """Wall-clock seconds so far, over all processes that ran this experiment."""
    credit: Mapping[str, Any] = field(default_factory=dict)
    """State that credit assignment carries from step to step, in JSON's types. Empty if there is none."""

    def write(self, folder: Path) -> None:
        (folder / LOOP_FILE).write_bytes(_LOOP_STATE.dump_json(self, indent=1))

    @staticmethod
    def read(folder: Path) -> LoopState:
        """Read the file of `write`. Raises CheckpointError if it is absent or invalid."""
        path = folder / LOOP_FILE
        try:
            return _LOOP_STATE.validate_json(path.read_bytes(), strict=True)
        except (FileNotFoundError, ValidationError) as error:
            raise CheckpointError(f"{path}: no state of the loop can be read from it: {error}; take another checkpoint") from error


_LOOP_STATE = TypeAdapter(LoopState)
