"""Translates ROLL's files about pictures: its pipeline RLVR for models that see, whose start script has fixed columns.

Keys and classes of video and diffusion models are refused, and so are models that roll has no tower for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roll.config.roll_v2.paths import matches
from roll.config.schema.faults import printable
from roll.config.schema.fields import dotted
from roll.config.schema.foreign_names import ROLE
from roll.errors import Fault

REMEDY = "use models, rows and rewards of text, or of text and pictures"
CLASSES = re.compile(r"(Video|Geo3k|Diffusion|Image)\w*$")
"""Ends of the names of ROLL's worker classes."""
KEYS = re.compile(r"(image|images|video|videos|vlm|wan|diffusion)(_|$)")
OWN_KEY = ("data_args", "images")
"""The key of roll's own that says where rows have pictures. ROLL has none of this name."""
BOUNDS = re.compile(r"(max|min)_pixels$")
IN_FILE = "set size in the model's preprocessor_config.json, which decides here"
SECTIONS = ("model_args", "data_args", "strategy_args", "generating_args")
DIFFUSION = re.compile("^diffusion")
VALUES = {"strategy_name": DIFFUSION, "model_type": DIFFUSION, "worker_cls": CLASSES}
"""By key, the values that are about video or diffusion models."""
TEMPLATES = re.compile(r"(^|[-_])vl([-_]|$)", re.IGNORECASE)
"""Matches ROLL's templates for models that see pictures."""
ROLLS = "roll.pipeline."
"""Start of the module paths of ROLL's own classes."""
DETECTION = re.compile(r"\.DetectionRewardWorker$")
SEES = re.compile(r"(^|[-_.])(vl|omni)([-_.]|$)", re.IGNORECASE)
"""Matches names of models that are trained with pictures. Qwen3.5 sees them too, but ROLL also trains it on text."""
UNSEEN = {
    re.compile(r"omni", re.IGNORECASE): "a model of sound and video",
    re.compile(r"-VL-\d+B-A\d+B", re.IGNORECASE): "a mixture of experts that sees pictures",
    re.compile(
        r"Qwen3\.5-", re.IGNORECASE
    ): "a model of the family Qwen3.5, with which ROLL's files of pictures were not tried",
}
"""Names of models that see pictures and that roll cannot train, with the reason."""
SEEING_MODEL = "use Qwen2.5-VL, a dense Qwen3-VL, SmolVLM or Idefics3"
BOXES = "detection"
"""The reward whose boxes are in pixels with some models."""
SEES_PIXELS = re.compile(r"Qwen2[._]5-VL", re.IGNORECASE)
"""Matches names of models that answer with boxes in pixels of the picture as they see it."""
PIXELS_TO = 1000
"""Scale of the boxes of the rows of ROLL's files."""
MANAGER = "env_manager_cls"
VL = re.compile(r"\.VLTrajEnvManager$")
COLUMNS = {"messages": "prompt", "images": "images", "tag": "data_source", "ground_truth": "reward_model.ground_truth"}
"""Columns that ROLL's pipeline for pictures always reads."""
FREEZE = "freeze_module_prefix"
FROZEN = {"vision_model": "all", "vision_model.blocks,vision_model.patch_embed": "tower"}
"""Parts of the tower, as Megatron's models call them, with the value of `freeze_vision`."""
BOUNDED = (
    "pretrain: pictures are resized within the bounds of the model's preprocessor_config.json; ROLL's bounds are "
    "56 x 56 and 1024 x 1024 pixels; set size there for the same"
)
CACHE, CACHE_GB = "disable_mm_preprocessor_cache", "mm_processor_cache_gb"
"""vLLM's key of old versions, and the one that replaced it."""


def picture_faults(values: Mapping[str, Any]) -> list[Fault]:
    """Return a fault for each key, class or strategy of video or diffusion models, and for bounds of pixels."""
    owners = (ROLE, "validation", "rewards.*")
    patterns = ["*", *(f"{owner}.{key}" for owner in owners for key in ("worker_cls", *(f"{s}.*" for s in SECTIONS)))]
    faults = []
    for place, block in (one for pattern in patterns for one in matches(values, pattern.split("."))):
        key, value = str(place[-1]), block[place[-1]]
        if place[-2:] == OWN_KEY:
            continue
        refused = VALUES.get(key)
        if value is not None and BOUNDS.match(key):
            problem = f"{printable(value)}: roll takes the bounds of a picture's pixels from the model's folder"
            faults.append(Fault(dotted(place), problem, f"remove it, and {IN_FILE}", "not_supported"))
        elif key == "template" and TEMPLATES.search(str(value)):
            problem = (
                f"{printable(value)}: only the pipelines sft, dpo, reward_model and rlvr train models that see pictures"
            )
            faults.append(Fault(dotted(place), problem, REMEDY, "not_supported"))
        elif KEYS.match(key) and value is not None or len(place) > 1 and refused and refused.search(str(value)):
            problem = (
                f"{printable(value)}: roll has no counterpart to this part of ROLL's for images, video or diffusion"
            )
            faults.append(Fault(dotted(place), problem, REMEDY, "not_supported"))
    faults += _managed(values)
    if is_of_pictures(values):
        faults += _unseen(_model(values))
    return faults


