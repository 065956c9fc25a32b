"""The subject of an evaluation: a run, one of its checkpoints, or a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from roll.config.schema.pipelines import Config
from roll.errors import ConfigError, Fault
from roll.export.source import CHECKPOINTS, CONFIG, CheckpointSource, find_source, read_run_config
from roll.runs.checkpoint.manifest import MANIFEST
from roll.runs.checkpoint.state import LoopState

PLACE = "SUBJECT"
"""Name of the first command-line argument in error messages."""


@dataclass(frozen=True)
class Trained:
    """A checkpoint, and the run that wrote it."""

    source: CheckpointSource
    run: Path
    config: Config
    step: int


@dataclass(frozen=True)
class Subject:
    """The model to evaluate."""

    name: str
    """Name for the results: of the run and the step, or of the model."""
    model: str
    """Folder or Hub id of the model. For a checkpoint, that of the model from which the training started."""
    trained: Trained | None
    """The checkpoint and its run. None for a model without a run."""


def find_subject(text: str) -> Subject:
    """Return the subject for a run folder (its newest complete checkpoint), a checkpoint folder, a Hugging Face folder
    or a Hub id.

    Raises:
        ConfigError: the folder has no checkpoint, belongs to a reward model, or holds only an adapter; or its
            configuration is unreadable.
        CheckpointError: the checkpoint is incomplete or damaged.
    """
    path = Path(text)
    of_run = (path / CONFIG).is_file() or (path / CHECKPOINTS).is_dir()
    if of_run or (path / MANIFEST).is_file() or (path.is_dir() and path.absolute().parent.name == CHECKPOINTS):
        source = find_source(path)
        if source.pipeline == "reward_model":
            remedy = "evaluate a policy: a run of another pipeline, or a language model"
            raise ConfigError([Fault(PLACE, f"'{text}' trained a reward model, which generates nothing", remedy)])
        run = source.checkpoint.absolute().parent.parent
        step = LoopState.read(source.checkpoint).step
        return Subject(f"{run.name}-step_{step}", source.model, Trained(source, run, read_run_config(run), step))
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        remedy = "give the run folder, or merge the adapter first: python -m roll.export RUN OUT --format merged"
        raise ConfigError([Fault(PLACE, f"'{text}' holds an adapter without its model", remedy)])
    # The parent's name distinguishes the exports of two runs, which are both called `export`.
    name = f"{path.absolute().parent.name}-{path.name}" if path.is_dir() else path.name
    return Subject(name or text, text, None)
