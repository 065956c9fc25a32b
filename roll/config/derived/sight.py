"""Keys that only models that see pictures read. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.derived.batch import learner
from roll.config.derived.model_shape import PATCHED, TILED
from roll.config.schema.offline import OfflineConfig
from roll.config.schema.pipelines import Config
from roll.errors import Fault


def blind_faults(config: Config | OfflineConfig) -> Iterator[Fault]:
    """Yield a fault for each key of the learner that has no effect because its model sees no pictures."""
    name, learning = learner(config)
    given = {"data_args.images": learning.data_args and learning.data_args.images}
    if "freeze_vision" in learning.model_args.model_fields_set:
        given["model_args.freeze_vision"] = learning.model_args.freeze_vision
    remedy = f"remove it, or use a model that sees pictures ({', '.join((*PATCHED, *TILED))})"
    for key, value in given.items():
        if value is not None:
            yield Fault(f"{name}.{key}", f"'{value}', but the model sees no pictures", remedy, "no_effect")
