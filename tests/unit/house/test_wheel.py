"""The wheel contains all files that the package reads, and no tests. tests/integration/test_wheel.py installs a
wheel.
"""

from __future__ import annotations

from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[3]
PLACES = {"roll": "roll", "examples": "roll/_examples", "requirements": "roll/_requirements"}


def test_wheel_holds_package_and_examples() -> None:
    packed = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    here = {
        f"{place}/{file.relative_to(ROOT / folder)}"
        for folder, place in PLACES.items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert packed == here
    assert {
        "roll/py.typed",
        "roll/config/schema/foreign_names.yaml",
        "roll/_examples/config/deepspeed_zero3.yaml",
        "roll/_requirements/cpu.lock",
    } <= packed