def _managed(values: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a fault if the file has environments that show pictures."""
    found = [place for place, block in matches(values, ("custom_envs", "*", MANAGER)) if VL.search(str(block[MANAGER]))]
    if found:
        problem = (
            f"the environments {', '.join(tag for _, tag, _ in found)} show pictures, and those of roll's own do not"
        )
        yield Fault(
            "custom_envs",
            problem,
            "use TrajEnvManager and environments of text, or write an environment that shows pictures",
            "not_supported",
        )


def _unseen(name: str) -> list[Fault]:
    """Return a fault if the model sees pictures, but roll has no tower for it."""
    found = (why for pattern, why in UNSEEN.items() if pattern.search(name))
    return [Fault("pretrain", f"{printable(name)} is {why}", SEEING_MODEL, "not_supported") for why in [*found][:1]]


def is_of_pictures(values: Mapping[str, Any]) -> bool:
    """Return whether a file is one of ROLL's RLVR with pictures: a reward is about them, or its model sees."""
    classes = [str(block[place[-1]]) for place, block in matches(values, ("rewards", "*", "worker_cls"))]
    of_roll = [name for name in classes if name.startswith(ROLLS)]
    return any(DETECTION.search(name) for name in of_roll) or bool(of_roll and SEES.search(_model(values)))


@dataclass(frozen=True)
class Read:
    """What came of the translation."""

    keys: list[str]
    """Patterns of the keys that only ROLL has."""
    warnings: list[str]


def translate_pictures(values: dict[str, Any]) -> Read:
    """Translate in place what ROLL's pipeline for pictures fixes in its code, and its keys about pictures."""
    done = Read([], [BOUNDED])
    _columns(values, done)
    _frozen(values, done)
    _cache(values, done)
    return done


def _model(values: Mapping[str, Any]) -> str:
    """Return the last part of the model's name, without its folder or organisation."""
    return str(values.get("pretrain") or "").rstrip("/").rpartition("/")[2]


def in_pixels(block: dict[str, Any]) -> list[str]:
    """Add to a domain with the reward `BOXES` that boxes are in pixels, unless it is set. Return warnings."""
    arguments = block.setdefault("reward_args", {})
    if not isinstance(arguments, dict) or "pixels_to" in arguments:
        return []
    arguments["pixels_to"] = PIXELS_TO
    return [f"reward_args.pixels_to: not set, so it is {PIXELS_TO}, as in ROLL with Qwen2.5-VL; set it explicitly"]


def _columns(values: Mapping[str, Any], done: Read) -> None:
    role = values.get("actor_train")
    rows = role.get("data_args") if isinstance(role, dict) else None
    if not isinstance(rows, dict) or "file_name" not in rows or "prompt" in rows:
        return
    for key, column in COLUMNS.items():
        if key not in rows:
            rows[key] = column
            said = f"missing, so it is {column}, the column that ROLL always reads; set it explicitly"
            done.warnings.append(f"actor_train.data_args.{key}: {said}")


def _frozen(values: Mapping[str, Any], done: Read) -> None:
    for place, block in matches(values, (ROLE, "model_args", FREEZE)):
        if isinstance(value := block[FREEZE], str) and value in FROZEN:
            del block[FREEZE]
            done.keys.append(f"<role>.model_args.{FREEZE}")
            block.setdefault("freeze_vision", FROZEN[value])
            target = f"{dotted(place[:-1])}.freeze_vision={block['freeze_vision']}"
            done.warnings.append(f"{dotted(place)}: {printable(value)} is read as {target}; use that instead")


def _cache(values: Mapping[str, Any], done: Read) -> None:
    for place, block in matches(values, (ROLE, "strategy_args", "strategy_config", CACHE)):
        done.keys.append(f"<role>.strategy_args.strategy_config.{CACHE}")
        if block.pop(CACHE) is True:
            block["engine_args"] = {CACHE_GB: 0} | (block.get("engine_args") or {})
            done.warnings.append(f"{dotted(place)}: true is read as engine_args.{CACHE_GB}=0; use that instead")
        else:
            done.warnings.append(f"{dotted(place)}: false is what roll always does; remove the key")
