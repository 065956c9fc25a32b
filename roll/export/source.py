"""Finds the checkpoint to export and the configuration of the run that wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from yaml import YAMLError

from roll.config.derived.batch import learner
from roll.config.load.loader import checked_config
from roll.config.schema.model import DataConfig, ModelConfig
from roll.config.schema.pipelines import Config
from roll.errors import ConfigError, Fault
from roll.runs.checkpoint.manifest import MANIFEST, verify_checkpoint
from roll.runs.checkpoint.store import CHECKPOINTS, CheckpointStore
from roll.stores.models import local_model
from roll.stores.store import StoreError
from roll.tracking.history import read_starts

CONFIG = "config.yaml"


@dataclass(frozen=True)
class CheckpointSource:
    """A complete checkpoint, and the settings of its run that an export needs."""

    checkpoint: Path
    model: str
    """Folder or Hub id of the model from which the training started."""
    model_args: ModelConfig
    seed: int
    pipeline: str
    data_args: DataConfig | None = None
    """Format of the training rows or prompts."""
    run: Path | None = None
    """The run folder."""
    config: Config | None = None


def find_source(path: Path) -> CheckpointSource:
    """Find the checkpoint in a checkpoint folder, or the newest complete checkpoint of a run folder.

    Raises:
        ConfigError: the path is neither, or the run's configuration is missing or cannot be read.
        CheckpointError: the checkpoint is incomplete or damaged.
    """
    store = CheckpointStore(path / CHECKPOINTS, keep=1)
    is_run = store.folder.is_dir()
    if (path / MANIFEST).is_file() or (path.is_dir() and path.absolute().parent.name == CHECKPOINTS and not is_run):
        verify_checkpoint(path)
        checkpoint, run = path, path.absolute().parent.parent
    else:
        newest = store.newest_verified("export from a copy of the run folder, or from another run") if is_run else None
        if newest is None:
            remedy = "give a run folder (output_dir), or the folder of a checkpoint (output_dir/checkpoints/step_N)"
            raise ConfigError(
                Fault(
                    "checkpoint",
                    f"'{path}' is neither a run folder with checkpoints nor a checkpoint",
                    remedy,
                    "not_found",
                )
            )
        checkpoint, run = newest, path
    config = read_run_config(run)
    _, role = learner(config)
    model = _from_store(model_source(role.model_args.model_name_or_path or config.pretrain, run))
    return CheckpointSource(
        checkpoint, model, role.model_args, config.seed, config.pipeline, role.data_args, run, config
    )


def _from_store(model: str) -> str:
    """Return the local folder of a model in a store, and any other as it is. Raises ConfigError."""
    try:
        return local_model(model)
    except StoreError as error:
        raise ConfigError(error.fault("pretrain")) from error


def model_source(name: str, run: Path) -> str:
    """Return a model's Hub id or absolute folder; the run may have named it relative to its own directory."""
    folders = [*(Path(start.folder) for start in reversed(read_starts(run))), Path.cwd()]
    return next((str((folder / name).absolute()) for folder in folders if (folder / name).is_dir()), name)


def read_run_config(run: Path) -> Config:
    """Read the configuration in a run's folder. Raises ConfigError if it is missing or cannot be read."""
    if not (run / CONFIG).is_file():
        raise ConfigError(
            Fault(
                "checkpoint",
                f"there is no {run / CONFIG}",
                "give a checkpoint that is still in its run folder",
                "not_found",
            )
        )
    try:
        written = OmegaConf.load(run / CONFIG)
    except (OSError, YAMLError) as error:
        raise ConfigError(
            Fault(str(run / CONFIG), f"cannot be read: {error}", "restore the file that the run wrote", "unreadable")
        ) from error
    return checked_config(written, (), imports=False)  # pyright: ignore[reportArgumentType]
