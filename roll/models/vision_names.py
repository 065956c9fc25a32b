"""The names of a vision tower and of its projector in a model of transformers."""

from __future__ import annotations

TOWERS = ("visual", "vision_model", "vision_tower")
"""Names of the vision tower within the base model of transformers."""
PROJECTOR_NAMES = ("connector", "multi_modal_projector")
"""Names of the projector where it is no part of the tower."""


def is_of_vision(name: str) -> bool:
    """Return whether a module or a parameter of this name belongs to a vision tower or its projector."""
    return any(part in (*TOWERS, *PROJECTOR_NAMES) for part in name.split("."))
