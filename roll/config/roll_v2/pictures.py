"""Refuses ROLL's keys and pipelines for images, video and diffusion models, before any other check."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from roll.config.schema.faults import printable
from roll.config.schema.fields import dotted
from roll.config.schema.foreign_names import ROLES
from roll.errors import Fault

REMEDY = "use models, rows and rewards that are only text"
CLASSES = re.compile(r"(Detection|Video|Vlm|VLM|Geo3k|Diffusion|Image)\w*$")
"""Ends of the names of ROLL's worker classes."""
TEMPLATES = re.compile(r"(^|[-_])vl([-_]|$)", re.IGNORECASE)
KEYS = re.compile(r"(image|images|video|videos|vlm|max_pixels|min_pixels|wan|diffusion)(_|$)")
SECTIONS = ("model_args", "data_args", "strategy_args", "generating_args")


def picture_faults(values: Mapping[str, Any]) -> list[Fault]:
    """Return a fault for each key, class, template or strategy that is about images, video or diffusion models."""
    found = [*_keys((), values), *_blocks(values)]
    return [
        Fault(dotted(place), f"{printable(value)}: roll does not support images, video or diffusion models", REMEDY)
        for place, value in found
    ]


def _blocks(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    rewards = values.get("rewards")
    blocks = {(role,): values.get(role) for role in (*ROLES, "validation")}
    blocks |= {("rewards", name): block for name, block in rewards.items()} if isinstance(rewards, dict) else {}
    for place, block in blocks.items():
        if not isinstance(block, dict):
            continue
        if CLASSES.search(str(block.get("worker_cls", ""))):
            yield (*place, "worker_cls"), block["worker_cls"]
        for name in SECTIONS:
            section = block.get(name)
            if isinstance(section, dict):
                yield from _section((*place, name), section)


def _section(place: tuple[str, ...], section: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield from _keys(place, section)
    for key, is_of_pictures in (
        ("template", lambda text: TEMPLATES.search(text)),
        ("strategy_name", lambda text: text.startswith("diffusion")),
        ("model_type", lambda text: text.startswith("diffusion")),
    ):
        value = section.get(key)
        if isinstance(value, str) and is_of_pictures(value):
            yield (*place, key), value


def _keys(place: tuple[str, ...], block: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in block.items():
        if value is not None and KEYS.match(str(key)):
            yield (*place, str(key)), value
