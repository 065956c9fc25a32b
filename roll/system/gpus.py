"""The GPUs of this machine, as NVIDIA's driver describes them."""

from __future__ import annotations

from pathlib import Path

GPUS = Path("/proc/driver/nvidia/gpus")
"""Folder in which NVIDIA's driver describes each GPU."""


def driver_gpus() -> list[str]:
    """Return the model name of each GPU; empty without NVIDIA's driver."""
    return [_model(path) for path in sorted(GPUS.glob("*/information"))]


def _model(information: Path) -> str:
    lines = information.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("Model:")), "GPU")
