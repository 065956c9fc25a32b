"""The request for an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """What to evaluate, and how. None stands for the run's value, or for the default of a model without a run."""

    subject: str
    """A run folder, a checkpoint's folder, a Hugging Face folder or a Hub id."""
    data: tuple[str, ...] = ()
    """Files or Hub names, each a set of its own. If empty, the run's validation sets."""
    split: str | None = None
    reward: str | None = None
    """Name of a reward function, or `package.module:function`, that scores all rows."""
    template: str | None = None
    prompt: str | None = None
    """Column that holds the prompt as text."""
    messages: str | None = None
    """Column that holds a list of messages."""
    samples: int | None = None
    """Samples of each prompt."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None
    seed: int | None = None
    limit: int | None = None
    """Most prompts of a set."""
    strategy: str | None = None
    devices: tuple[int, ...] | None = None
    """GPUs; empty for the CPU."""
    dtype: str | None = None
    output: Path | None = None
    """Folder that the results are written to."""
    overrides: tuple[str, ...] = ()
    """`key=value` for the evaluation's configuration."""
    dry_run: bool = False
