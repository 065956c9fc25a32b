"""Keys that only models that see pictures read, and why a model with a tower does not see them here."""

from __future__ import annotations

import json
from collections.abc import Iterator

from roll.config.derived.batch import learner
from roll.config.derived.model_shape import BOTH_WAYS, PATCHED, SQUARE, TILED, config_file
from roll.config.schema.offline import OfflineConfig
from roll.config.schema.pipelines import Config
from roll.errors import Fault

VISION = "vision_config"
WISH = "sees_pictures"
"""Key of `model_args` with which the tower of some models is run."""
ASKED = f"model_args.{WISH}: true"
UNREAD = {
    "qwen3_5_moe": "pictures were not tried with experts beside gated-delta layers",
    "qwen3_vl_moe": "pictures were not tried with experts",
}
"""By `model_type`, why the tower of a model is not run."""


def unread_tower(model: str) -> str | None:
    """Return why the tower of a model is not run, by its config.json; None if it has none, or the file is not here."""
    file = config_file(model)
    try:
        values = json.loads(file.read_text(encoding="utf-8")) if file else {}
    except (OSError, ValueError):  # a file that cannot be read is a fault of the model
        return None
    if not isinstance(values, dict) or VISION not in values:
        return None
    kind = str(values.get("model_type"))
    if kind in BOTH_WAYS:
        return f"roll runs the tower of {kind} only with {ASKED}"
    return f"roll does not run the tower of {kind}: {UNREAD.get(kind, 'it was not tried')}"


def blind_faults(config: Config | OfflineConfig) -> Iterator[Fault]:
    """Yield a fault for each key of the learner that has no effect because its model sees no pictures."""
    name, learning = learner(config)
    given = {"data_args.images": learning.data_args and learning.data_args.images}
    if "freeze_vision" in learning.model_args.model_fields_set:
        given["model_args.freeze_vision"] = learning.model_args.freeze_vision
    why = unread_tower(learning.model_args.model_name_or_path or config.pretrain) or "the model sees no pictures"
    remedy = f"remove it, or use a model that sees pictures ({', '.join((*PATCHED, *TILED, *SQUARE))})"
    if why.endswith(ASKED):
        remedy = f"remove it, or set {ASKED} in all roles that read the policy's sequences"
    for key, value in given.items():
        if value is not None:
            yield Fault(f"{name}.{key}", f"'{value}', but {why}", remedy, "no_effect")
