"""The request for an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """What to evaluate, and how. None means the value of the run, or the default for a model without a run."""

    subject: str
    """A run folder, a checkpoint folder, a Hugging Face folder or a Hub id."""
    data: tuple[str, ...] = ()
    """Files, folders or Hub names, each a separate set. If empty, the validation sets of the run are used."""
    split: str | None = None
    reward: str | None = None
    """Reward function that scores all rows: a name, or `package.module:function`."""
    template: str | None = None
    prompt: str | None = None
    """Column that holds the prompt as text."""
    messages: str | None = None
    """Column that holds a list of messages."""
    ground_truth: str | None = None
    """Column that holds the reference answer, or keys joined with dots that lead to it."""
    samples: int | None = None
    """Number of responses to each prompt."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None
    seed: int | None = None
    limit: int | None = None
    """Largest number of prompts of each set; the first ones are used."""
    strategy: str | None = None
    devices: tuple[int, ...] | None = None
    """GPU numbers; empty for the CPU."""
    dtype: str | None = None
    output: Path | None = None
    overrides: tuple[str, ...] = ()
    """`key=value` overrides of the evaluation's configuration."""
    dry_run: bool = False
