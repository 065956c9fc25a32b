"""Where a role's model is. Imports no library of models: the driver needs the paths before it starts Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from roll.config.schema.model import ModelConfig
from roll.config.schema.roles import ExperimentConfig
from roll.errors import DataError
from roll.stores.address import is_address
from roll.stores.models import local_model, pinned_model
from roll.stores.store import StoreError


def model_name(config: ExperimentConfig, model_args: ModelConfig) -> str:
    """Return the Hub name, absolute folder, or address with its version, of a role's model, for its workers: they may
    have another working directory, and be on other hosts.

    Raises:
        DataError: the model's store cannot be used.
    """
    name = model_args.model_name_or_path or config.pretrain
    if is_address(name):
        return _of_store(pinned_model, name, model_args)
    return str(Path(name).absolute()) if Path(name).exists() else name


def model_path(config: ExperimentConfig, model_args: ModelConfig) -> str:
    """Return the Hub name, or the absolute folder on this host, of a role's model. Downloads one from a store.

    Raises:
        DataError: the model's store cannot be used.
    """
    return _of_store(local_model, model_name(config, model_args), model_args)


def _of_store(find: Callable[[str], str], name: str, model_args: ModelConfig) -> str:
    try:
        return find(name)
    except StoreError as error:
        place = "model_args.model_name_or_path" if model_args.model_name_or_path else "pretrain"
        raise DataError(error.fault(place)) from error
